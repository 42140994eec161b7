"""The live view: a tree on a terminal, lines elsewhere."""

import io
from pathlib import Path

from rich.console import Console

from tests.local_cluster import Cluster, call, step, workflow
from workflows.local.events import Event
from workflows.local.progress import ProgressView


def event(name: str, phase: str, node_type: str = "Pod", attempt: int = 0, **fields: str) -> Event:
    fields = {"workflow": "wf", "display_name": name.removeprefix("wf."), **fields}
    return Event(kind="node", node_name=name, phase=phase, node_type=node_type, attempt=attempt, **fields)  # type: ignore[arg-type]


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, height=20)


def shown(view: ProgressView) -> list[str]:
    sheet = console(terminal=False)
    sheet.print(view.render())
    return [line.rstrip() for line in sheet.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_lines_tell_pods_and_workflows_only(tmp_path: Path) -> None:
    target = console(terminal=False)
    retry = {"limit": "2", "expression": "true"}
    flaky = step("flaky", "flaky", "75", "1", "n", retryStrategy=retry)
    with ProgressView(target) as view, Cluster(tmp_path, on_event=view.on_event) as cluster:
        cluster.submit(workflow("wf", [{"name": "main", "steps": [[call("flaky")]]}, flaky]))
    lines = [line.partition(" ")[2] for line in target.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines == [
        "wf Running",
        "wf flaky Running",
        "wf flaky Failed main: Error (exit code 75)",
        "wf flaky Running (attempt 2)",
        "wf flaky Succeeded (attempt 2)",
        "wf Succeeded",
    ]


def test_the_tree_shows_attempts_in_the_row_of_their_node() -> None:
    with ProgressView(console(terminal=True)) as view:
        view.on_event(Event(kind="workflow", workflow="wf", phase="Running"))
        view.on_event(event("wf", "Running", "DAG", display_name="wf"))
        view.on_event(event("wf.roll", "Running", "Retry", parent="wf"))
        view.on_event(event("wf.roll(1)", "Running", attempt=1, parent="wf", progress="3/8"))
        rows = shown(view)
    assert [row.split()[1] for row in rows[1:]] == ["wf", "roll"]
    assert "Running (attempt 2)" in rows[-1] and "3/8" in rows[-1]
    assert rows[-1].index("●") > rows[-2].index("●")


def test_a_finished_workflow_folds_into_one_row() -> None:
    with ProgressView(console(terminal=True)) as view:
        for name in ("wf", "wf-1"):
            view.on_event(Event(kind="workflow", workflow=name, phase="Running"))
            view.on_event(event(f"{name}.a", "Succeeded", workflow=name, display_name="a"))
        view.on_event(Event(kind="workflow", workflow="wf-1", phase="Succeeded"))
        assert [row.split()[1] for row in shown(view)[1:]] == ["wf", "a", "wf-1"]


def test_a_short_screen_shows_the_newest_rows() -> None:
    with ProgressView(console(terminal=True)) as view:
        view.on_event(Event(kind="workflow", workflow="wf", phase="Running"))
        for number in range(50):
            view.on_event(event(f"wf.n{number}", "Succeeded"))
        rows = shown(view)
    assert len(rows) <= 20 and rows[-1].split()[1] == "n49"
