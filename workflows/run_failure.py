"""Why a campaign failed: the step that could not be retried, its exit code, and the last words of its log."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from steps.errors import Interrupted, StepError
from workflows.local.status import NodeStatus, WorkflowStatus, load_status

LOG = "main.log"
BUG_LINES = 25
KILLED_CODES = {"-1", "137", "143"}
ATTEMPT_SUFFIX = re.compile(r"\(\d+\)$")
KNOWN_CODES = {"64", "65", "69", "75", "78"}


class RunFailed(StepError):
    """A step of the run failed for good; `exit_code` is the step's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """`what` names the step, `why` is one line, `log` is the file; `tail` is what a bug left there."""

    what: str
    why: str
    exit_code: int
    log: Path | None = None
    tail: str = ""


def explain_failure(executor_root: Path, campaign: WorkflowStatus) -> Failure:
    """Look through the campaign and the iterations that it started."""
    for status in (*_failed_iterations(executor_root, campaign), campaign):
        node = _fatal_node(status)
        if node is not None:
            return _explain(status, node)
        if status.message:
            return Failure(what=f"workflow {status.name}", why=status.message, exit_code=1)
    return Failure(what=f"workflow {campaign.name}", why=campaign.phase, exit_code=1)


def _failed_iterations(executor_root: Path, campaign: WorkflowStatus) -> Iterator[WorkflowStatus]:
    for folder in sorted(executor_root.glob(f"{campaign.name}-*"), reverse=True):
        status = load_status(executor_root, folder.name)
        if status is not None and status.phase in {"Failed", "Error"}:
            yield status


def _fatal_node(status: WorkflowStatus) -> NodeStatus | None:
    """The last node that failed, of itself and not through its children, and was not made good by a later attempt."""
    own = (node for node in status.nodes.values() if node.type == "Pod" or node.error_code)
    fatal = [node for node in own if node.unsuccessful and _stayed_failed(status, node)]
    return max(fatal, key=lambda node: node.finished_s, default=None)


def _stayed_failed(status: WorkflowStatus, node: NodeStatus) -> bool:
    retried = status.nodes.get(ATTEMPT_SUFFIX.sub("", node.name))
    return retried is None or retried.unsuccessful


def _explain(status: WorkflowStatus, node: NodeStatus) -> Failure:
    log = Path(node.folder) / LOG if node.folder else None
    lines = _lines(log) if _failed_in_process(node) else []
    code = _exit_code(node)
    why = lines[-1] if lines else node.message or node.phase
    is_bug = code == 1 and len(lines) > 1
    step = ATTEMPT_SUFFIX.sub("", node.display_name or node.name)
    return Failure(
        what=f"{step} of {status.name} failed (exit {node.own_code if _failed_in_process(node) else code})",
        why=why,
        exit_code=code,
        log=log if lines else None,
        tail="\n".join(lines[-BUG_LINES:]) if is_bug else "",
    )


def _failed_in_process(node: NodeStatus) -> bool:
    """Its own process ended badly: not a child workflow's node, none that could not start, no missing output."""
    return bool(node.folder) and not node.error_code and node.own_code not in {"", "0"}


def _exit_code(node: NodeStatus) -> int:
    """The step's own code where it has a meaning for the user, 1 for any other; killed counts as interrupted."""
    if node.error_code:
        return node.error_code
    if node.own_code in KILLED_CODES:
        return Interrupted.exit_code
    return int(node.own_code) if _failed_in_process(node) and node.own_code in KNOWN_CODES else 1


def _lines(log: Path | None) -> list[str]:
    """Lines of the log that are not blank; none when there is no log."""
    if log is None or not log.is_file():
        return []
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
