"""Traps of Argo: retries, loops, references, names, schedules. One edit each."""

from typing import Any

from tests.tampering import Case, Documents

ITERATION, CAMPAIGN, CRON = "policy-iteration", "policy-campaign", "policy-retraining"


def _retry(docs: Documents, name: str = "rollout", **changes: Any) -> None:
    strategy = docs.template(ITERATION, name)["retryStrategy"]
    for key, value in changes.items():
        if value is None:
            del strategy[key]
        else:
            strategy[key] = value


def _task(docs: Documents, name: str) -> dict[str, Any]:
    tasks = docs.template(ITERATION, "iteration")["dag"]["tasks"]
    return next(task for task in tasks if task["name"] == name)


def _expression(docs: Documents, old: str, new: str, name: str = "rollout") -> None:
    strategy = docs.template(ITERATION, name)["retryStrategy"]
    assert old in strategy["expression"]
    strategy["expression"] = strategy["expression"].replace(old, new)


def _retry_the_dag(docs: Documents) -> None:
    docs.template(ITERATION, "iteration")["retryStrategy"] = docs.template(ITERATION, "plan")["retryStrategy"]


def _retry_by_default(docs: Documents) -> None:
    docs.of(ITERATION)["spec"]["templateDefaults"] = {
        "retryStrategy": docs.template(ITERATION, "plan")["retryStrategy"]
    }


def _inline(docs: Documents) -> None:
    task = _task(docs, "plan")
    del task["template"]
    task["inline"] = docs.template(ITERATION, "plan") | {"name": "inline-plan"}


def _unwrapped(docs: Documents) -> None:
    docs.template(CAMPAIGN, "loop")["steps"][0][0]["template"] = "child"


def _skipped_output(docs: Documents) -> None:
    docs.template(ITERATION, "publish")["inputs"] = {"parameters": [{"name": "checkpoint"}]}
    value = "{{tasks.train.outputs.parameters.checkpoint-uri}}"
    _task(docs, "publish")["arguments"] = {"parameters": [{"name": "checkpoint", "value": value}]}


def _aggregate(docs: Documents) -> None:
    docs.template(ITERATION, "flush")["inputs"] = {"parameters": [{"name": "done"}]}
    value = "{{tasks.rollout.outputs.parameters.samples}}"
    _task(docs, "flush")["arguments"] = {"parameters": [{"name": "done", "value": value}]}


def _recurse(docs: Documents) -> None:
    step = docs.template(CAMPAIGN, "one")["steps"][0][0]
    docs.template(CAMPAIGN, "one")["steps"].append([step | {"name": "again", "template": "one"}])


def _container_set(docs: Documents) -> None:
    template = docs.template(ITERATION, "plan")
    template["containerSet"] = {"containers": [template.pop("container") | {"name": "main"}]}


def _loop_over(docs: Documents, items: list[Any]) -> None:
    del _task(docs, "reward")["withSequence"]
    _task(docs, "reward")["withItems"] = items


def _artifact(docs: Documents) -> dict[str, Any]:
    artifact: dict[str, Any] = docs.template(ITERATION, "report")["outputs"]["artifacts"][0]
    return artifact


def _cron(docs: Documents, key: str, value: Any) -> None:
    docs.of(CRON)["spec"][key] = value


def _cron_without(docs: Documents, key: str) -> None:
    del docs.of(CRON)["spec"][key]


def _label_metric(docs: Documents) -> None:
    metric = docs.template(ITERATION, "plan")["metrics"]["prometheus"][0]
    metric["labels"].append({"key": "run", "value": "{{workflow.parameters.run}}"})


def _rename_metric(docs: Documents) -> None:
    docs.template(ITERATION, "plan")["metrics"]["prometheus"][0]["name"] = "moerl.seconds"


def _display(docs: Documents, value: str) -> None:
    docs.template(ITERATION, "plan")["annotations"]["workflows.argoproj.io/display-name"] = value


def _display_on_pod(docs: Documents) -> None:
    template = docs.template(ITERATION, "plan")
    template["metadata"] = {"annotations": template.pop("annotations")}


def _parameter(docs: Documents, name: str, workflow: str = CAMPAIGN) -> dict[str, Any]:
    return next(item for item in docs.of(workflow)["spec"]["arguments"]["parameters"] if item["name"] == name)


def _pool(docs: Documents, name: str) -> dict[str, Any]:
    found: dict[str, Any] = docs.of(f"NodePool/{name}")["spec"]
    return found


