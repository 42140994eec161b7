"""Resource templates: child Workflows, conditions, other kinds, deletion."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steps.errors import ConfigError
from tests.local_cluster import Cluster, call, child_of, inputs, output, step, workflow, workflow_template
from workflows.local.events import Event
from workflows.local.outputs import json_path
from workflows.run_failure import explain_failure

OK = step("ok", "write", "x", "from-{{workflow.name}}", outputs=[output("x", default="") | {"globalName": "said"}])
FAIL = step("fail", "exit", "65")
ONCE = step("once", "flaky", "65", "1", "once")
SAID = '{.status.outputs.parameters[?(@.name=="said")].value}'


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    templates = [workflow_template(template["name"], [template]) for template in (OK, FAIL, ONCE)]
    with Cluster(tmp_path, templates=templates) as cluster:
        yield cluster


def resource(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "resource": fields}


def test_children_have_deterministic_names_and_hand_up_outputs(cluster: Cluster) -> None:
    child = resource("child", **child_of("{{workflow.name}}-{{inputs.parameters.i}}", "ok")) | {
        "inputs": inputs("i"),
        "outputs": {"parameters": [{"name": "said", "valueFrom": {"jsonPath": SAID, "default": ""}}]},
    }
    loop = call("loop", "child", arguments={"i": "{{item}}"}, withSequence={"count": "2", "format": "%05d"})
    status = cluster.submit(workflow("wf", [{"name": "main", "parallelism": 1, "steps": [[loop]]}, child]))
    assert status.phase == "Succeeded"
    assert status.nodes["wf[0].loop(1:00001)"].outputs == {"said": "from-wf-00001"}
    assert [cluster.status(f"wf-0000{n}").phase for n in (0, 1)] == ["Succeeded", "Succeeded"]  # type: ignore[union-attr]


def test_a_finished_child_is_kept_and_not_run_again(cluster: Cluster) -> None:
    parents = [workflow(name, [resource("main", **child_of("child", "ok"))]) for name in ("wf", "wf2")]
    assert [cluster.submit(parent).phase for parent in parents] == ["Succeeded", "Succeeded"]
    assert len(cluster.trace()) == 1


def test_a_failed_child_makes_the_failure_condition_true_and_is_not_retried(cluster: Cluster) -> None:
    retry = {"limit": "5", "expression": "!(lastRetry.message matches 'failure condition')"}
    main = resource("main", **child_of("child", "fail")) | {"retryStrategy": retry}
    status = cluster.submit(workflow("wf", [main]))
    assert status.phase == "Failed"
    assert status.message == "failure condition '{status.phase in (Failed, Error)}' evaluated true"
    assert (status.nodes["wf(0)"].exit_code, len(cluster.trace())) == ("64", 1)


def test_apply_finds_a_child_that_failed_in_this_submission(cluster: Cluster) -> None:
    main = resource("main", **child_of("child", "once")) | {"retryStrategy": {"limit": "3"}}
    status = cluster.submit(workflow("wf", [main]))
    assert (status.phase, len(cluster.trace())) == ("Failed", 1)


def test_submitting_again_retries_the_failed_child(cluster: Cluster) -> None:
    parent = workflow("wf", [resource("main", **child_of("child", "once"))])
    assert cluster.submit(parent).phase == "Failed"
    assert cluster.submit(parent).phase == "Succeeded"
    assert len(cluster.trace()) == 2


def test_create_refuses_an_existing_child_and_get_reads_it(cluster: Cluster) -> None:
    fields = child_of("child", "ok")
    create = workflow("wf", [resource("main", **{**fields, "action": "create"})])
    assert cluster.submit(create).phase == "Succeeded"
    again = cluster.submit(create | {"metadata": {"name": "wf2"}})
    assert (again.phase, "already exists" in again.message) == ("Error", True)
    get = cluster.submit(workflow("wf3", [resource("main", **{**fields, "action": "get"})]))
    assert get.phase == "Succeeded"


def test_delete_removes_a_workflow_and_succeeds_when_there_is_none(cluster: Cluster) -> None:
    cluster.submit(workflow("child", [OK]))
    delete = resource("main", action="delete", flags=["workflow", "child"])
    assert cluster.submit(workflow("wf", [delete])).phase == "Succeeded"
    assert cluster.status("child") is None
    again = cluster.submit(workflow("wf2", [delete]))
    assert (again.phase, again.nodes["wf2"].exit_code) == ("Succeeded", "")


def test_other_kinds_are_refused_by_name(cluster: Cluster) -> None:
    main = resource(
        "main", action="apply", manifest="kind: PyTorchJob\nmetadata: {name: x}\n", successCondition="status.x == y"
    )
    status = cluster.submit(workflow("wf", [main]))
    assert "apply of kind PyTorchJob is not known to the local executor (Workflow and JobSet are)" in status.message


def test_a_stopped_campaign_goes_on_inside_its_child(tmp_path: Path) -> None:
    slow = step("slow", "drain", "{{=retries == '0' ? '60' : '0'}}", retryStrategy={"limit": "1"})
    body = {"name": "body", "steps": [[call("ok")], [call("slow")]]}
    template = workflow_template("iteration", [body, OK, slow])

    def stop(event: Any) -> None:
        if event.template == "slow" and event.node_type == "Pod" and event.phase == "Running" and event.attempt == 0:
            cluster.stop()

    with Cluster(tmp_path, templates=[template], on_event=stop) as cluster:
        # The exit handler deletes what still runs: the child, which was stopped with it, is waited for.
        bye = resource("bye", action="delete", flags=["workflow", "-l", "workflows.argoproj.io/completed!=true,a=b"])
        child = child_of("child", "iteration")
        child["manifest"] = child["manifest"].replace('{name: "child"}', "{name: child, labels: {a: b}}")
        parent = workflow("wf", [resource("main", **child), bye], onExit="bye")
        assert cluster.submit(parent).message == "Stopped with strategy 'Stop'"
        assert cluster.submit(parent).phase == "Succeeded"
        assert [line for line in cluster.trace() if line.startswith("write")] == ["write x from-child"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("{.a}", "1"),
        ("{.b.c}", "text"),
        ("{.d[1]}", "y"),
        ('{.e[?(@.name=="n")].value}', "v"),
        ('{.e[?(@.name=="m")].value}', None),
        ("{.missing.deep}", None),
        ("{.d[7]}", None),
        ("{.b}", '{"c": "text"}'),
    ],
)
def test_json_path_reads_values(path: str, expected: str | None) -> None:
    document = {"a": 1, "b": {"c": "text"}, "d": ["x", "y"], "e": [{"name": "n", "value": "v"}]}
    assert json_path(path, document) == expected


@pytest.mark.parametrize("path", ["a.b", "{.a[*]}", "{..a}", "{range .a}", "{}"])
def test_json_path_refuses_the_rest(path: str) -> None:
    with pytest.raises(ConfigError, match="outside the subset"):
        json_path(path, {"a": []})


def test_a_failed_child_is_explained_by_its_own_step(cluster: Cluster, tmp_path: Path) -> None:
    status = cluster.submit(workflow("wf", [resource("main", **child_of("wf-1", "fail"))]))
    failure = explain_failure(tmp_path / "runs", status)
    assert (failure.exit_code, failure.what) == (65, "wf-1 of wf-1 failed (exit 65)")


def test_a_child_in_error_without_a_pod_is_not_the_callers_usage_error(tmp_path: Path) -> None:
    """The resource's own 64 says nothing to a user."""
    wrong = step("wrong", "write", "x", "{{inputs.parameters.v}}", inputs=inputs("v"))
    template = workflow_template("iteration", [{"name": "body", "steps": [[call("wrong")]]}, wrong])
    with Cluster(tmp_path, templates=[template]) as cluster:
        status = cluster.submit(workflow("wf", [resource("main", **child_of("wf-1", "iteration"))]))
    failure = explain_failure(tmp_path / "runs", status)
    assert (status.nodes["wf"].exit_code, failure.exit_code) == ("64", ConfigError.exit_code)
    assert failure.what == "wrong of wf-1 failed (exit 78)"
    assert failure.why == "wf-1[0].wrong: inputs.parameters.v of wrong was not supplied"


