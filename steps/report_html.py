"""A report as one static HTML page: no scripts and nothing loaded, as the Argo artifact viewer demands.

The input is the dict of `steps.reporting.build_run_report`; nothing else is read.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import tomli_w

from steps.report_accounting import accounting_section
from steps.report_charts import Bar, Point, Series, heat_map, legend, line_chart, no_data, stacked_bars, timeline
from steps.report_engine import engine_section
from steps.report_experts import exchange_section, layer_section, transport_sections
from steps.report_notes import run_notes
from steps.report_parts import bullet_list, count_text, number_text, pairs_table, seconds_text, section, table
from steps.report_style import PHASE_COLOURS, STYLE

MAX_TIMELINES = 60
ITERATION_PHASES = {name: colour for name, colour in PHASE_COLOURS.items() if name != "init_run"}


def render_run_html(report: Mapping[str, Any]) -> str:
    """The page of a whole run."""
    iterations: Sequence[Mapping[str, Any]] = report["iterations"]
    learning = section("Reward", _reward_hint(report), _reward_chart(report))
    phases = section(
        "Seconds of each phase",
        "Seconds in which at least one attempt of the phase ran.",
        legend(_used_phases(iterations)) + _phase_chart(iterations),
    )
    throughput = [
        section("Rollout", "Generated tokens per second.", _metric_chart(iterations, "rollout_tokens_per_s", "--blue")),
        section("Training", "Samples per second.", _metric_chart(iterations, "train_samples_per_s", "--aqua")),
    ]
    body = [
        _header(report["run_id"], _run_lead(report)),
        _tiles(_run_tiles(report)),
        f'<div class="grid2">{learning}{phases}</div>',
        f'<div class="grid2">{"".join(throughput)}</div>',
        _experts(iterations),
        exchange_section(iterations),
        section("Iterations", "Version 0 is the policy before the first update.", _iteration_table(report)),
        accounting_section(iterations),
        _timelines(report),
        section("Notes", "", bullet_list(run_notes(report))),
        section("Configuration", f"sha256 {report['config_hash'][:12]}", _settings(report["config"])),
        section("Versions", "", pairs_table(report["versions"])),
    ]
    return _page(f"{report['run_id']} · argo-moe-rl", body)


def render_iteration_html(report: Mapping[str, Any], iteration: int) -> str:
    """The page of one iteration; raises ValueError if the report has no such iteration."""
    row = next((row for row in report["iterations"] if row["iteration"] == iteration), None)
    if row is None:
        raise ValueError(f"iteration {iteration} is not in the report of {report['run_id']}: plan it first")
    load = heat_map(row["expert_load"]) if row["expert_load"] else no_data()
    body = [
        _header(f"{report['run_id']} · iteration {iteration}", _iteration_lead(row)),
        _tiles(_iteration_tiles(row)),
        section("Timeline", "Every attempt of every step. ↯ interrupted, ✕ failed.", _timeline(row["attempts"])),
        section("Expert load", "Share of routed tokens relative to a balanced share (1.00).", load),
        layer_section(row["router_layers"]),
        transport_sections(row),
        engine_section(row),
        section("Reward so far", _reward_hint(report), _reward_chart(report)),
        section("Attempts", "", _attempt_table(row["attempts"])),
    ]
    return _page(f"{report['run_id']} · iteration {iteration}", body)


def _page(title: str, body: Sequence[str]) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _header(title: str, lead: str) -> str:
    return f'<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header>'


def _tiles(tiles: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in tiles
    )
    return f'<div class="tiles">{items}</div>'


def _run_lead(report: Mapping[str, Any]) -> str:
    config = report["config"]
    model = config["model"]
    shape = f"{model['num_experts']} experts, top-{model['num_experts_per_token']}, {model['num_layers']} layers"
    task = config["task"]["kind"].replace("_", " ")
    about = config["description"] or f"{config['train']['loss']['algorithm'].upper()} on {task}"
    return f"{about} · {shape} · seed {config['seed']} · {report['state']}"


def _run_tiles(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    iterations, initial = report["iterations"], report["initial"]
    scores = [row["reward_eval"] for row in (initial, *iterations) if row["reward_eval"] is not None]
    reward = f"{scores[0]:.3f} → {scores[-1]:.3f}" if scores else "–"
    validated = sum(1 for row in iterations if row["validated"])
    return [
        (reward, "held-out reward, first → last"),
        (f"{validated} of {len(iterations)}", "updates validated"),
        (seconds_text(report["wall_seconds"]), "wall time"),
        (count_text(sum(row["samples"] or 0 for row in iterations)), "samples generated"),
        (count_text(sum(row["tokens"] or 0 for row in iterations)), "tokens generated"),
        (f"{_total(report, 'interruptions')} / {_total(report, 'retries')}", "interruptions / retries"),
    ]


def _total(report: Mapping[str, Any], key: str) -> int:
    return sum(int(row[key]) for row in (report["initial"], *report["iterations"]))


def _iteration_lead(row: Mapping[str, Any]) -> str:
    return f"Policy version {row['sampled_from']} → {row['policy_version']} · {_verdict_text(row)}"


def _iteration_tiles(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (number_text(row["reward_mean"], 3), "reward of the samples"),
        (number_text(row["reward_eval"], 3), "held-out reward"),
        (seconds_text(row["wall_seconds"]), "wall time"),
        (count_text(row["samples"]), "samples"),
        (count_text(row["rollout_tokens_per_s"]), "rollout tokens/s"),
        (number_text(row["expert_max_violation"], 2), "expert max violation"),
        (f"{row['interruptions']} / {row['retries']}", "interruptions / retries"),
    ]


def _reward_hint(report: Mapping[str, Any]) -> str:
    hint = "Samples at the version that generated them; held-out greedy at the version evaluated."
    rejected = any(row["validated"] is False for row in report["iterations"])
    return hint + (" Ringed in red: rejected by the gate." if rejected else "")


def _reward_chart(report: Mapping[str, Any]) -> str:
    iterations = report["iterations"]
    sampled = [
        Point(x=row["sampled_from"], y=row["reward_mean"], label=f"version {row['sampled_from']}")
        for row in iterations
        if row["reward_mean"] is not None
    ]
    heldout = [
        Point(
            x=row["policy_version"],
            y=row["reward_eval"],
            label=f"version {row['policy_version']} ({_verdict_text(row)})",
            hollow=row["validated"] is False and row["policy_version"] > 0,
        )
        for row in (report["initial"], *iterations)
        if row["reward_eval"] is not None
    ]
    series = [
        Series(name="held-out (greedy)", colour="--violet", points=heldout),
        Series(name="samples (mean)", colour="--blue", points=sampled),
    ]
    chart = line_chart([line for line in series if line.points], x_label="policy version", y_max=1.0)
    return legend({line.name: line.colour for line in series}) + chart


def _phase_chart(iterations: Sequence[Mapping[str, Any]]) -> str:
    columns = [(str(row["iteration"]), row["phase_seconds"]) for row in iterations]
    return stacked_bars(columns, ITERATION_PHASES, x_label="iteration")


def _used_phases(iterations: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {n: c for n, c in ITERATION_PHASES.items() if any(row["phase_seconds"].get(n) for row in iterations)}


def _metric_chart(iterations: Sequence[Mapping[str, Any]], key: str, colour: str) -> str:
    points = [
        Point(x=row["iteration"], y=row[key], label=f"iteration {row['iteration']}")
        for row in iterations
        if row[key] is not None
    ]
    return line_chart([Series(name=key, colour=colour, points=points)], x_label="iteration", height=190)


def _experts(iterations: Sequence[Mapping[str, Any]]) -> str:
    loaded = [row for row in iterations if row["expert_load"]]
    heat = heat_map(loaded[-1]["expert_load"]) if loaded else no_data()
    title = f"Expert load, iteration {loaded[-1]['iteration']}" if loaded else "Expert load"
    balance = _metric_chart(iterations, "expert_max_violation", "--orange")
    left = section(title, "Routed tokens relative to a balanced share (1.00).", heat)
    right = section("Expert balance", "Max violation: (largest load - mean) / mean, worst layer; 0 is even.", balance)
    return f'<div class="grid2">{left}{right}</div>'


def _timelines(report: Mapping[str, Any]) -> str:
    rows = [report["initial"], *report["iterations"]]
    if len(rows) > MAX_TIMELINES:
        rows = [row for row in rows if row["interruptions"] or row["retries"]][: MAX_TIMELINES - 1] + [rows[-1]]
    blocks = []
    for row in rows:
        name = f"Iteration {row['iteration']}" if row["iteration"] else "Warm start"
        trouble = f" · interruptions {row['interruptions']}, retries {row['retries']}" if row["retries"] else ""
        is_open = " open" if row is rows[-1] or row["retries"] else ""
        blocks.append(
            f"<details{is_open}><summary>{name} · {seconds_text(row['wall_seconds'])}{trouble}</summary>"
            f"{_timeline(row['attempts'])}</details>"
        )
    return section("Timelines", "Every attempt of every step. ↯ interrupted, ✕ failed.", "".join(blocks))


def _timeline(attempts: Sequence[Mapping[str, Any]]) -> str:
    if not attempts:
        return no_data()
    start = min(attempt["start_s"] for attempt in attempts)
    bars = [
        Bar(
            row=_attempt_name(attempt),
            start_s=attempt["start_s"] - start,
            end_s=_last_moment(attempt, attempts) - start,
            colour=PHASE_COLOURS.get(attempt["step"], "--slate"),
            state=attempt["state"],
            label=_attempt_label(attempt, start),
        )
        for attempt in attempts
    ]
    return timeline(bars)


def _last_moment(attempt: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> float:
    """The end of an attempt; of one that was killed the start of the next one, of a running one the last of all."""
    if attempt["end_s"] is not None:
        return float(attempt["end_s"])
    name, number = _attempt_name(attempt), attempt["attempt"]
    later = [other["start_s"] for other in attempts if _attempt_name(other) == name and other["attempt"] > number]
    return float(min(later) if later else max(other["end_s"] or other["start_s"] for other in attempts))


def _attempt_name(attempt: Mapping[str, Any]) -> str:
    worker = attempt["worker"]
    return str(attempt["step"]) if worker is None else f"{attempt['step']} {worker}"


def _unended(attempt: Mapping[str, Any]) -> str:
    """What an attempt without an end is; empty for one that has ended."""
    if attempt["end_s"] is not None:
        return ""
    return "running" if attempt["state"] == "running" else "killed"


def _attempt_label(attempt: Mapping[str, Any], start: float) -> str:
    seconds = _unended(attempt) or f"{attempt['end_s'] - attempt['start_s']:.2f} s"
    code = "" if attempt["exit_code"] is None else f", exit {attempt['exit_code']}"
    begin = attempt["start_s"] - start
    return f"{_attempt_name(attempt)}, attempt {attempt['attempt']}: {seconds} from {begin:.2f} s{code}"


ITERATION_COLUMNS = (
    "version", "samples' reward", "held-out", "validated", "wall", "rollout", "reward", "train", "other",
    "tokens/s", "train samples/s", "max violation", "interr. / retries",
)  # fmt: skip


def _iteration_table(report: Mapping[str, Any]) -> str:
    rows = [_iteration_cells(row) for row in (report["initial"], *report["iterations"])]
    return table(ITERATION_COLUMNS, rows)


def _iteration_cells(row: Mapping[str, Any]) -> list[str]:
    phases = row["phase_seconds"]
    main = ("rollout", "reward", "train")
    other = sum(seconds for name, seconds in phases.items() if name not in main)
    return [
        str(row["policy_version"]),
        number_text(row["reward_mean"], 3),
        number_text(row["reward_eval"], 3),
        _verdict(row),
        seconds_text(row["wall_seconds"]),
        *(seconds_text(phases.get(name)) for name in main),
        seconds_text(other),
        count_text(row["rollout_tokens_per_s"]),
        count_text(row["train_samples_per_s"]),
        number_text(row["expert_max_violation"], 2),
        f"{row['interruptions']} / {row['retries']}",
    ]


def _attempt_table(attempts: Sequence[Mapping[str, Any]]) -> str:
    header = ("step", "attempt", "seconds", "exit", "capacity", "node", "detail")
    rows = [
        [
            escape(_attempt_name(a)),
            str(a["attempt"]),
            _unended(a) or number_text(a["end_s"] - a["start_s"], 2),
            "–" if a["exit_code"] is None else str(a["exit_code"]),
            escape(a["capacity_type"] or "–"),
            escape(a["node"] or "–"),
            escape(a["detail"] or ""),
        ]
        for a in attempts
    ]
    return table(header, rows, "text")


def _verdict(row: Mapping[str, Any]) -> str:
    if row["validated"] is None:
        return "–"
    return '<span class="yes">✓ yes</span>' if row["validated"] else '<span class="no">✕ rejected</span>'


def _verdict_text(row: Mapping[str, Any]) -> str:
    if row["validated"] is None:
        return "not evaluated"
    verdict = "validated" if row["validated"] else "rejected"
    return f"{verdict}: {row['validation_reason']}" if row.get("validation_reason") else verdict


def _settings(config: Mapping[str, Any]) -> str:
    return f"<details><summary>All settings</summary><pre>{escape(tomli_w.dumps(_named_none(config)))}</pre></details>"


def _named_none(value: Any) -> Any:
    """TOML has no null: our configurations say "none"."""
    if isinstance(value, Mapping):
        return {key: _named_none(item) for key, item in value.items()}
    return "none" if value is None else value
