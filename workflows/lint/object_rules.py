"""Rules on what resource templates make: child Workflows and training gangs (Argo: workflow/executor/resource.go;
JobSet: pkg/webhooks/jobset_webhook.go).
"""

import re
from collections.abc import Iterator

from workflows.lint.model import (
    GANG_KIND,
    SERVING_KINDS,
    Body,
    Manifest,
    Manifests,
    Place,
    Rule,
    Template,
    listing,
    mapping,
    strings,
)
from workflows.lint.pods import pods

GANG_KINDS = (GANG_KIND, "PyTorchJob", "MPIJob", "TrainJob", "RayJob", "Job")
_MADE = ("Workflow", *GANG_KINDS, *SERVING_KINDS)
GANG_CONDITIONS = {
    "successCondition": "status.terminalState == Completed",
    "failureCondition": "status.terminalState == Failed",
}
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"
_OF_AN_ATTEMPT = re.compile(r"\{\{=?[^{}]*\b(pod\.name|retries|workflow\.uid|lastRetry\.[a-z]+)\b[^{}]*\}\}")
JOB_FAILURES = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_NAME = re.compile(r"^metadata:\s*\n(?:[ ]+.*\n)*?[ ]+name:(.*)", re.MULTILINE)
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def _objects(manifests: Manifests, *kinds: str) -> Iterator[tuple[Template, Body, Manifest]]:
    """(template, its `resource`, what it makes), of these kinds."""
    for template in manifests.templates():
        if "resource" in template.body:
            for manifest in manifests.embedded_in(template):
                if manifest.kind in kinds:
                    yield template, mapping(template.body["resource"]), manifest


def not_applied(manifests: Manifests) -> Iterator[Place]:
    for template, resource, manifest in _objects(manifests, *_MADE):
        if resource.get("action") == "create":
            yield _at(template, f"`create`: a watcher that was lost makes a second {manifest.kind} or fails")


def changes_by_attempt(manifests: Manifests) -> Iterator[Place]:
    for _, _, manifest in _objects(manifests, *_MADE):
        if "generateName" in mapping(manifest.body.get("metadata")):
            path = manifest.at("metadata.generateName")
            yield Place(manifest=manifest, path=path, problem="a new name at each attempt: two of them run at once")
    for template, _, manifest in _objects(manifests, *_MADE):
        text = str(mapping(template.body["resource"]).get("manifest"))
        found = _OF_AN_ATTEMPT.search(text)
        if found:
            problem = (
                f"{found[1]} is another one at each attempt: a second object, or a change of fields that are fixed"
            )
            yield Place(manifest=manifest, path=manifest.at(""), problem=problem)
        named = _NAME.search(text)
        # What serves may be applied again with another number of pods, say: it is the same one, changed.
        if (
            named
            and manifest.kind not in SERVING_KINDS
            and "{{inputs.parameters." in text
            and "inputs.parameters." not in named[1]
        ):
            problem = "the same name whatever the inputs: `apply` finds the first call's object, and skips the others"
            yield Place(manifest=manifest, path=manifest.at("metadata.name"), problem=problem)


def no_conditions(manifests: Manifests) -> Iterator[Place]:
    for template, resource, manifest in _objects(manifests, "Workflow", *GANG_KINDS):
        for field in ("successCondition", "failureCondition"):
            if not resource.get(field):
                yield _at(template, f"without {field} it does not wait for the {manifest.kind}")
            elif "#(" in str(resource[field]):
                yield _at(template, f"{field}: keys cannot contain #(), so conditions can't be matched by type")
            elif manifest.kind == GANG_KIND and resource[field] != GANG_CONDITIONS[field]:
                yield _at(template, f"{field} is {resource[field]!r}, not {GANG_CONDITIONS[field]!r}")


def no_owner(manifests: Manifests) -> Iterator[Place]:
    for template, resource, manifest in _objects(manifests, *_MADE):
        if resource.get("setOwnerReference") is not True:
            yield _at(template, f"the {manifest.kind} outlives the workflow's deletion")


def no_exit_handler(manifests: Manifests) -> Iterator[Place]:
    for template, _, made in _objects(manifests, *_MADE):
        if not _deleted_at_exit(template, made.kind):
            path = template.manifest.at(f"{template.manifest.spec_path}.onExit")
            problem = f"nothing deletes the {made.kind} of {template.name} when the workflow is stopped or fails"
            yield Place(manifest=template.manifest, path=path, problem=problem)


