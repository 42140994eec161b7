"""Logs of a run's pods: those of its campaign, of its iterations, and of the training gang that one of them started."""

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from steps.errors import DataError, StepError
from workflows.cluster.client import PAUSES_S, PODS, WORKFLOWS, Cluster, ConnectionLost, NotFound, Object, Refused
from workflows.cluster.runs import CAMPAIGN_LABEL, FINISHED, latest_campaign, name_of, phase_of

WORKFLOW_LABEL = "workflows.argoproj.io/workflow"
NODE_ANNOTATION = "workflows.argoproj.io/node-name"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
GANG_CONTAINER = "trainer"
CONTAINERS = ("main", GANG_CONTAINER)
"""Of a step's pod, and of a pod of the training gang."""
FAN_OUT = re.compile(r"\((\d+):[^.]*$")
"""The place of an item in the last part of a node's name: run-00001.rollout(3:3)(0)."""
NAMES_AT_ONCE = 50
"""In one selector: it travels in the URL."""
POLL_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFilter:
    """Which pods: of one iteration (0: all), of one step (empty: all)."""

    iteration: int = 0
    step: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """`source` names the step as the Argo UI does."""

    source: str
    pod: str
    time: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    pod: str
    container: str
    step: str
    label: str
    started: bool


def read_logs(cluster: Cluster, run_id: str, wanted: LogFilter, *, tail: int | None) -> Iterator[LogLine]:
    """The lines that there are, pod after pod in the order in which the pods started.

    DataError when no pod is left, or none matches.
    """
    campaign = latest_campaign(cluster, run_id)
    sources = [source for source in _sources(cluster, campaign, wanted) if source.started]
    if not sources:
        raise DataError(
            f"no pods of run {run_id} match: those of steps that succeeded are removed after a while; "
            "the reports in the store say what they did"
        )
    for source in sources:
        yield from _lines(cluster, source, tail=tail)


def follow_logs(
    cluster: Cluster,
    run_id: str,
    wanted: LogFilter,
    *,
    tail: int | None,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[LogLine]:
    """Lines of all matching pods as they come, those of pods that start meanwhile too, until the run has ended."""
    lines: queue.Queue[LogLine | StepError] = queue.Queue()
    readers: dict[str, threading.Thread] = {}
    ended, failures = False, 0
    while not ended or any(reader.is_alive() for reader in readers.values()) or not lines.empty():
        if not ended:
            try:
                campaign = latest_campaign(cluster, run_id)
                sources = _sources(cluster, campaign, wanted)
                ended, failures = phase_of(campaign) in FINISHED, 0
            except ConnectionLost:
                sources, failures = [], failures + 1
                if failures > len(PAUSES_S):
                    raise
            for source in sources:
                if source.started and source.pod not in readers:
                    readers[source.pod] = _start_reader(cluster, source, tail, lines, pause)
        yield from _drain(lines)
        if not ended or any(reader.is_alive() for reader in readers.values()):
            pause(PAUSES_S[failures - 1] if failures else POLL_S)


def _start_reader(
    cluster: Cluster,
    source: _Source,
    tail: int | None,
    lines: "queue.Queue[LogLine | StepError]",
    pause: Callable[[float], None],
) -> threading.Thread:
    def read() -> None:
        try:
            for line in _lines(cluster, source, tail=tail, again=pause):
                lines.put(line)
        except StepError as error:
            lines.put(error)

    thread = threading.Thread(target=read, daemon=True, name=f"log of {source.pod}")
    thread.start()
    return thread


def _drain(lines: "queue.Queue[LogLine | StepError]") -> Iterator[LogLine]:
    while not lines.empty():
        line = lines.get()
        if isinstance(line, StepError):
            raise line
        yield line


def _lines(
    cluster: Cluster, source: _Source, *, tail: int | None, again: Callable[[float], None] | None = None
) -> Iterator[LogLine]:
    """With `again`, the pause between two tries: to the end of the container, over connections that break off."""
    last, failures = "", 0
    while True:
        known = last
        try:
            follow = again is not None
            for line in cluster.pod_log(source.pod, source.container, follow=follow, tail=tail, since=known):
                moment, _, text = line.partition(" ")
                if not moment[:4].isdigit():  # the kubelet speaks for itself, as when a log is gone
                    moment, text = known, line
                elif moment <= known:  # the server counts from whole seconds on
                    continue
                last, failures = moment, 0
                yield LogLine(source=source.label, pod=source.pod, time=moment, text=text)
            return
        except NotFound:  # removed since it was listed
            return
        except (ConnectionLost, Refused) as error:  # its node is gone, or its container has not started
            if again is None or failures == len(PAUSES_S):
                yield LogLine(source=source.label, pod=source.pod, time="", text=f"[no more of this log: {error}]")
                return
        again(PAUSES_S[failures])
        failures += 1


def _sources(cluster: Cluster, campaign: Object, wanted: LogFilter) -> list[_Source]:
    workflows = _workflows(cluster, campaign, wanted)
    pods: list[Object] = []
    for start in range(0, len(workflows), NAMES_AT_ONCE):
        names = ",".join(list(workflows)[start : start + NAMES_AT_ONCE])
        pods += cluster.select(PODS, f"{WORKFLOW_LABEL} in ({names})")[0]
    pods.sort(key=lambda pod: (pod["status"].get("startTime") or "9999", name_of(pod)))
    sources = (_source(pod, workflows) for pod in pods)
    return [source for source in sources if not wanted.step or source.step == wanted.step]


def _workflows(cluster: Cluster, campaign: Object, wanted: LogFilter) -> dict[str, str]:
    """Names of the workflows, each with the number of its iteration: "" for the campaign."""
    name = name_of(campaign)
    children, _ = cluster.select(WORKFLOWS, f"{CAMPAIGN_LABEL}={name}", metadata_only=True)
    numbers = {name_of(child): name_of(child).removeprefix(f"{name}-").lstrip("0") for child in children}
    if wanted.iteration:
        return {child: number for child, number in numbers.items() if number == str(wanted.iteration)}
    return {name: ""} | numbers


def _source(pod: Object, workflows: Mapping[str, str]) -> _Source:
    """The pod with the step that it runs.

    Argo names a pod WORKFLOW-TEMPLATE-HASH (workflow/util/pod_name.go) and writes the node's name, with the item's
    place in a fan-out, into an annotation. A pod of the training gang has neither.
    """
    labels, annotations = pod["metadata"].get("labels", {}), pod["metadata"].get("annotations", {})
    containers = [container["name"] for container in pod["spec"]["containers"]]
    container = next((name for name in CONTAINERS if name in containers), containers[0])
    workflow = labels.get(WORKFLOW_LABEL, "")
    if container == GANG_CONTAINER:
        step, place = "train", labels.get(INDEX_LABEL, "")
    else:
        step = name_of(pod).removeprefix(f"{workflow}-").rpartition("-")[0]
        found = FAN_OUT.search(annotations.get(NODE_ANNOTATION, ""))
        place = found[1] if found else ""
    number = workflows.get(workflow, "")
    label = f"{step}-{place}" if place else step or name_of(pod)
    return _Source(
        pod=name_of(pod),
        container=container,
        step=step,
        label=f"{number}/{label}" if number else label,
        started=pod["status"].get("phase") != "Pending",
    )
