"""Exit handlers: what a workflow started elsewhere ends with it.

Argo runs them when a workflow succeeds, fails or is stopped (`argo stop`), not when it is terminated
(`argo terminate`). What they delete is found by a fixed name or by label, and nothing that matches is a success.
"""

from collections.abc import Mapping

from hera.workflows import Resource, Step, Steps

from workflows.containers import DISPLAY_NAME, capacity_affinity, stage_metrics
from workflows.platform import PlatformProfile
from workflows.retries import attach_retry

EXIT_TEMPLATE = "exit"
JOBSET_RESOURCE = "jobsets.jobset.x-k8s.io"
WORKFLOW_RESOURCE = "workflows.argoproj.io"
"""`resource.group`, since short names may be others' too."""

# A resource template has no field for its container's requests; without any, a watcher that lives for hours would be
# the first pod to be evicted. kubectl reads the schemas of the cluster's kinds: with Argo's alone it takes 120 MB, and
# when the object exists already it reads those of all kinds.
WATCHER_POD_PATCH = """\
containers:
- name: main
  resources:
    requests: {cpu: 10m, memory: 256Mi}
    limits: {memory: 1Gi}
"""


def deletion(
    name: str, flags: list[str], *, service_account: str, display_name: str, profile: PlatformProfile
) -> Resource:
    """A template that deletes something; call it inside a WorkflowTemplate's context."""
    return Resource(
        name=name,
        action="delete",
        flags=flags,
        annotations={DISPLAY_NAME: display_name},
        service_account_name=service_account,
        affinity=capacity_affinity(profile.capacity["stable"]),
        pod_spec_patch=WATCHER_POD_PATCH,
        retry_strategy=attach_retry(5),
        active_deadline_seconds="600",
        metrics=stage_metrics(name),
    )


def exit_handler(deletions: Mapping[str, Resource]) -> Steps:
    """A template for `onExit`: by condition, what is deleted then; call it inside a WorkflowTemplate's context."""
    with Steps(name=EXIT_TEMPLATE) as handler, handler.parallel():
        for when, template in deletions.items():
            Step(name=str(template.name), template=template, when=when)
    return handler
