"""A run on a terminal: the tree of its iterations, and one line for each change where there is no terminal."""

from collections.abc import Iterator
from datetime import UTC, datetime

from rich.console import Group
from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from workflows.cluster.status import IterationView, RunView, StepView, seconds_of

COLOURS = {"Succeeded": "green", "Running": "cyan", "Failed": "red", "Error": "red"}
MESSAGE_LENGTH = 100


def run_tree(view: RunView, now: datetime | None = None, most: int | None = None) -> Group:
    """Iterations in order, with the steps of one that did not succeed; the last `most`, for a terminal to hold them."""
    moment = now or datetime.now(UTC)
    tree = Tree(_heading(view, moment), guide_style="dim")
    before = [step for step in view.steps if step.step == "init"]
    for step in before:
        tree.add(_step_line(step, moment))
    hidden = 0 if most is None else max(len(view.iterations) - most, 0)
    if hidden:
        tree.add(f"[dim]{hidden} earlier iterations[/]")
    for iteration in view.iterations[hidden:]:
        branch = tree.add(_iteration_line(iteration, moment))
        if iteration.phase != "Succeeded":
            for step in iteration.steps:
                branch.add(_step_line(step, moment))
    for step in view.steps:
        if step not in before:
            tree.add(_step_line(step, moment))
    notes = [Text(f"failed  {view.failure}", style="red")] if view.failure else []
    notes += [Text(f"MLflow  {view.outputs['mlflow-url']}")] if view.outputs.get("mlflow-url") else []
    return Group(tree, *notes)


def changes(before: RunView | None, after: RunView) -> Iterator[str]:
    """One line for each phase that is new, in the order of the pipeline."""
    known = {} if before is None else dict(_phases(before))
    for place, line in _phase_lines(after):
        if known.get(place[0]) != place[1]:
            yield line


def _phases(view: RunView) -> Iterator[tuple[str, str]]:
    yield from (place for place, _ in _phase_lines(view))


def _phase_lines(view: RunView) -> Iterator[tuple[tuple[str, str], str]]:
    """((what, its phase), the line about it)."""
    for iteration in view.iterations:
        for step in iteration.steps:
            what = f"iteration {iteration.iteration}: {step.name}"
            yield (what, step.phase), _joined(f"{what} {step.phase}", _attempts(step), step.message)
        what = f"iteration {iteration.iteration}"
        yield (what, iteration.phase), _joined(f"{what} {iteration.phase}", *_scores(iteration), iteration.message)
    for step in view.steps:
        yield (step.name, step.phase), _joined(f"{step.name} {step.phase}", _attempts(step), step.message)
    yield ("run", view.phase), _joined(f"run {view.run_id} {view.phase}", view.message)


def _joined(*parts: str) -> str:
    return ", ".join(" ".join(part.split()) for part in parts if part)


def _heading(view: RunView, now: datetime) -> str:
    total = "?" if view.iterations_total is None else view.iterations_total
    state = "stopping" if view.stopping else "suspended" if view.suspended else view.phase
    parts = [
        f"[bold]{view.run_id}[/]",
        _coloured(state, view.phase),
        f"{view.iterations_done} of {total} iterations",
        _duration(view.started_at, view.finished_at, now),
        f"[dim]workflow {view.workflow}, namespace {view.namespace}[/]",
        "" if view.failure else _message(view.message),
    ]
    return "  ".join(part for part in parts if part)


def _iteration_line(view: IterationView, now: datetime) -> str:
    parts = [
        f"iteration {view.iteration}",
        _coloured(view.phase, view.phase),
        *_scores(view),
        _duration(view.started_at, view.finished_at, now),
        _message(view.message),
    ]
    return "  ".join(part for part in parts if part)


def _scores(view: IterationView) -> Iterator[str]:
    if view.reward_mean is not None:
        yield f"sample reward {view.reward_mean:.3f}"
    if view.reward_eval is not None:
        yield f"held-out {view.reward_eval:.3f}"
    if validated := view.outputs.get("validated"):
        yield "validated" if validated.lower() == "true" else "rejected"


def _step_line(step: StepView, now: datetime) -> str:
    parts = [
        escape(step.name),
        _coloured(step.phase, step.phase),
        step.progress if step.phase == "Running" and step.progress not in ("", "0/1", "1/1") else "",
        _attempts(step),
        _duration(step.started_at, step.finished_at, now),
        _message(step.message),
    ]
    return "  ".join(part for part in parts if part)


def _attempts(step: StepView) -> str:
    return f"attempt {step.attempts}" if step.attempts > 1 else ""


def _message(text: str) -> str:
    one_line = " ".join(text.split())
    short = one_line if len(one_line) <= MESSAGE_LENGTH else f"{one_line[:MESSAGE_LENGTH]}..."
    return f"[dim]{escape(short)}[/]" if short else ""


def _coloured(text: str, phase: str) -> str:
    colour = COLOURS.get(phase, "yellow")
    return f"[{colour}]{text}[/]"


def _duration(started_at: str, finished_at: str, now: datetime) -> str:
    seconds = seconds_of(started_at, finished_at, now)
    if seconds is None:
        return ""
    minutes, rest = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
