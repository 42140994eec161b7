"""A JobSet manifest -> what the local gang needs of it; anything else in it is refused by its name.

Known: one replicatedJob of one Indexed Job, whose pods run together and end together (backoffLimit 0), the failure
policies of JobSet and Job, and a container that torchrun starts its ranks in. What only matters on a cluster (network,
labels, resources, scheduling) is passed over.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from workflows.local.containers import DEFAULT_GRACE_S, expand
from workflows.local.fields import Fields, refuse
from workflows.local.model import Container
from workflows.local.parsing import parse_container

TORCHRUN = (("torchrun",), ("python", "-m", "torch.distributed.run"), ("python", "-m", "steps.torchrun"))
"""Commands that start ranks. Here the ranks are started without them."""
_TORCHRUN_OPTIONS = {
    *("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "shutdown-timeout"),
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "role", "max-restarts", "monitor-interval"),
}
_ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    """Of a JobSet's failurePolicy: applies when the Job's failure has one of `reasons` and matches a pattern."""

    action: str
    reasons: tuple[str, ...]
    patterns: tuple[str, ...]

    def applies(self, reason: str, message: str) -> bool:
        by_reason = not self.reasons or reason in self.reasons
        return by_reason and (not self.patterns or any(re.search(pattern, message) for pattern in self.patterns))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFailureRule:
    """Of a Job's podFailurePolicy, all of action FailJob: by exit code, or by the platform having taken the pod."""

    exit_codes: frozenset[int] = frozenset()
    inverted: bool = False
    disruption: bool = False

    def applies(self, code: int, disrupted: bool) -> bool:
        if self.disruption:
            return disrupted
        return not disrupted and code != 0 and (code in self.exit_codes) != self.inverted


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetSpec:
    """max_restarts is None without a failurePolicy: then the first failure is final."""

    name: str
    job: str
    pods: int
    container: Container
    container_name: str = ""
    grace_s: float = DEFAULT_GRACE_S
    deadline_s: float | None = None
    max_restarts: int | None = None
    rules: tuple[FailureRule, ...] = ()
    pod_rules: tuple[PodFailureRule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What one pod starts: `ranks` copies of argv. ranks 0: one process that is no rank of anything."""

    argv: tuple[str, ...]
    ranks: int = 0


def parse_job_set(manifest: object) -> JobSetSpec:
    """ConfigError for what is not known here."""
    fields = Fields(manifest, "JobSet")
    fields.ignore("apiVersion", "kind", "status")
    metadata = fields.below("metadata")
    name = metadata.required_text("name")
    metadata.ignore("labels", "annotations", "namespace", "ownerReferences")
    metadata.close()
    fields.where = where = f"JobSet {name}"
    spec = fields.below("spec")
    fields.close()
    if spec.below("successPolicy").text("operator", "All") != "All" or spec.flag("suspend"):
        refuse(where, "successPolicy must be All, and suspend false")
    spec.ignore("network", "ttlSecondsAfterFinished", "managedBy", "coordinator")
    max_restarts, rules = _failure_policy(spec)
    jobs = spec.list("replicatedJobs")
    spec.close()
    if len(jobs) != 1:
        refuse(where, f"has {len(jobs)} replicatedJobs; one is known here")
    return _replicated_job(Fields(jobs[0], f"{where}.replicatedJobs"), name, max_restarts, rules)


def _replicated_job(fields: Fields, name: str, max_restarts: int | None, rules: tuple[FailureRule, ...]) -> JobSetSpec:
    job_name = fields.required_text("name")
    if fields.text("replicas", "1") != "1":
        refuse(fields.where, "replicas must be 1")
    template = fields.below("template")
    fields.close()
    template.ignore("metadata")
    job = template.below("spec")
    template.close()
    pods = job.count("parallelism") or 1
    if (job.count("completions") or 1) != pods or job.text("completionMode", "NonIndexed") != "Indexed":
        refuse(job.where, "completionMode must be Indexed, with as many completions as parallelism")
    if job.text("backoffLimit", "6") != "0":
        refuse(job.where, "backoffLimit must be 0: a rank that starts again alone meets no others")
    deadline = job.count("activeDeadlineSeconds")
    pod_rules = tuple(_pod_rule(Fields(item, job.where)) for item in job.below("podFailurePolicy").list("rules"))
    pod = job.below("template")
    job.ignore("podReplacementPolicy", "ttlSecondsAfterFinished", "suspend")
    job.close()
    pod.ignore("metadata")
    container, container_name, grace_s = _pod(pod.below("spec"))
    pod.close()
    return JobSetSpec(
        name=name,
        job=job_name,
        pods=pods,
        container=container,
        container_name=container_name,
        grace_s=grace_s,
        deadline_s=None if deadline is None else float(deadline),
        max_restarts=max_restarts,
        rules=rules,
        pod_rules=pod_rules,
    )


def _pod(spec: Fields) -> tuple[Container, str, float]:
    """(container, its name, grace period)."""
    containers = spec.list("containers")
    if len(containers) != 1:
        refuse(spec.where, f"has {len(containers)} containers; one is known here")
    if spec.text("restartPolicy") != "Never":
        refuse(spec.where, "restartPolicy must be Never: a rank that starts again alone meets no others")
    grace_s = float(spec.text("terminationGracePeriodSeconds", str(DEFAULT_GRACE_S)))
    spec.ignore(
        *("affinity", "automountServiceAccountToken", "hostNetwork", "nodeSelector", "priorityClassName"),
        *("securityContext", "serviceAccountName", "subdomain", "tolerations", "volumes", "schedulerName"),
        *("topologySpreadConstraints", "dnsPolicy", "hostIPC", "imagePullSecrets", "enableServiceLinks"),
    )
    spec.close()
    name = Fields(containers[0], f"{spec.where}.containers").text("name")
    return parse_container(Fields(containers[0], f"{spec.where}.containers")), name, grace_s


def _failure_policy(spec: Fields) -> tuple[int | None, tuple[FailureRule, ...]]:
    if not spec.has("failurePolicy"):
        return None, ()
    policy = spec.below("failurePolicy")
    max_restarts = int(policy.text("maxRestarts", "0"))
    rules = tuple(_rule(Fields(item, f"{policy.where}.rules")) for item in policy.list("rules"))
    policy.ignore("restartStrategy")
    policy.close()
    return max_restarts, rules


def _rule(fields: Fields) -> FailureRule:
    action = fields.required_text("action")
    if action not in _ACTIONS:
        refuse(fields.where, f"action {action} is not known; use {', '.join(_ACTIONS)}")
    rule = FailureRule(
        action=action,
        reasons=fields.texts("onJobFailureReasons"),
        patterns=fields.texts("onJobFailureMessagePatterns"),
    )
    fields.ignore("name")
    fields.close()
    return rule


def _pod_rule(fields: Fields) -> PodFailureRule:
    fields.where += ".podFailurePolicy"
    if fields.text("action") != "FailJob":
        refuse(fields.where, "action must be FailJob")
    conditions = [Fields(item, fields.where).text("type") for item in fields.list("onPodConditions")]
    codes = fields.below("onExitCodes")
    fields.close()
    if conditions:
        if conditions != ["DisruptionTarget"]:
            refuse(fields.where, f"condition {conditions[0]} is not known; use DisruptionTarget")
        return PodFailureRule(disruption=True)
    codes.ignore("containerName")
    operator = codes.text("operator")
    rule = PodFailureRule(exit_codes=frozenset(map(int, codes.list("values"))), inverted=operator == "NotIn")
    codes.close()
    return rule


def launch_of(container: Container, pods: int, env: dict[str, str], where: str) -> Launch:
    """What a pod's command comes to. ConfigError: torchrun options that don't fit, or are not known."""
    words = [expand(word, env) for word in (*container.command, *container.args)]
    head = next((head for head in TORCHRUN if tuple(words[: len(head)]) == head), None)
    if head is None:
        return Launch(argv=tuple(words))
    options, program = _torchrun_options(words[len(head) :], where)
    if options.get("nnodes", "1") != str(pods):
        refuse(where, f"torchrun's --nnodes is {options.get('nnodes', '1')}, but the Job has {pods} pods")
    ranks = options.get("nproc-per-node", "1")
    if not re.fullmatch(r"[1-9]\d*", ranks):
        refuse(where, f"torchrun's --nproc-per-node is {ranks!r}; here it must be a number")
    return Launch(argv=("python", *program), ranks=int(ranks))


def _torchrun_options(words: Sequence[str], where: str) -> tuple[dict[str, str], tuple[str, ...]]:
    options: dict[str, str] = {}
    queue = list(words)
    while queue and queue[0].startswith("--"):
        name, has_value, value = queue.pop(0)[2:].partition("=")
        name = name.replace("_", "-")
        if name not in _TORCHRUN_OPTIONS:
            refuse(where, f"torchrun's option --{name} is not known to the local executor")
        options[name] = value if has_value else queue.pop(0) if queue else ""
    if not queue:
        refuse(where, "torchrun has nothing to run")
    return options, tuple(queue)
