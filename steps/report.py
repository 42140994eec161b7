"""Write the report of an iteration, or of the run when no iteration is given: JSON and a static HTML page in the store.

The tracking server gets what is new, within `tracking.budget_s`; what it can't take stays in the spool and is sent by a
later report. A dead tracking server never fails this step.
"""

import json
from collections.abc import Sequence
from typing import Any

from steps import paths
from steps.adapters import ledger
from steps.adapters.spool import Event
from steps.arguments import positive_int, step_parser
from steps.entrypoint import StepContext, execute
from steps.errors import DataError
from steps.report_html import render_iteration_html, render_run_html
from steps.reporting import build_run_report
from steps.tracking_events import final_events, iteration_events, open_tracker, run_events


def report_iteration(context: StepContext, iteration: int) -> None:
    report = build_run_report(context.database, context.run_id)
    row = next((row for row in report["iterations"] if row["iteration"] == iteration), None)
    if row is None or row["reward_eval"] is None:
        raise DataError(f"iteration {iteration} is not evaluated yet; run evaluate first")
    html = render_iteration_html(report, iteration)
    _store(context, paths.iteration_report_key(context.run_id, iteration, "json"), json.dumps(row, indent=1))
    _store(context, paths.iteration_report_key(context.run_id, iteration, "html"), html)
    _store_run_page(context, report)
    metrics = ledger.get_iteration_metrics(context.database, context.run_id, iteration)
    publication = ledger.get_publication(context.database, context.run_id, iteration)
    events = iteration_events(
        row,
        metrics.get("train", {}).get("metrics", {}),
        run_id=context.run_id,
        publication_uri=publication.uri,
        html=html,
    )
    url = _track(context, [("00000-run", run_events(report, context.config)), (f"{iteration:05d}-iteration", events)])
    verdict = "validated" if row["validated"] else "rejected"
    summary = f"iteration {iteration}: held-out reward {row['reward_eval']:.3f}, {verdict}"
    _say_summary(context, summary, html, url)
    # Last: a campaign that finds this goes on with the next iteration.
    ledger.set_iteration_metrics(context.database, context.run_id, iteration, "report", {"summary": summary})


def report_run(context: StepContext) -> None:
    report = build_run_report(context.database, context.run_id)
    html = _store_run_page(context, report)
    judged = [row for row in [report["initial"], *report["iterations"]] if row["reward_eval"] is not None]
    if not judged:
        raise DataError(f"run {context.run_id} has no evaluated policy yet; run init_run or evaluate first")
    last = judged[-1]
    at_the_end = len(judged) == len(report["iterations"]) + 1  # otherwise an iteration is under way
    records = [(f"{last['policy_version']:05d}-run-end", final_events(report, html))]
    url = _track(context, records) if at_the_end else ""
    validated = sum(row["validated"] is True for row in judged[1:])
    summary = f"{len(judged) - 1} iterations, {validated} validated, held-out reward {last['reward_eval']:.3f}"
    _say_summary(context, summary, html, url)


def _store_run_page(context: StepContext, report: dict[str, Any]) -> str:
    html = render_run_html(report)
    _store(context, paths.run_report_key(context.run_id, "json"), json.dumps(report, indent=1))
    _store(context, paths.run_report_key(context.run_id, "html"), html)
    return html


def _store(context: StepContext, key: str, text: str) -> None:
    context.store.put_bytes(key, text.encode())


def _track(context: StepContext, records: Sequence[tuple[str, Sequence[Event]]]) -> str:
    """The page of the run on the tracking server; empty when that did not answer."""
    tracker = open_tracker(context)
    for name, events in records:
        tracker.record(name, events)
    result = tracker.forward()
    context.metrics.update(tracking_sent=result.sent, tracking_pending=result.pending)
    if result.pending:
        context.say(f"tracking: {result.pending} records wait in the spool ({result.reason})")
    if result.run_url:
        context.say(f"tracking: {result.run_url}")
    return result.run_url or ""


def _say_summary(context: StepContext, summary: str, html: str, url: str) -> None:
    context.say(summary)
    context.output("report.html", html)
    context.output("summary", summary)
    context.output("mlflow-url", url)


def main() -> None:
    parser = step_parser("report", __doc__, iteration=False)
    parser.add_argument("--iteration", type=positive_int, help="policy iteration, counted from 1; without it: the run")
    arguments = parser.parse_args()

    def body(context: StepContext) -> None:
        if arguments.iteration is None:
            report_run(context)
        else:
            report_iteration(context, arguments.iteration)

    execute("report", body, run_id=arguments.run, iteration=arguments.iteration)


if __name__ == "__main__":
    main()