def _deleted_at_exit(template: Template, kind: str) -> bool:
    spec = template.manifest.spec
    bodies = {str(body.get("name")): body for body in listing(spec.get("templates"))}
    waiting, seen = [str(spec.get("onExit") or "")], set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        below = Template(manifest=template.manifest, body=bodies[name], path="")
        waiting += [str(call.get("template")) for _, call in below.calls]
        resource = mapping(bodies[name].get("resource"))
        named = " ".join([*strings(resource.get("flags")), str(resource.get("manifest") or "")]).lower()
        if resource.get("action") in ("delete", "patch") and kind.lower() in named:
            return True
    return False


def child_spec(manifests: Manifests) -> Iterator[Place]:
    for _, _, manifest in _objects(manifests, "Workflow"):
        extra = sorted(set(manifest.spec) - {"workflowTemplateRef", "arguments"})
        if extra or "workflowTemplateRef" not in manifest.spec:
            what = f"{', '.join(extra)} beside a reference" if extra else "no workflowTemplateRef"
            path = manifest.at("spec")
            yield Place(manifest=manifest, path=path, problem=f"{what}: `templateReferencing: Strict` refuses it")


def _gang_jobs(manifests: Manifests) -> Iterator[tuple[Manifest, str, Body]]:
    for manifest in manifests.of_kind(GANG_KIND):
        for job in listing(manifest.spec.get("replicatedJobs")):
            path = manifest.at(f"spec.replicatedJobs[{job.get('name')}].template.spec")
            yield manifest, path, mapping(mapping(job.get("template")).get("spec"))


