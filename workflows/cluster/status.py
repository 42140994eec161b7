"""What a person wants to know of a run on a cluster: its iterations with reward and phase, and what runs or failed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from steps.errors import DataError, Interrupted
from workflows.cluster.client import Cluster, Object
from workflows.cluster.runs import (
    CAMPAIGN_LABEL,
    CAMPAIGN_TEMPLATE,
    FINISHED,
    can_read_nodes,
    failed_leaf,
    find_campaigns,
    inputs_of,
    latest_campaign,
    name_of,
    outputs_of,
    parameters_of,
    phase_of,
    shown_nodes,
    step_of,
    template_name,
    unfinished_children,
)
from workflows.run_failure import KILLED_CODES, KNOWN_CODES

CHILD_STEP = "child"
"""The template of the campaign that starts one iteration and waits for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """One step, whatever number of attempts it took. Times are RFC 3339, empty while unknown."""

    name: str
    step: str
    phase: str
    message: str
    attempts: int
    progress: str
    started_at: str
    finished_at: str
    outputs: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationView:
    """One iteration. `reward_mean` is that of its samples, `reward_eval` that of held-out prompts."""

    iteration: int
    workflow: str
    phase: str
    message: str
    started_at: str
    finished_at: str
    outputs: dict[str, str]
    steps: tuple[StepView, ...] = ()

    @property
    def reward_eval(self) -> float | None:
        return _number(self.outputs.get("reward-eval"))

    @property
    def reward_mean(self) -> float | None:
        """Mean over the workers that scored something."""
        means = [_number(step.outputs.get("reward-mean")) for step in self.steps if step.step == "reward"]
        known = [mean for mean in means if mean is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run by its latest campaign; the iterations of earlier ones are in the list as well."""

    run_id: str
    namespace: str
    workflow: str
    phase: str
    message: str
    started_at: str
    finished_at: str
    stopping: bool
    suspended: bool
    iterations_total: int | None
    """That the latest campaign was to do; None while its first step has not said it."""
    iterations_done: int
    """Of the latest campaign."""
    steps: tuple[StepView, ...]
    iterations: tuple[IterationView, ...]
    outputs: dict[str, str]
    earlier: tuple[str, ...]
    """Names of the campaigns before."""
    failure: str = ""
    exit_code: int = 0
    """Of the step that ended a run that failed, as `steps.errors` lists them; 1 when none is to blame."""

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        for view, entry in zip(self.iterations, document["iterations"], strict=True):
            entry |= {"reward_eval": view.reward_eval, "reward_mean": view.reward_mean}
        return document


def load_view(cluster: Cluster, run_id: str) -> RunView:
    """Ask the cluster; DataError when it has no such run."""
    campaigns = find_campaigns(cluster, run_id) or [latest_campaign(cluster, run_id)]
    return build_view(cluster.namespace, run_id, campaigns, unfinished_children(cluster, campaigns[-1]))


def view_of(cluster: Cluster, run_id: str, workflows: Sequence[Object]) -> RunView:
    """The same from all Workflows of the run, as a watch holds them."""
    campaigns = [workflow for workflow in workflows if template_name(workflow) == CAMPAIGN_TEMPLATE]
    if not campaigns:
        raise DataError(f"run {run_id} was deleted from namespace {cluster.namespace}")
    campaigns.sort(key=lambda workflow: (workflow["metadata"]["creationTimestamp"], name_of(workflow)))
    latest = name_of(campaigns[-1])
    children = [one for one in workflows if one["metadata"].get("labels", {}).get(CAMPAIGN_LABEL) == latest]
    return build_view(cluster.namespace, run_id, campaigns, children)


def build_view(namespace: str, run_id: str, campaigns: Sequence[Object], children: Sequence[Object]) -> RunView:
    """Campaigns oldest first; children of the latest, at least those that did not succeed."""
    campaign = campaigns[-1]
    iterations: dict[int, IterationView] = {}
    for one in campaigns:
        of_latest = {view.iteration: view for view in _iterations_by_nodes(one)}
        iterations |= of_latest
    of_children = [view for view in map(_iteration_of_child, children) if view is not None]
    of_latest |= {view.iteration: view for view in of_children}
    iterations |= of_latest
    status, spec = campaign.get("status", {}), campaign["spec"]
    steps = tuple(_step_view(node) for node in shown_nodes(campaign) if step_of(node) != CHILD_STEP)
    view = RunView(
        run_id=run_id,
        namespace=namespace,
        workflow=name_of(campaign),
        phase=phase_of(campaign),
        message=status.get("message") or "",
        started_at=status.get("startedAt") or "",
        finished_at=status.get("finishedAt") or "",
        stopping=bool(spec.get("shutdown")) and phase_of(campaign) not in FINISHED,
        suspended=any(one["spec"].get("suspend") for one in (campaign, *children) if phase_of(one) not in FINISHED),
        iterations_total=_total(campaign, steps),
        iterations_done=sum(one.phase == "Succeeded" for one in of_latest.values()),
        steps=steps,
        iterations=tuple(iterations[number] for number in sorted(iterations)),
        outputs=outputs_of(status),
        earlier=tuple(name_of(one) for one in campaigns[:-1]),
    )
    return _with_failure(view, campaign, children) if view.phase in ("Failed", "Error") else view


def _iterations_by_nodes(campaign: Object) -> Iterator[IterationView]:
    for node in shown_nodes(campaign):
        number = inputs_of(node).get("iteration", "")
        if step_of(node) == CHILD_STEP and number.isdecimal():
            yield IterationView(
                iteration=int(number),
                workflow=f"{name_of(campaign)}-{number}",
                phase=node["phase"],
                message=node.get("message") or "",
                started_at=node.get("startedAt") or "",
                finished_at=node.get("finishedAt") or "",
                outputs=outputs_of(node),
            )


def _iteration_of_child(child: Object) -> IterationView | None:
    number = parameters_of(child).get("iteration", "")
    if not number.isdecimal():
        return None
    status = child.get("status", {})
    return IterationView(
        iteration=int(number),
        workflow=name_of(child),
        phase=phase_of(child),
        message=status.get("message") or "",
        started_at=status.get("startedAt") or "",
        finished_at=status.get("finishedAt") or "",
        outputs=outputs_of(status),
        steps=tuple(_step_view(node) for node in shown_nodes(child)) if can_read_nodes(child) else (),
    )


def _step_view(node: Object) -> StepView:
    attempts = len(node.get("children") or ()) if node["type"] == "Retry" else 1
    return StepView(
        name=node.get("displayName") or node["name"],
        step=step_of(node),
        phase=node["phase"],
        message=node.get("message") or "",
        attempts=max(attempts, 1),
        progress=node.get("progress") or "",
        started_at=node.get("startedAt") or "",
        finished_at=node.get("finishedAt") or "",
        outputs=outputs_of(node),
    )


def _total(campaign: Object, steps: Sequence[StepView]) -> int | None:
    """What init says, or what was submitted: 0 stands for what the configuration says, which only init knows."""
    told = next((step.outputs.get("iterations") for step in steps if step.step == "init"), None)
    value = told or parameters_of(campaign).get("iterations", "")
    return int(value) if value.isdecimal() and int(value) else None


def _with_failure(view: RunView, campaign: Object, children: Sequence[Object]) -> RunView:
    """Name what ended the run: somebody's stop, the step of the iteration that failed, or of the campaign itself."""
    if campaign["spec"].get("shutdown"):
        return replace(view, failure=f"stopped ({view.message or 'by request'})", exit_code=Interrupted.exit_code)
    failed = [child for child in children if phase_of(child) in ("Failed", "Error")]
    for workflow in (*failed[-1:], campaign):
        leaf = failed_leaf(workflow) if can_read_nodes(workflow) else None
        if leaf is not None:
            what = f"{step_of(leaf)} ({leaf.get('displayName')}, workflow {name_of(workflow)})"
            failure = f"{what}: {leaf.get('message') or leaf['phase']}"
            return replace(view, failure=failure, exit_code=_exit_code(leaf))
    return replace(view, failure=view.message or f"workflow {view.workflow} ended as {view.phase}", exit_code=1)


def _exit_code(leaf: Object) -> int:
    """That of the step's container; killed counts as interrupted, a code outside the documented ones as a bug.

    A watcher ends with 64 whatever its iteration died of: that says nothing.
    """
    if step_of(leaf) == CHILD_STEP:
        return 1
    code = (leaf.get("outputs") or {}).get("exitCode", "")
    if code in KILLED_CODES:
        return Interrupted.exit_code
    return int(code) if code in KNOWN_CODES else 1


def seconds_of(started_at: str, finished_at: str, now: datetime | None = None) -> float | None:
    """Seconds from one RFC 3339 time to another, or to now; None before the start."""
    if not started_at:
        return None
    end = datetime.fromisoformat(finished_at) if finished_at else (now or datetime.now(UTC))
    return (end - datetime.fromisoformat(started_at)).total_seconds()


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