def _short_lived_nodes(docs: Documents) -> None:
    _pool(docs, "moerl-train")["template"]["spec"]["terminationGracePeriod"] = "2m"


def _untainted(docs: Documents) -> None:
    del _pool(docs, "moerl-gpu")["template"]["spec"]["taints"]


def _one_mutex_for_both(docs: Documents) -> None:
    docs.of(ITERATION)["spec"]["synchronization"] = docs.of(CAMPAIGN)["spec"]["synchronization"]


CASES = (
    Case("retry-on-dag", _retry_the_dag),
    Case("retry-on-dag", _retry_by_default),
    Case("retry-on-dag", _inline),
    Case("retry-missing", lambda docs: docs.template(ITERATION, "plan").pop("retryStrategy"), ("unknown-variable",)),
    Case("retry-backoff", lambda docs: _retry(docs, limit=None)),
    Case(
        "retry-backoff",
        lambda docs: docs.template(ITERATION, "rollout")["retryStrategy"]["backoff"].update(maxDuration="1h"),
    ),
    Case("retry-backoff", lambda docs: docs.template(ITERATION, "rollout")["retryStrategy"]["backoff"].pop("cap")),
    Case("retry-lost-pod", lambda docs: _retry(docs, retryPolicy="OnError")),
    Case("retry-user-error", lambda docs: _retry(docs, expression=None), ("retry-out-of-memory",)),
    Case(
        "retry-expression",
        lambda docs: _expression(
            docs, "asInt(lastRetry.exitCode) in [69", "lastRetry.exitCode == '5' || asInt(lastRetry.exitCode) in [69"
        ),
    ),
    Case("retry-expression", lambda docs: _retry(docs, expression="asInt(lastRetry.exitCode) in 75 +")),
    Case("retry-lost-pod", lambda docs: _expression(docs, "pod deleted|", "")),
    Case("retry-user-error", lambda docs: _expression(docs, "[69, 75", "[65, 69, 75")),
    Case("retry-out-of-memory", lambda docs: _expression(docs, "OOMKilled", "OutOfMemory")),
    Case("retry-failed-child", lambda docs: _expression(docs, "failure condition|", "", "train-gang")),
    Case("retry-node-anti-affinity", lambda docs: _retry(docs, affinity={"nodeAntiAffinity": {}})),
    Case("limit-over-retried-child", _unwrapped),
    Case(
        "template-fail-fast",
        lambda docs: docs.template(ITERATION, "iteration").update(failFast=True),
        ("limit-over-retried-child",),
    ),
    Case("loop-goes-on", lambda docs: docs.template(CAMPAIGN, "loop").pop("failFast")),
    Case("aggregated-outputs", _aggregate),
    Case("skipped-output", _skipped_output),
    Case("all-failed", lambda docs: _task(docs, "flush").update(depends="!reward.AllFailed")),
    Case("recursion", _recurse),
    Case("loop-items-are-maps", lambda docs: _loop_over(docs, [{"worker": 0}])),
    Case("skipped-dependency", lambda docs: _task(docs, "publish").update(depends="train || train-gang")),
    Case("container-set", _container_set),
    Case("unknown-template", lambda docs: _task(docs, "plan").update(template="plann")),
    Case("unknown-template", lambda docs: docs.of(CAMPAIGN)["spec"].pop("entrypoint")),
    Case("workflow-arguments", lambda docs: docs.child("- name: reward-capacity", "- name: reward-capacityy")),
    Case("workflow-arguments", lambda docs: docs.child("name: policy-iteration", "name: policy-iterations")),
    Case("template-arguments", lambda docs: _task(docs, "rollout").pop("arguments")),
    Case("unknown-dependency", lambda docs: _task(docs, "report").update(depends="evaluation")),
    Case(
        "duplicate-name", lambda docs: docs.of(ITERATION)["spec"]["templates"].append(docs.template(ITERATION, "plan"))
    ),
    Case("unknown-variable", lambda docs: docs.container("plan")["args"].append("{{workflow.parameters.rum}}")),
    Case("unknown-variable", lambda docs: docs.container("plan")["args"].append("{{=workflow.parameters['rum']}}")),
    Case("unknown-variable", lambda docs: docs.container("plan")["args"].append("{{item}}")),
    Case(
        "unknown-variable",
        lambda docs: docs.container("plan")["args"].append("{{workflow.failures}}"),
        ("workflow-failures",),
    ),
    Case(
        "expression-hyphen",
        lambda docs: docs.container("plan")["args"].append("{{=workflow.parameters.training-nodes}}"),
        ("unknown-variable",),
    ),
    Case(
        "workflow-failures",
        lambda docs: docs.template(ITERATION, "exit")["steps"][0][0].update(when="{{workflow.failures}} != ''"),
    ),
    Case("memoize", lambda docs: docs.template(ITERATION, "plan").update(memoize={"key": "s3://b/k"})),
    Case("bad-name", lambda docs: _task(docs, "report").update(name="the_report"), ("unknown-variable",)),
    Case("bad-name", lambda docs: docs.template(ITERATION, "plan")["outputs"]["parameters"][0].update(name="a.b")),
    Case("bad-name", lambda docs: docs.of(ITERATION)["metadata"]["labels"].update(team="a team")),
    Case("name-too-long", lambda docs: docs.of(CRON)["metadata"].update(name="r" * 53)),
    Case(
        "name-too-long",
        lambda docs: docs.child(
            "name: '{{workflow.name}}-", "name: 'iteration-of-{{workflow.name}}-{{workflow.name}}-"
        ),
    ),
    Case(
        "bad-name", lambda docs: docs.of(ITERATION)["metadata"].update(name="Policy_Iteration"), ("workflow-arguments",)
    ),
    Case("display-name", lambda docs: _display(docs, "plan of {{workflow.parameters.iteration}}")),
    Case("display-name", lambda docs: _display(docs, "plan-{{workflow.parameters.run}}-{{workflow.parameters.run}}")),
    Case("display-name-missing", _display_on_pod),
    Case("display-name-missing", lambda docs: docs.template(ITERATION, "plan").pop("annotations")),
    Case("description-missing", lambda docs: docs.of(ITERATION)["metadata"].pop("annotations")),
    Case("description-missing", lambda docs: _parameter(docs, "image").pop("description")),
    Case("parameter-enum", lambda docs: _parameter(docs, "rollout-capacity").update(value="cheap")),
    Case("prometheus-metric", _rename_metric),
    Case("prometheus-metric", _label_metric),
    Case("run-mutex", lambda docs: docs.of(CAMPAIGN)["spec"].pop("synchronization")),
    Case("run-mutex", _one_mutex_for_both),
    Case(
        "object-name",
        lambda docs: docs.child(
            "name: '{{workflow.name}}-{{inputs.parameters.iteration}}'", "name: '{{workflow.name}}-x'"
        ),
    ),
    Case(
        "run-mutex",
        lambda docs: docs.of(CAMPAIGN)["spec"]["synchronization"]["mutexes"][0].update(name="{{workflow.name}}"),
    ),
    Case("clean-up", lambda docs: docs.of(ITERATION)["spec"].pop("podGC")),
    Case("clean-up", lambda docs: docs.of(ITERATION)["spec"]["podGC"].update(strategy="OnPodCompletion")),
    Case("clean-up", lambda docs: docs.of(ITERATION)["spec"]["ttlStrategy"].pop("secondsAfterFailure")),
    Case("artifact-gc", lambda docs: docs.of(ITERATION)["spec"].update(artifactGC={"strategy": "OnWorkflowDeletion"})),
    Case("artifact-key", lambda docs: _artifact(docs)["s3"].update(key="{{workflow.name}}/{{pod.name}}.html")),
    Case("artifact-archived", lambda docs: _artifact(docs).pop("archive")),
    Case("artifact-required", lambda docs: _artifact(docs).pop("optional")),
    Case("cron-overlap", lambda docs: _cron(docs, "concurrencyPolicy", "Replace")),
    Case("cron-overlap", lambda docs: _cron_without(docs, "concurrencyPolicy")),
    Case("cron-deadline", lambda docs: _cron_without(docs, "startingDeadlineSeconds")),
    Case("cron-schedule", lambda docs: _cron_without(docs, "timezone")),
    Case("cron-stop", lambda docs: _cron_without(docs, "stopStrategy")),
    Case("cron-schedule", lambda docs: _cron(docs, "schedules", ["0 2 * *"])),
    Case("nodepool-grace", _short_lived_nodes),
    Case("nodepool-consolidation", lambda docs: _pool(docs, "moerl-spot").pop("disruption")),
    Case("nodepool-taint", _untainted),
)