def test_a_pod_that_could_not_be_created_ends_with_78_and_is_no_exit_code_to_retry(tmp_path: Path) -> None:
    env = [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "gone", "key": "k"}}}]
    retry = {"limit": "2", "retryPolicy": "Always", "expression": "asInt(lastRetry.exitCode) in [69, 78]"}
    with Cluster(tmp_path) as cluster:
        status = cluster.submit(
            workflow("wf", [step("main", "exit", "0", container={"env": env}, retryStrategy=retry)])
        )
    failure = explain_failure(tmp_path / "runs", status)
    assert (len(status.attempts_of("wf")), failure.exit_code) == (1, 78)
    assert failure.why == 'CreateContainerConfigError: secret "gone" not found (env X)'


def test_a_missing_output_is_a_bug_told_by_its_message(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        status = cluster.submit(workflow("wf", [step("main", "exit", "0", outputs=[output("x")])]))
    failure = explain_failure(tmp_path / "runs", status)
    assert (failure.exit_code, failure.what) == (1, "wf of wf failed (exit 1)")
    assert failure.why.startswith("wait: Error (exit code 64): output x")


def test_a_second_stop_while_the_children_end_runs_no_exit_handler(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        watching = (event.workflow, event.node_type, event.template) == ("wf", "Pod", "main")
        draining = watching and event.phase == "Failed"
        if draining or (event.workflow == "child" and event.template == "slow" and event.phase == "Running"):
            cluster.stop()

    slow = step("slow", "stubborn", "60", podSpecPatch="terminationGracePeriodSeconds: 20\n")
    main = resource("main", **child_of("child", "slow"))
    with Cluster(tmp_path, templates=[workflow_template("slow", [slow])], on_event=stop) as cluster:
        status = cluster.submit(workflow("wf", [main, step("bye", "exit", "0")], onExit="bye"))
        assert (status.phase, status.message) == ("Failed", "Stopped with strategy 'Terminate'")
        assert "wf.onExit" not in status.nodes