def gang_restarts(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.of_kind(GANG_KIND):
        if not mapping(manifest.spec.get("failurePolicy")).get("maxRestarts"):
            path = manifest.at("spec.failurePolicy.maxRestarts")
            yield Place(manifest=manifest, path=path, problem="the first lost node fails the training")
    for manifest, path, job in _gang_jobs(manifests):
        if job.get("backoffLimit") != 0:
            problem = "a rank that fails is tried again alone, while the others hang"
            yield Place(manifest=manifest, path=f"{path}.backoffLimit", problem=problem)
        policy = mapping(mapping(job.get("template")).get("spec")).get("restartPolicy")
        if policy != "Never":
            problem = f"restartPolicy {policy}: a rank is started again alone (and podFailurePolicy needs Never)"
            yield Place(manifest=manifest, path=f"{path}.template.spec.restartPolicy", problem=problem)


def gang_failure_policy(manifests: Manifests) -> Iterator[Place]:
    """What JobSet's webhook and the API of Jobs refuse, though the schema takes it."""
    for manifest in manifests.of_kind(GANG_KIND):
        rules = listing(mapping(manifest.spec.get("failurePolicy")).get("rules"))
        names = [str(rule.get("name")) for rule in rules if "name" in rule]
        problems = [f"{name!r} is no name of a rule" for name in names if not _RULE_NAME.fullmatch(name)]
        problems += [f"two rules are called {name!r}" for name in sorted(set(names)) if names.count(name) > 1]
        reasons = [reason for rule in rules for reason in strings(rule.get("onJobFailureReasons"))]
        problems += [f"{reason!r} is no reason of a Job's failure" for reason in reasons if reason not in JOB_FAILURES]
        for problem in problems:
            yield Place(manifest=manifest, path=manifest.at("spec.failurePolicy.rules"), problem=problem)
    for manifest, path, job in _gang_jobs(manifests):
        pod = mapping(mapping(job.get("template")).get("spec"))
        containers = [item.get("name") for item in listing(pod.get("containers"))]
        for rule in listing(mapping(job.get("podFailurePolicy")).get("rules")):
            for problem in _exit_code_problems(mapping(rule.get("onExitCodes")), containers):
                yield Place(manifest=manifest, path=f"{path}.podFailurePolicy.rules", problem=problem)


def _exit_code_problems(exit_codes: Body, containers: list[object]) -> Iterator[str]:
    given = exit_codes.get("values")
    values = [code for code in given if isinstance(code, int)] if isinstance(given, list) else []
    if values != sorted(set(values)):
        yield f"exit codes must ascend: {values}"
    if 0 in values and exit_codes.get("operator") == "In":
        yield "0 is no failure"
    if exit_codes.get("containerName") not in (None, *containers):
        yield f"there is no container {exit_codes['containerName']!r}"


def gang_rendezvous(manifests: Manifests) -> Iterator[Place]:
    for manifest, path, job in _gang_jobs(manifests):
        if job.get("parallelism") != job.get("completions") or job.get("completionMode", "Indexed") != "Indexed":
            problem = "torchrun needs all pods at once, each with its number"
            yield Place(manifest=manifest, path=path, problem=problem)
    for pod in pods(manifests):
        words = " ".join(pod.words)
        if not pod.in_gang or "torchrun" not in words:
            continue
        missing = [
            option
            for option in ("nnodes", "node-rank", "master-addr", "master-port")
            if f"--{option}" not in words.replace("_", "-")
        ]
        missing += ["$(JOB_COMPLETION_INDEX)"] if "$(JOB_COMPLETION_INDEX)" not in words else []
        if missing:
            problem = f"its ranks don't find each other: {', '.join(missing)} missing"
            yield Place(manifest=pod.manifest, path=pod.path, problem=problem)


def gang_logs(manifests: Manifests) -> Iterator[Place]:
    for manifest, path, job in _gang_jobs(manifests):
        labels = mapping(mapping(mapping(job.get("template")).get("metadata")).get("labels"))
        if WORKFLOW_LABEL not in labels:
            where = f"{path}.template.metadata.labels"
            yield Place(manifest=manifest, path=where, problem="`argo logs` does not find its pods")


def queue(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.documents:
        labels = mapping(mapping(manifest.body.get("metadata")).get("labels"))
        if QUEUE_LABEL in labels and not labels[QUEUE_LABEL]:
            problem = "Kueue refuses its label with an empty value"
            yield Place(manifest=manifest, path=manifest.at("metadata.labels"), problem=problem)
    for manifest in manifests.workflows():
        if QUEUE_LABEL in mapping(mapping(manifest.spec.get("podMetadata")).get("labels")):
            path = manifest.at(f"{manifest.spec_path}.podMetadata.labels")
            problem = "the watcher is queued as well, and may take the quota that its gang waits for"
            yield Place(manifest=manifest, path=path, problem=problem)


def _at(template: Template, problem: str) -> Place:
    return Place(manifest=template.manifest, path=f"{template.path}.resource", problem=problem)


RULES = (
    Rule(name="object-created", severity="error", advice="take `apply`, which finds it again", check=not_applied),
    Rule(
        name="object-name",
        severity="error",
        advice="give each call a fixed name of its own, of the workflow's name, parameters and inputs",
        check=changes_by_attempt,
    ),
    Rule(
        name="object-conditions",
        severity="error",
        advice="set successCondition and failureCondition on a scalar of the status",
        check=no_conditions,
    ),
    Rule(name="object-owner", severity="error", advice="set setOwnerReference: true", check=no_owner),
    Rule(
        name="exit-handler-missing",
        severity="error",
        advice="set onExit to a template that deletes it: an owner reference acts on deletion alone",
        check=no_exit_handler,
    ),
    Rule(
        name="child-spec",
        severity="error",
        advice="give the child workflowTemplateRef and arguments alone",
        check=child_spec,
    ),
    Rule(
        name="gang-restarts",
        severity="error",
        advice="failurePolicy.maxRestarts, backoffLimit 0, restartPolicy Never: all restart from the last checkpoint",
        check=gang_restarts,
    ),
    Rule(
        name="gang-rendezvous",
        severity="error",
        advice="as many completions as parallelism, Indexed; nodes, node rank and the first pod's address for torchrun",
        check=gang_rendezvous,
    ),
    Rule(
        name="gang-logs",
        severity="warning",
        advice=f"label the pods {WORKFLOW_LABEL}: {{{{workflow.name}}}}",
        check=gang_logs,
    ),
    Rule(
        name="queue-label",
        severity="error",
        advice="label the JobSet alone, and leave the label out without a queue",
        check=queue,
    ),
    Rule(
        name="gang-failure-policy",
        severity="error",
        advice="correct it: the admission of JobSets and Jobs refuses it",
        check=gang_failure_policy,
    ),
)
