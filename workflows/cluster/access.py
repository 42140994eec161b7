"""Rights: ours, asked of the cluster (SelfSubjectAccessReview), and those of the accounts that the pods run as."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workflows.cluster.client import (
    CRON_WORKFLOWS,
    PODS,
    WORKFLOW_TEMPLATES,
    WORKFLOWS,
    Cluster,
    Forbidden,
    NotFound,
    Object,
    Resource,
)
from workflows.cluster.findings import Finding, fail, ok, skip, warn
from workflows.cluster.installation import JOB_SETS, LOCAL_QUEUES

CONFIG_MAPS = Resource(group="", version="v1", plural="configmaps")
SECRETS = Resource(group="", version="v1", plural="secrets")
SERVICE_ACCOUNTS = Resource(group="", version="v1", plural="serviceaccounts")
SERVICES = Resource(group="", version="v1", plural="services")
STATEFUL_SETS = Resource(group="apps", version="v1", plural="statefulsets")
TASK_RESULTS = Resource(group="argoproj.io", version="v1alpha1", plural="workflowtaskresults", product="Argo Workflows")


@dataclass(frozen=True, kw_only=True, slots=True)
class Right:
    """A verb on a resource, and which command is lost without it."""

    verb: str
    resource: Resource
    subresource: str = ""
    needed_by: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f"/{self.subresource}" if self.subresource else "")


def _rights(needed_by: str, resource: Resource, *verbs: str, subresource: str = "") -> list[Right]:
    return [Right(verb=verb, resource=resource, subresource=subresource, needed_by=needed_by) for verb in verbs]


OPERATOR_RIGHTS: tuple[Right, ...] = (
    *_rights("status, stop, resume, logs", WORKFLOWS, "get", "list"),
    *_rights("watch", WORKFLOWS, "watch"),
    *_rights("submit, resume", WORKFLOWS, "create"),
    *_rights("stop, resume", WORKFLOWS, "patch"),
    *_rights("submit, resume, doctor", WORKFLOW_TEMPLATES, "get"),
    *_rights("doctor", CRON_WORKFLOWS, "get"),
    *_rights("logs, doctor", PODS, "list"),
    *_rights("logs", PODS, "get", subresource="log"),
    *_rights("doctor", CONFIG_MAPS, "get"),
    *_rights("doctor", SERVICE_ACCOUNTS, "get"),
    *_rights("doctor", LOCAL_QUEUES, "get"),
)
"""What the commands of `moerl` call, and no more: Role moerl-operator in templates/install/rbac.yaml grants it."""

ACCOUNT_RIGHTS: dict[str, tuple[Right, ...]] = {
    "moerl-step": tuple(_rights("every step", TASK_RESULTS, "create", "patch")),
    "moerl-campaign": (
        *_rights("watchers", TASK_RESULTS, "create", "patch"),
        *_rights("iterations of a campaign", WORKFLOWS, "get", "list", "create", "patch", "delete"),
    ),
    "moerl-gang": (
        *_rights("watchers", TASK_RESULTS, "create", "patch"),
        *_rights("training on several nodes", JOB_SETS, "get", "create", "patch", "delete"),
    ),
    "moerl-engines": (
        *_rights("watchers", TASK_RESULTS, "create", "patch"),
        *_rights("rollout engines", STATEFUL_SETS, "get", "create", "patch", "delete"),
        *_rights("rollout engines", SERVICES, "get", "create", "patch", "delete"),
    ),
}


def own_findings(cluster: Cluster) -> Iterator[Finding]:
    """Whether the commands of `moerl` may do what they do."""
    lacking = [right for right in OPERATOR_RIGHTS if not _may(cluster, right, "")]
    if not lacking:
        yield ok("rights", f"yours suffice in namespace {cluster.namespace}")
    for right in lacking:
        lost = f"you may not {right} in namespace {cluster.namespace} (moerl {right.needed_by})"
        yield warn("rights", lost, "ask for a binding to the Role moerl-operator (templates/install/rbac.yaml)")


def account_findings(cluster: Cluster) -> Iterator[Finding]:
    """Whether the pods' accounts exist and may do what Argo's executor and the watchers do."""
    for account, rights in ACCOUNT_RIGHTS.items():
        check = f"account {account}"
        try:
            cluster.get(SERVICE_ACCOUNTS, account)
        except NotFound:
            yield fail(check, f"it is not in namespace {cluster.namespace}", "kubectl apply -k templates/")
            continue
        except Forbidden as error:
            yield skip(check, f"your rights don't show it: {str(error).split(': ask for')[0]}")
            continue
        yield from _account_findings(cluster, check, account, rights)


def _account_findings(cluster: Cluster, check: str, account: str, rights: Sequence[Right]) -> Iterator[Finding]:
    user = f"system:serviceaccount:{cluster.namespace}:{account}"
    try:
        lacking = [right for right in rights if not _may(cluster, right, user)]
    except Forbidden:
        mend = f"ask an administrator for `kubectl auth can-i --list --as {user}`"
        yield skip(check, "it exists; your rights don't show what it may do", mend)
        return
    mend = "kubectl apply -k templates/ (templates/install/rbac.yaml grants it)"
    for right in lacking:
        yield fail(check, f"it may not {right}, which {right.needed_by} needs", mend)
    if not lacking:
        yield ok(check, "it may do what its pods do")


def _may(cluster: Cluster, right: Right, user: str) -> bool:
    """Ask the cluster; an empty user is ourselves. Forbidden when we may not ask about others."""
    attributes: Object = {
        "namespace": cluster.namespace,
        "verb": right.verb,
        "group": right.resource.group,
        "version": right.resource.version,
        "resource": right.resource.plural,
    }
    if right.subresource:
        attributes["subresource"] = right.subresource
    kind = "SubjectAccessReview" if user else "SelfSubjectAccessReview"
    review: Object = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": kind,
        "spec": {"resourceAttributes": attributes} | ({"user": user} if user else {}),
    }
    reviews = Resource(group="authorization.k8s.io", version="v1", plural=f"{kind.lower()}s", namespaced=False)
    answer = cluster.call("POST", reviews.path(""), resource=reviews, body=review)
    return bool(answer.get("status", {}).get("allowed"))
