"""Rules on retries (Argo: workflow/controller/operator.go, processNodeRetries, retryStrategy, inferFailedReason;
docs/retries.md): what one reclaim of a Spot node can look like, and which failures another attempt can't mend.
"""

from collections.abc import Iterator

from workflows.lint.model import Manifests, Place, Rule, Template, mapping
from workflows.lint.tags import replace_tags, samples_for
from workflows.local.expression_values import ExpressionError, Value
from workflows.local.expressions import evaluate_bool

# (phase, exit code, message): what Argo records for one and the same reclaimed node, depending on what it saw first.
LOST_PODS = (
    ("Error", "-1", "pod deleted"),
    ("Failed", "143", "main: Error (exit code 143)"),
    ("Failed", "75", "main: Error (exit code 75)"),
    ("Failed", "-1", "Pod was terminated in response to imminent node shutdown."),
)
FINAL_FAILURES = (
    ("Failed", "64", "main: Error (exit code 64)"),
    ("Failed", "65", "main: Error (exit code 65)"),
    ("Failed", "78", "main: Error (exit code 78)"),
    ("Failed", "1", "main: Error (exit code 1)"),
)
OUT_OF_MEMORY = ("Failed", "137", "main: OOMKilled (exit code 137)")
FAILED_CHILD = ("Failed", "64", "Error (exit code 64): failure condition 'status.phase == Failed' evaluated true")
LOST_WATCHERS = (
    ("Error", "-1", "pod deleted"),
    ("Failed", "143", "main: Error (exit code 143)"),
    # argoexec ends with 64 for everything, SIGTERM too.
    ("Failed", "64", "main: Error (exit code 64): context canceled"),
)

Failure = tuple[str, str, str]


def _retried(manifests: Manifests) -> Iterator[tuple[Template, dict[str, object]]]:
    return ((template, template.retry) for template in manifests.templates() if template.retry is not None)


def retry_on_group(manifests: Manifests) -> Iterator[Place]:
    for template, _ in _retried(manifests):
        if template.is_group:
            kind = "DAG" if "dag" in template.body else "Steps"
            yield _at(template, f"a {kind} template is retried, and each time every child of it runs again")
        elif template.inline:
            yield _at(template, "an inline template is retried (argo-workflows#15051)")
    for manifest in manifests.workflows():
        for path, holder in (
            ("", manifest.spec),
            (".templateDefaults", mapping(manifest.spec.get("templateDefaults"))),
        ):
            if "retryStrategy" in holder:
                where = manifest.at(f"{manifest.spec_path}{path}.retryStrategy")
                yield Place(manifest=manifest, path=where, problem="it reaches the DAG and Steps templates as well")


def no_retry(manifests: Manifests) -> Iterator[Place]:
    for template in manifests.templates():
        if template.has_pod and template.retry is None:
            yield Place(manifest=template.manifest, path=template.path, problem="its pod is not retried")


def backoff(manifests: Manifests) -> Iterator[Place]:
    for template, strategy in _retried(manifests):
        given = mapping(strategy.get("backoff"))
        if strategy.get("limit") in (None, ""):
            yield _at(template, "without limit it goes on for ever, and no backoff is waited for")
        if given.get("maxDuration"):
            yield _at(template, "backoff.maxDuration counts the runs, too, and becomes the later pods' deadline")
        if not given.get("duration"):
            yield _at(template, "its backoff has no duration" if given else "it has no backoff")
        elif str(given.get("factor") or "1") != "1" and not given.get("cap"):
            yield _at(template, "its backoff grows without a cap")


def expression(manifests: Manifests) -> Iterator[Place]:
    for template, strategy in _retried(manifests):
        text = str(strategy.get("expression") or "")
        if "lastRetry.exitCode" in text.replace("asInt(lastRetry.exitCode)", ""):
            yield _at(template, "lastRetry.exitCode is compared as it is, which is text: write asInt(...)")
        elif text:
            try:
                _evaluate(template, LOST_PODS[0])
            except ExpressionError as error:
                yield _at(template, f"expression: {error}")


