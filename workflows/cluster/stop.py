"""Stop a run on a cluster, as `argo stop` does."""

from steps.errors import DataError
from workflows.cluster.client import WORKFLOWS, Cluster, Conflict, NotFound, Object
from workflows.cluster.runs import FINISHED, latest_campaign, name_of, phase_of, unfinished_children

TRIES = 5
"""Of a patch that meets somebody else's: the controller writes the same object all the time."""


def stop_run(cluster: Cluster, run_id: str) -> list[str]:
    """Ask the run's campaign and its running iterations to stop; the names of those that were there to be asked.

    Steps get SIGTERM and save what they have; exit handlers run. The iterations are asked as well, since the pod of
    the campaign that would end them may be what hangs. DataError when the run does not exist or has ended.
    """
    campaign = latest_campaign(cluster, run_id)
    if phase_of(campaign) in FINISHED:
        raise DataError(f"run {run_id} has ended already (workflow {name_of(campaign)}, {phase_of(campaign)})")
    children = [child for child in unfinished_children(cluster, campaign) if phase_of(child) not in FINISHED]
    return [
        name_of(one) for one in (campaign, *children) if _withdrawn(cluster, one) or _shut_down(cluster, name_of(one))
    ]


def _withdrawn(cluster: Cluster, workflow: Object) -> bool:
    """Terminate one that has not started, if it still has not; False when it has, or is gone.

    While it waits for its lock, Argo heeds no other strategy (releaseLocksForPendingShuttingdownWfs in operator.go),
    and there is no exit handler to run.
    """
    if phase_of(workflow) != "Pending":
        return False
    unchanged = {"resourceVersion": workflow["metadata"]["resourceVersion"]}
    try:
        cluster.merge_patch(WORKFLOWS, name_of(workflow), {"metadata": unchanged, "spec": {"shutdown": "Terminate"}})
    except (Conflict, NotFound):
        return False
    return True


def _shut_down(cluster: Cluster, name: str) -> bool:
    """Set `spec.shutdown` (patchShutdownStrategy in Argo's workflow/util/util.go); False when it is gone already.

    A suspended Workflow is woken, which `argo stop` forgets: the controller looks at one no further (`operate` in
    operator.go), so that its exit handler would not run, and it would never end.
    """
    for attempt in range(TRIES):
        try:
            cluster.merge_patch(WORKFLOWS, name, {"spec": {"shutdown": "Stop", "suspend": None}})
            return True
        except NotFound:
            return False
        except Conflict:
            if attempt == TRIES - 1:
                raise
    raise AssertionError("the last try returns or raises")
