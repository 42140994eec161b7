"""Each construct of the manifests, run with real processes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steps.errors import ConfigError
from tests.local_cluster import Cluster, call, inputs, output, step, workflow, workflow_template

Open = Callable[..., Cluster]


@pytest.fixture
def open_cluster(tmp_path: Path) -> Iterator[Open]:
    clusters: list[Cluster] = []

    def open_one(**options: Any) -> Cluster:
        clusters.append(Cluster(tmp_path, **options))
        return clusters[-1]

    yield open_one
    for cluster in clusters:
        cluster.close()


WRITE = step("write", "write", "x", "{{inputs.parameters.v}}", inputs=inputs("v"), outputs=[output("x")])
OK = step("ok", "write", "x", "1", outputs=[output("x")])
FAIL = step("fail", "exit", "65")


def dag(*tasks: Any, **template: Any) -> dict[str, Any]:
    return {"name": "main", "dag": {"tasks": list(tasks), **template.pop("dag", {})}, **template}


def steps(*groups: list[Any], **template: Any) -> dict[str, Any]:
    return {"name": "main", "steps": list(groups), **template}


def phases(status: Any) -> dict[str, str]:
    """Phase of each node below the entrypoint, by the last part of its name."""
    return {name.removeprefix("wf."): node.phase for name, node in status.nodes.items() if name != "wf"}


def test_a_step_hands_its_output_to_the_next(open_cluster: Open) -> None:
    main = steps(
        [call("a", "write", arguments={"v": "{{workflow.parameters.p}}"})],
        [call("b", "write", arguments={"v": "{{steps.a.outputs.parameters.x}}-{{workflow.name}}"})],
    )
    arguments = {"parameters": [{"name": "p", "value": 7}]}
    status = open_cluster().submit(workflow("wf", [main, WRITE], arguments=arguments))
    assert (status.phase, status.nodes["wf[1].b"].outputs) == ("Succeeded", {"x": "7-wf"})


def test_only_one_newline_is_cut_from_an_output(open_cluster: Open) -> None:
    main = step("main", "write", "x", " a\n", outputs=[output("x")])
    status = open_cluster().submit(workflow("wf", [main]))
    assert status.nodes["wf"].outputs == {"x": " a\n"}


def test_a_missing_output_takes_its_default_or_is_an_error(open_cluster: Open) -> None:
    with_default = step("main", "exit", "0", outputs=[output("x", default="d")])
    status = open_cluster().submit(workflow("wf", [with_default]))
    assert status.nodes["wf"].outputs == {"x": "d"}
    status = open_cluster().submit(workflow("wf2", [step("main", "exit", "0", outputs=[output("x")])]))
    assert (status.phase, status.nodes["wf2"].phase) == ("Error", "Error")
    assert status.message.startswith("wait: Error (exit code 64): output x: no such file")


@pytest.mark.parametrize(("optional", "phase"), [(True, "Succeeded"), (False, "Error")])
def test_an_artifact_may_be_missing_only_if_optional(open_cluster: Open, optional: bool, phase: str) -> None:
    artifact = {"name": "report", "path": "/tmp/moerl/outputs/report.html", "optional": optional}
    main = step("main", "exit", "0") | {"outputs": {"artifacts": [artifact]}}
    assert open_cluster().submit(workflow("wf", [main])).phase == phase


def test_an_artifact_is_kept_at_its_path(open_cluster: Open) -> None:
    artifact = {"name": "x", "path": "/tmp/moerl/outputs/x", "archive": {"none": {}}, "s3": {"key": "k"}}
    main = step("main", "write", "x", "<html>") | {"outputs": {"artifacts": [artifact]}}
    status = open_cluster().submit(workflow("wf", [main]))
    assert Path(status.nodes["wf"].artifacts["x"]).read_text() == "<html>\n"


def test_failed_steps_end_their_steps_template(open_cluster: Open) -> None:
    status = open_cluster().submit(workflow("wf", [steps([call("fail"), call("ok")], [call("ok2", "ok")]), FAIL, OK]))
    assert phases(status) == {"wf[0].fail": "Failed", "wf[0].ok": "Succeeded"}
    assert (status.phase, status.message) == ("Failed", "child 'wf[0].fail' failed")
    assert status.nodes["wf[0].fail"].message == "main: Error (exit code 65)"


def test_continue_on_tolerates_a_failed_step(open_cluster: Open) -> None:
    main = steps([call("fail", continueOn={"failed": True})], [call("ok")])
    assert open_cluster().submit(workflow("wf", [main, FAIL, OK])).phase == "Succeeded"


def test_dag_runs_what_depends_allows(open_cluster: Open) -> None:
    main = dag(
        call("ok"),
        call("fail"),
        call("after-ok", "ok", depends="ok"),
        call("after-fail", "ok", depends="fail"),
        call("mend", "ok", depends="fail.Failed && !fail.Errored"),
        call("skip", "ok", depends="ok", when="{{tasks.ok.outputs.parameters.x}} == 2"),
        call("after-skip", "ok", depends="skip && (skip.Skipped || skip.Succeeded)"),
        call("after-omitted", "ok", depends="after-fail.Omitted"),
    )
    status = open_cluster().submit(workflow("wf", [main, OK, FAIL]))
    assert phases(status) == {
        "ok": "Succeeded",
        "fail": "Failed",
        "after-ok": "Succeeded",
        "after-fail": "Omitted",
        "mend": "Succeeded",
        "skip": "Skipped",
        "after-skip": "Succeeded",
        "after-omitted": "Succeeded",
    }
    assert status.phase == "Succeeded"


def test_an_omitted_leaf_inherits_its_parents_failure(open_cluster: Open) -> None:
    status = open_cluster().submit(workflow("wf", [dag(call("fail"), call("ok", depends="fail")), OK, FAIL]))
    assert (status.phase, phases(status)) == ("Failed", {"fail": "Failed", "ok": "Omitted"})


def test_dag_fail_fast_stops_scheduling_and_false_does_not(open_cluster: Open) -> None:
    slow = step("slow", "sleep", "0.6")
    tasks = (call("fail"), call("slow"), call("next", "ok", depends="slow"))
    fast = open_cluster(max_parallel_pods=4).submit(workflow("wf", [dag(*tasks), OK, FAIL, slow]))
    assert (fast.phase, phases(fast)) == ("Failed", {"fail": "Failed", "slow": "Succeeded"})
    patient = dag(*tasks, dag={"failFast": False})
    status = open_cluster(max_parallel_pods=4).submit(workflow("wf2", [patient, OK, FAIL, slow]))
    assert (status.phase, status.nodes["wf2.next"].phase) == ("Failed", "Succeeded")


def test_sequence_is_resolved_when_it_is_reached(open_cluster: Open) -> None:
    sequence = {"start": "{{steps.first.outputs.parameters.x}}", "count": "3", "format": "%05d"}
    main = steps(
        [call("first", "write", arguments={"v": "8"})],
        [call("loop", "write", arguments={"v": "{{item}}"}, withSequence=sequence)],
    )
    status = open_cluster().submit(workflow("wf", [main, WRITE]))
    assert [node.outputs["x"] for name, node in status.nodes.items() if "loop" in name] == ["00008", "00009", "00010"]
    assert "wf[1].loop(2:00010)" in status.nodes


def test_items_and_params_fan_out_and_aggregate_successes(open_cluster: Open) -> None:
    either = step(
        "either", "{{inputs.parameters.verb}}", "{{inputs.parameters.v}}", "v", inputs=inputs("verb", "v")
    ) | {"outputs": {"parameters": [output("x", default="d")]}}
    items = [{"verb": "write", "v": "x"}, {"verb": "exit", "v": "65"}, {"verb": "exit", "v": "0"}]
    main = dag(
        call("fan", "either", arguments={"verb": "{{item.verb}}", "v": "{{item.v}}"}, withItems=items),
        call(
            "each",
            "write",
            arguments={"v": "got-{{item}}"},
            withParam="{{tasks.fan.outputs.parameters.x}}",
            depends="fan.AnySucceeded && !fan.AllFailed",
        ),
    )
    status = open_cluster().submit(workflow("wf", [main, either, WRITE]))
    assert [node.outputs["x"] for name, node in status.nodes.items() if "each" in name] == ["got-v", "got-d"]
    assert status.phase == "Succeeded"


def test_a_param_that_is_no_list_is_an_error_of_its_node(open_cluster: Open) -> None:
    main = dag(call("a", "write", arguments={"v": "x"}, withParam="not json"))
    status = open_cluster().submit(workflow("wf", [main, WRITE]))
    assert status.phase == "Error"
    assert "could not be parsed as a JSON list" in status.nodes["wf.a"].message


def test_aggregates_without_a_success_are_not_defined(open_cluster: Open) -> None:
    main = dag(
        call("fan", "fail", withItems=[1, 2]),
        call("use", "write", arguments={"v": "{{tasks.fan.outputs.parameters.x}}"}, depends="fan.Failed"),
    )
    status = open_cluster().submit(workflow("wf", [main, FAIL, WRITE]))
    assert "{{tasks.fan.outputs.parameters.x}} is not defined here" in status.nodes["wf.use"].message


def test_parallelism_one_with_fail_fast_stops_the_loop(open_cluster: Open) -> None:
    one = {"name": "one", "steps": [[call("run", "flaky", arguments={"i": "{{inputs.parameters.i}}"})]]} | {
        "inputs": inputs("i")
    }
    flaky = step("flaky", "exit", "6{{inputs.parameters.i}}", inputs=inputs("i"))
    loop = call("loop", "one", arguments={"i": "{{item}}"}, withSequence={"count": "4"})
    status = open_cluster().submit(workflow("wf", [steps([loop], parallelism=1, failFast=True), one, flaky]))
    assert (status.phase, status.message) == ("Failed", "template has failed or errored children and failFast enabled")
    assert [name for name, node in status.nodes.items() if node.type == "Pod"] == ["wf[0].loop(0:0)[0].run"]


def test_dag_outputs_come_from_tasks_defaults_and_expressions(open_cluster: Open) -> None:
    outputs = {
        "parameters": [
            {"name": "a", "valueFrom": {"parameter": "{{tasks.a.outputs.parameters.x}}"}, "globalName": "shown"},
            {"name": "b", "valueFrom": {"parameter": "{{tasks.b.outputs.parameters.x}}", "default": ""}},
            {"name": "c", "valueFrom": {"expression": "asInt(tasks.a.outputs.parameters.x) + 1"}},
        ]
    }
    main = dag(call("a", "write", arguments={"v": "4"}), call("b", "ok", when="false"), outputs=outputs)
    status = open_cluster().submit(workflow("wf", [main, WRITE, OK]))
    assert status.nodes["wf"].outputs == {"a": "4", "b": "", "c": "5"}
    assert status.outputs == {"shown": "4"}


def test_input_defaults_and_missing_inputs(open_cluster: Open) -> None:
    target = step("target", "write", "x", "{{inputs.parameters.v}}", outputs=[output("x")])
    target["inputs"] = {"parameters": [{"name": "v", "default": "{{workflow.name}}"}]}
    status = open_cluster().submit(workflow("wf", [dag(call("a", "target"), call("b", "write")), target, WRITE]))
    assert status.nodes["wf.a"].outputs == {"x": "wf"}
    assert "inputs.parameters.v of write was not supplied" in status.nodes["wf.b"].message


def test_retries_follow_the_expression_and_see_their_number(open_cluster: Open) -> None:
    retry = {"limit": "4", "retryPolicy": "Always", "expression": "asInt(lastRetry.exitCode) in [75, 143]"}
    again = step("again", "flaky", "75", "2", "n", retryStrategy=retry)
    never = step("never", "exit", "65", retryStrategy=retry)
    status = open_cluster().submit(workflow("wf", [dag(call("again"), call("never")), again, never]))
    assert [status.nodes[f"wf.again({n})"].phase for n in range(3)] == ["Failed", "Failed", "Succeeded"]
    assert (status.nodes["wf.again"].type, status.nodes["wf.again"].attempt) == ("Retry", 2)
    assert [name for name in status.nodes if "never" in name] == ["wf.never", "wf.never(0)"]
    assert status.nodes["wf.never"].message == "main: Error (exit code 65)"


def test_retries_end_at_the_limit(open_cluster: Open) -> None:
    main = step("main", "exit", "{{=75 + asInt(retries)}}", retryStrategy={"limit": 2})
    status = open_cluster().submit(workflow("wf", [main]))
    assert (status.phase, status.message) == ("Failed", "No more retries left")
    assert [status.nodes[f"wf({n})"].exit_code for n in range(3)] == ["75", "76", "77"]


def test_environment_is_the_manifests_and_the_pods_own(open_cluster: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOERL_STORE", "/leaked")
    names = ["A", "STORE", "KEY", "NONE", "POD_NAME", "WF", "MOERL_CAPACITY_TYPE", "MOERL_STORE", "OMP_NUM_THREADS"]
    main = step("main", "env", *names, outputs=[output("env")])
    main["container"]["env"] = [
        {"name": "A", "value": "{{workflow.name}}-$(POD_NAME)-$$x"},
        {"name": "STORE", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "store"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "key"}}},
        {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "other", "optional": True}}},
        {"name": "WF", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['workflows.argoproj.io/workflow']"}}},
        {"name": "MOERL_CAPACITY_TYPE", "value": "spot"},
    ]
    cluster = open_cluster(config_maps={"cm": {"store": "/s"}}, secrets={"secret": {"key": "k"}})
    status = cluster.submit(workflow("wf", [main]))
    pod = status.nodes["wf"].pod_name
    assert json.loads(status.nodes["wf"].outputs["env"]) == {
        "A": f"wf-{pod}-$x",
        "STORE": "/s",
        "KEY": "k",
        "NONE": None,
        "POD_NAME": pod,
        "WF": "wf",
        "MOERL_CAPACITY_TYPE": "local",
        "MOERL_STORE": None,
        "OMP_NUM_THREADS": "1",
    }


def test_a_missing_secret_is_an_error_that_names_it(open_cluster: Open) -> None:
    main = step("main", "exit", "0")
    reference = {"secretKeyRef": {"name": "secret", "key": "url"}}
    main["container"]["env"] = [{"name": "URL", "valueFrom": reference}]
    status = open_cluster(secrets={"secret": {}}).submit(workflow("wf", [main]))
    assert status.phase == "Error"
    assert status.message == "CreateContainerConfigError: couldn't find key url in secret secret (env URL)"


def test_exit_handler_sees_the_status_and_decides_nothing_by_succeeding(open_cluster: Open) -> None:
    bye = step("bye", "write", "x", "{{workflow.status}}", outputs=[output("x")])
    status = open_cluster().submit(workflow("wf", [FAIL, bye], onExit="bye"))
    assert (status.phase, status.nodes["wf.onExit"].outputs) == ("Failed", {"x": "Failed"})
    status = open_cluster().submit(workflow("wf2", [OK, FAIL], onExit="fail"))
    assert status.phase == "Failed"


def test_display_names_are_resolved_and_checked(open_cluster: Open) -> None:
    annotation = "workflows.argoproj.io/display-name"
    named = {**WRITE, "annotations": {annotation: "worker-{{inputs.parameters.v}}"}}
    main = dag(call("a", "write", arguments={"v": "3"}), call("b", "write", arguments={"v": "bad name"}))
    status = open_cluster().submit(workflow("wf", [main, named]))
    assert status.nodes["wf.a"].display_name == "worker-3"
    assert (status.nodes["wf.b"].phase, "does not match" in status.nodes["wf.b"].message) == ("Error", True)


def test_other_commands_run_as_plain_processes(open_cluster: Open) -> None:
    shell = {"name": "main", "container": {"command": ["sh", "-c"], "args": ["printf hello > $MOERL_OUTPUTS_DIR/x"]}}
    shell["outputs"] = {"parameters": [output("x")]}
    missing = {"name": "main", "container": {"command": ["no-such-command"]}}
    assert open_cluster().submit(workflow("wf", [shell])).nodes["wf"].outputs == {"x": "hello"}
    status = open_cluster().submit(workflow("wf2", [missing]))
    assert status.message == "main: Error (exit code 64)"


def test_a_bug_leaves_its_own_traceback_in_the_log(open_cluster: Open) -> None:
    status = open_cluster().submit(workflow("wf", [step("main", "raise")]))
    log = (Path(status.nodes["wf"].folder) / "main.log").read_text()
    assert status.message == "main: Error (exit code 1)"
    assert "RuntimeError: a bug" in log and "tinystep.py" in log and "warm_server" not in log


def test_templates_and_arguments(open_cluster: Open) -> None:
    parameters = [{"name": "p"}, {"name": "q", "value": "2"}]
    main = step("main", "write", "x", "{{workflow.parameters.p}}{{workflow.parameters.q}}", outputs=[output("x")])
    cluster = open_cluster(templates=[workflow_template("t", [main], arguments={"parameters": parameters})])

    def submit(name: str, template: str, **given: str) -> Any:
        arguments = {"parameters": [{"name": key, "value": value} for key, value in given.items()]}
        spec = {"workflowTemplateRef": {"name": template}, "arguments": arguments}
        return cluster.submit({"kind": "Workflow", "metadata": {"name": name}, "spec": spec})

    assert submit("wf", "t", p="1").nodes["wf"].outputs == {"x": "12"}
    with pytest.raises(ConfigError, match="argument p is missing"):
        submit("wf2", "t")
    with pytest.raises(ConfigError, match="'nope' not found"):
        submit("wf3", "nope")


def test_capacity_leaves_pods_pending_and_runs_all(open_cluster: Open) -> None:
    running: list[int] = []
    now = 0

    def count(event: Any) -> None:
        nonlocal now
        if event.node_type == "Pod" and event.phase != "Pending":
            now += 1 if event.phase == "Running" else -1
            running.append(now)

    fan = call("fan", "slow", withSequence={"count": "5"})
    cluster = open_cluster(max_parallel_pods=2, on_event=count)
    status = cluster.submit(workflow("wf", [dag(fan), step("slow", "sleep", "0.2")]))
    assert (status.phase, max(running), len(cluster.trace())) == ("Succeeded", 2, 5)


def test_progress_is_told(open_cluster: Open) -> None:
    cluster = open_cluster()
    cluster.submit(workflow("wf", [step("main", "progress")]))
    assert [event.progress for event in cluster.events if event.kind == "progress"][-1] == "2/2"


def test_events_tell_every_change_in_order(open_cluster: Open) -> None:
    cluster = open_cluster()
    cluster.submit(workflow("wf", [OK]))
    assert [(event.kind, event.phase) for event in cluster.events] == [
        ("workflow", "Running"),
        ("node", "Pending"),
        ("node", "Running"),
        ("node", "Succeeded"),
        ("workflow", "Succeeded"),
    ]
