"""Follow the Workflows of a run: list, then watch; when the watch's version is forgotten, list again and go on."""

import time
from collections.abc import Callable, Iterator

from workflows.cluster.client import PAUSES_S, WORKFLOWS, Cluster, ConnectionLost, Expired, Object
from workflows.cluster.runs import FINISHED, RUN_LABEL, name_of
from workflows.cluster.status import RunView, load_view, view_of


def watch_run(cluster: Cluster, run_id: str, pause: Callable[[float], None] = time.sleep) -> Iterator[RunView]:
    """The run now and after each change, until it has ended. DataError when there is no such run.

    A lost connection is taken up again; ConnectionLost when that keeps failing.
    """
    first = load_view(cluster, run_id)
    yield first
    if first.phase in FINISHED:
        return
    for workflows in _snapshots(cluster, f"{RUN_LABEL}={run_id}", pause):
        if not workflows:  # Argo has not labelled the campaign yet
            continue
        view = view_of(cluster, run_id, list(workflows.values()))
        yield view
        if view.phase in FINISHED:
            return


def _snapshots(cluster: Cluster, selector: str, pause: Callable[[float], None]) -> Iterator[dict[str, Object]]:
    """All matching Workflows by name, after each event."""
    failures = 0
    while True:
        try:
            items, version = cluster.select(WORKFLOWS, selector)
            workflows = {name_of(item): item for item in items}
            yield dict(workflows)
            while True:
                heard = False
                for event in cluster.watch(WORKFLOWS, selector, version):
                    failures, heard = 0, True
                    version = event["object"]["metadata"]["resourceVersion"]
                    if _apply(workflows, event):
                        yield dict(workflows)
                if not heard:  # a proxy that ends every watch at once must not be asked without a pause
                    pause(PAUSES_S[0])
        except Expired:
            continue
        except ConnectionLost:
            if failures == len(PAUSES_S):
                raise
            pause(PAUSES_S[failures])
            failures += 1


def _apply(workflows: dict[str, Object], event: Object) -> bool:
    """Bring the copy up to date; False for an event that only moves the version on."""
    if event["type"] == "BOOKMARK":
        return False
    if event["type"] == "DELETED":
        workflows.pop(name_of(event["object"]), None)
    else:
        workflows[name_of(event["object"])] = event["object"]
    return True