def lost_pod(manifests: Manifests) -> Iterator[Place]:
    for template, _ in _retried(manifests):
        failures = LOST_WATCHERS if "resource" in template.body else LOST_PODS
        for failure in failures:
            if _again(template, failure) is False:
                yield _at(template, f"{_shown(failure)} is not tried again")
                break


def user_error(manifests: Manifests) -> Iterator[Place]:
    for template, _ in _retried(manifests):
        for failure in () if "resource" in template.body else FINAL_FAILURES:
            if _again(template, failure):
                yield _at(template, f"{_shown(failure)} is tried again")
                break


def out_of_memory(manifests: Manifests) -> Iterator[Place]:
    for template, _ in _retried(manifests):
        if "resource" not in template.body and _again(template, OUT_OF_MEMORY):
            yield _at(template, "a container that was killed for want of memory is tried again with as little")


def failed_child(manifests: Manifests) -> Iterator[Place]:
    for template, _ in _retried(manifests):
        conditions = mapping(template.body.get("resource")).get("failureCondition")
        if conditions and _again(template, FAILED_CHILD):
            yield _at(template, "a child that has failed is applied again, and fails at once")


def node_anti_affinity(manifests: Manifests) -> Iterator[Place]:
    for template, strategy in _retried(manifests):
        if "nodeAntiAffinity" in mapping(strategy.get("affinity")):
            yield _at(template, "affinity.nodeAntiAffinity shuts out one node more after each failure")


def _again(template: Template, failure: Failure) -> bool | None:
    """Whether this failure is tried again; None: the expression is none."""
    strategy = mapping(template.retry)
    policy = strategy.get("retryPolicy") or ("Always" if strategy.get("expression") else "OnFailure")
    if policy != "Always" and policy != {"Failed": "OnFailure", "Error": "OnError"}[failure[0]]:
        return False
    if not strategy.get("expression"):
        return True
    try:
        return _evaluate(template, failure)
    except ExpressionError:
        return None


def _evaluate(template: Template, failure: Failure) -> bool:
    phase, exit_code, message = failure
    manifest = template.manifest
    last: dict[str, Value] = {"status": phase, "exitCode": exit_code, "message": message, "duration": "60"}
    samples = samples_for(manifest.body, manifest.spec, template.body, filled=True)
    text = replace_tags(str(mapping(template.retry)["expression"]), samples, template.path)
    return evaluate_bool(text, {"lastRetry": last, "retries": "0"})


def _shown(failure: Failure) -> str:
    return f"{failure[0]} {failure[2]!r}"


def _at(template: Template, problem: str) -> Place:
    return Place(manifest=template.manifest, path=f"{template.path}.retryStrategy", problem=problem)


_STRATEGY = "take workflows.retries.step_retry, or attach_retry for a resource template"
RULES = (
    Rule(
        name="retry-on-dag",
        severity="error",
        advice="put retryStrategy on the leaf templates alone",
        check=retry_on_group,
    ),
    Rule(
        name="retry-missing",
        severity="error",
        advice=f"one lost node must not end the run: {_STRATEGY}",
        check=no_retry,
    ),
    Rule(
        name="retry-backoff",
        severity="error",
        advice="set limit, backoff.duration, factor and cap, and no maxDuration",
        check=backoff,
    ),
    Rule(name="retry-expression", severity="error", advice="mend the expression", check=expression),
    Rule(
        name="retry-lost-pod",
        severity="error",
        advice=f"set retryPolicy Always, and retry what the platform took away: {_STRATEGY}",
        check=lost_pod,
    ),
    Rule(
        name="retry-user-error",
        severity="error",
        advice=f"never retry exit 1, 64, 65 and 78: {_STRATEGY}",
        check=user_error,
    ),
    Rule(name="retry-out-of-memory", severity="error", advice="exclude messages with OOMKilled", check=out_of_memory),
    Rule(
        name="retry-failed-child",
        severity="error",
        advice="exclude messages with 'failure condition'; let the child's own retries work",
        check=failed_child,
    ),
    Rule(
        name="retry-node-anti-affinity",
        severity="warning",
        advice="leave it out, or be sure that the pool is larger than the limit",
        check=node_anti_affinity,
    ),
)
