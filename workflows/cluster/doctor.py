"""`moerl doctor`: is this cluster ready to run a campaign, and if not, what mends it?

Every check reads; none changes anything. Values of Secrets are looked at and never shown.
"""

from collections.abc import Iterator

from workflows.cluster.access import account_findings, own_findings
from workflows.cluster.client import WORKFLOW_TEMPLATES, Cluster, Forbidden, NotFound, NotInstalled, Object
from workflows.cluster.findings import Finding, findings_of, ok
from workflows.cluster.installation import (
    LOCAL_QUEUES,
    api_findings,
    controller_findings,
    cron_findings,
    served_queues,
)
from workflows.cluster.nodes import image_findings, node_findings
from workflows.cluster.runs import CAMPAIGN_TEMPLATE, ITERATION_TEMPLATE
from workflows.cluster.services import environment_findings, secret_findings
from workflows.cluster.templates import APPLY, declared_parameters, template_findings
from workflows.parameters import CREDENTIALS, ENVIRONMENT, IMAGE, QUEUE, WorkflowParameter
from workflows.platform import PlatformProfile


def examine(cluster: Cluster, profile: PlatformProfile) -> Iterator[Finding]:
    """All findings, in the order in which they are best mended. ConnectionLost when the cluster can't be reached."""
    version = cluster.call("GET", "/version")
    yield ok("cluster", f"context {cluster.context}, Kubernetes {version.get('gitVersion')}")
    yield from api_findings(cluster)
    yield from findings_of("controller", lambda: controller_findings(cluster), "install Argo Workflows")
    yield from own_findings(cluster)
    templates = {name: _template(cluster, name) for name in (ITERATION_TEMPLATE, CAMPAIGN_TEMPLATE)}
    yield from template_findings(cluster.namespace, templates, profile)
    yield from findings_of("schedule", lambda: cron_findings(cluster), APPLY)
    yield from account_findings(cluster)
    campaign = templates[CAMPAIGN_TEMPLATE]
    environment = parameter_default(campaign, ENVIRONMENT)
    credentials = parameter_default(campaign, CREDENTIALS)
    yield from findings_of(
        "environment",
        lambda: environment_findings(cluster, environment),
        f"create the ConfigMap {environment} with the key store (templates/install/environment.yaml)",
    )
    yield from findings_of(
        "credentials",
        lambda: secret_findings(cluster, credentials),
        f"create the Secret {credentials} (templates/secret.example.yaml says how)",
    )
    image = parameter_default(campaign, IMAGE)
    yield from findings_of("image", lambda: image_findings(cluster, image), "")
    yield from findings_of("nodes", lambda: node_findings(cluster, profile), "")
    if queue := parameter_default(campaign, QUEUE):
        yield from _queue_findings(cluster, queue)


def parameter_default(template: Object | None, parameter: WorkflowParameter) -> str:
    """What the installed template says, else what ours does."""
    declared = declared_parameters(template) if template else {}
    return str(declared.get(parameter.name, {}).get("value", parameter.value or ""))


def _template(cluster: Cluster, name: str) -> Object | None:
    try:
        return cluster.get(WORKFLOW_TEMPLATES, name)
    except (NotFound, NotInstalled, Forbidden):  # found out, with its remedy, by the checks before
        return None


def _queue_findings(cluster: Cluster, queue: str) -> Iterator[Finding]:
    queues = served_queues(cluster) or LOCAL_QUEUES
    yield from findings_of(
        "queue",
        lambda: [ok("queue", f"LocalQueue {cluster.get(queues, queue)['metadata']['name']}")],
        f"create the LocalQueue {queue}, or submit with -p queue=",
    )
