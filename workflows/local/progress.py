"""What a person sees while workflows run here: a live tree on a terminal, one line a change elsewhere."""

import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

from rich.console import Console, ConsoleRenderable
from rich.live import Live
from rich.table import Table
from rich.text import Text

from workflows.local.events import Event

_STYLES = {
    "Pending": "dim",
    "Running": "cyan",
    "Succeeded": "green",
    "Failed": "red",
    "Error": "red",
    "Skipped": "dim",
    "Omitted": "dim",
}
_SIGNS = {
    "Pending": "◌",
    "Running": "●",
    "Succeeded": "✔",
    "Failed": "✖",
    "Error": "✖",
    "Skipped": "○",
    "Omitted": "○",
}
_RESERVED_LINES = 4  # the table's head and some air


@dataclass(slots=True)
class _Row:
    event: Event
    depth: int
    started_s: float = 0.0
    ended_s: float = 0.0

    def update(self, event: Event) -> None:
        self.event = event
        if event.phase == "Running" and not self.started_s:
            self.started_s = event.time_s
        self.ended_s = event.time_s if event.phase not in ("Pending", "Running") else 0.0

    def elapsed(self) -> str:
        if not self.started_s:
            return ""
        seconds = (self.ended_s or time.time()) - self.started_s
        return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


@dataclass(slots=True)
class _Tree:
    """One workflow: its own row and its nodes by name, in order of appearance; attempts update their Retry node."""

    row: _Row
    nodes: dict[str, _Row] = field(default_factory=dict)

    def update(self, event: Event) -> None:
        name = event.node_name
        if name == event.workflow and event.node_type in ("DAG", "Steps"):
            return  # the workflow's own row says it already
        retried = name.rpartition("(")[0]
        if event.node_type == "Pod" and retried in self.nodes and self.nodes[retried].event.node_type == "Retry":
            self.update_attempt(self.nodes[retried], event)
            return
        parent = self.nodes.get(event.parent)
        row = self.nodes.setdefault(name, _Row(event, parent.depth + 1 if parent else 1))
        row.update(event)

    def update_attempt(self, row: _Row, event: Event) -> None:
        """Shows the attempt that runs now in the row of its Retry node."""
        shown = row.event
        phase = "Running" if event.phase not in ("Pending", "Running") else event.phase
        row.update(
            Event(
                kind="node",
                workflow=event.workflow,
                node_name=shown.node_name,
                display_name=shown.display_name,
                template=shown.template,
                phase=phase,
                message=event.message,
                progress=event.progress,
                attempt=event.attempt,
                node_type="Retry",
                parent=shown.parent,
                time_s=event.time_s,
            )
        )


class ProgressView:
    """`on_event` is LocalCluster's callback. Call `close`, or use a `with` block; the last picture stays.

    console: where to draw, standard error by default, so that standard output stays the command's own.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console = console or Console(stderr=True)
        self._trees: dict[str, _Tree] = {}
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(get_renderable=self.render, console=console, refresh_per_second=4, transient=False)
            self._live.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on_event(self, event: Event) -> None:
        if self._live is None:
            self._print(event)
            return
        if event.kind == "workflow":
            tree = self._trees.setdefault(event.workflow, _Tree(_Row(event, 0)))
            tree.row.update(event)
        elif event.workflow in self._trees:
            self._trees[event.workflow].update(event)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self) -> ConsoleRenderable:
        """Finished workflows as one row each; the nodes of those that run, the newest where the screen is short."""
        rows: list[_Row] = []
        for tree in list(self._trees.values()):
            rows.append(tree.row)
            if tree.row.event.phase == "Running":
                rows.extend(list(tree.nodes.values()))
        table = Table(box=None, pad_edge=False)
        for heading in ("step", "phase", "progress", "elapsed", ""):
            table.add_column(heading, no_wrap=True, overflow="ellipsis")
        for row in rows[-max(1, self._console.height - _RESERVED_LINES) :]:
            table.add_row(*_cells(row))
        return table

    def _print(self, event: Event) -> None:
        if event.message == "kept" or (event.kind == "node" and event.node_type not in ("Pod", "Skipped")):
            return
        if event.kind == "progress" or event.phase == "Pending":
            return
        clock = datetime.fromtimestamp(event.time_s).strftime("%H:%M:%S")
        name = f"{event.workflow} {_title(event)}".strip()
        line = f"{clock} {name} {event.phase}{_attempt(event)} {event.message}".rstrip()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _title(event: Event) -> str:
    """The display name, without the attempt's number that a retried pod's name ends with."""
    suffix = f"({event.attempt})"
    return event.display_name.removesuffix(suffix) if event.node_type == "Pod" else event.display_name


def _attempt(event: Event) -> str:
    return f" (attempt {event.attempt + 1})" if event.attempt else ""


def _cells(row: _Row) -> tuple[Text, Text, str, str, Text]:
    event = row.event
    style = _STYLES.get(event.phase, "")
    name = _title(event) if event.node_name else event.workflow
    return (
        Text("  " * row.depth + f"{_SIGNS.get(event.phase, '?')} {name}", style=style),
        Text(event.phase + _attempt(event), style=style),
        event.progress,
        row.elapsed(),
        Text(event.message, style="dim"),
    )
