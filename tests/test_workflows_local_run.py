"""Rules of Argo's controller that a workflow meets on its way: exit handlers, fan-outs, places, fields with tags."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.local_cluster import Cluster, call, child_of, inputs, output, step, workflow, workflow_template

OK = step("ok", "exit", "0")
FAIL = step("fail", "exit", "65")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, max_parallel_pods=4) as cluster:
        yield cluster


def dag(*tasks: Any, **template: Any) -> dict[str, Any]:
    return {"name": "main", "dag": {"tasks": list(tasks), **template.pop("dag", {})}, **template}


# -- exit handlers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("main", "phase"), [(OK, "Failed"), (FAIL, "Failed")])
def test_a_failed_exit_handler_fails_a_workflow_that_had_succeeded(
    cluster: Cluster, main: dict[str, Any], phase: str
) -> None:
    bye = step("bye", "exit", "78")
    status = cluster.submit(workflow("wf", [main, bye], onExit="bye"))
    assert status.phase == phase
    assert status.message == f"main: Error (exit code {'78' if main is OK else '65'})"


def test_an_error_in_the_exit_handler_does_not_hide_the_failure_before_it(cluster: Cluster) -> None:
    broken = step("bye", "write", "x", "{{nowhere}}")
    status = cluster.submit(workflow("wf", [FAIL, broken], onExit="bye"))
    assert (status.phase, status.message) == ("Failed", "main: Error (exit code 65)")


def test_the_status_is_running_while_it_runs(cluster: Cluster) -> None:
    status = cluster.submit(workflow("wf", [step("main", "write", "x", "{{workflow.status}}", outputs=[output("x")])]))
    assert status.nodes["wf"].outputs == {"x": "Running"}


def test_an_exit_handler_may_branch_on_the_status_and_read_the_failures(cluster: Cluster) -> None:
    tell = step("tell", "write", "x", "{{workflow.failures}}", outputs=[output("x")])
    bye = {
        "name": "bye",
        "steps": [
            [
                call("tell", when="{{workflow.status}} != Succeeded"),
                call("celebrate", "ok", when="{{workflow.status}} == Succeeded"),
            ]
        ],
    }
    status = cluster.submit(workflow("wf", [FAIL, bye, tell, OK], onExit="bye"))
    quoted = json.loads(status.nodes["wf.onExit[0].tell"].outputs["x"])
    (failure,) = json.loads(quoted)
    assert (failure["displayName"], failure["templateName"], failure["phase"]) == ("wf", "fail", "Failed")
    assert status.nodes["wf.onExit[0].celebrate"].message == "when 'Failed == Succeeded' evaluated false"


def test_the_exit_handler_runs_again_when_the_workflow_is_resumed(cluster: Cluster) -> None:
    manifest = workflow("wf", [step("main", "flaky", "65", "1", "once"), OK], onExit="ok")
    assert [cluster.submit(manifest).phase for _ in range(2)] == ["Failed", "Succeeded"]
    assert cluster.trace().count("exit 0") == 2


# -- fan-outs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fan_out", [{"withSequence": {"count": "0"}}, {"withItems": []}, {"withParam": "[]"}])
def test_a_fan_out_over_nothing_is_skipped(cluster: Cluster, fan_out: dict[str, Any]) -> None:
    main = dag(call("fan", "ok", **fan_out), call("next", "ok", depends="fan.Skipped"))
    status = cluster.submit(workflow("wf", [main, OK]))
    assert (status.nodes["wf.fan"].phase, status.nodes["wf.fan"].message) == ("Skipped", "Skipped, empty params")
    assert (status.phase, status.nodes["wf.next"].phase) == ("Succeeded", "Succeeded")


def test_a_sequence_counts_down_from_its_start_to_its_end(cluster: Cluster) -> None:
    fan = call("fan", "ok", withSequence={"start": "2", "end": "0", "format": "%02X"})
    status = cluster.submit(workflow("wf", [dag(fan), OK]))
    assert [name for name in status.nodes if "fan" in name] == ["wf.fan(0:02)", "wf.fan(1:01)", "wf.fan(2:00)"]


@pytest.mark.parametrize(("nodes", "ran"), [("1", "alone"), ("2", "gang")])
def test_one_of_two_tasks_runs_and_the_next_depends_on_either(cluster: Cluster, nodes: str, ran: str) -> None:
    parameter = "{{workflow.parameters.training-nodes}}"
    main = dag(
        call("alone", "ok", when=f"{parameter} <= 1"),
        call("gang", "ok", when=f"{parameter} > 1"),
        call("next", "ok", depends="alone.Succeeded || gang.Succeeded"),
    )
    arguments = {"parameters": [{"name": "training-nodes", "value": nodes}]}
    status = cluster.submit(workflow("wf", [main, OK], arguments=arguments))
    assert {name: status.nodes[f"wf.{name}"].phase for name in ("alone", "gang", "next")} == {
        "alone": "Succeeded" if ran == "alone" else "Skipped",
        "gang": "Succeeded" if ran == "gang" else "Skipped",
        "next": "Succeeded",
    }


# -- parallelism ------------------------------------------------------------------------------------------------------


def test_the_next_item_starts_while_a_retried_one_waits_for_its_backoff(tmp_path: Path) -> None:
    retry = {"limit": "1", "backoff": {"duration": "2"}}
    flaky = step("flaky", "flaky", "75", "1", "{{inputs.parameters.i}}", inputs=inputs("i"), retryStrategy=retry)
    loop = call("loop", "flaky", arguments={"i": "{{item}}"}, withItems=["a", "b"])
    main = {"name": "main", "steps": [[loop]], "parallelism": 1}
    with Cluster(tmp_path, backoff_scale=1.0) as cluster:
        assert cluster.submit(workflow("wf", [main, flaky])).phase == "Succeeded"
        assert [line[-1] for line in cluster.trace()][:2] == ["a", "b"]


def test_an_unretried_wrapper_keeps_the_loop_in_order(tmp_path: Path) -> None:
    retry = {"limit": "1", "backoff": {"duration": "1"}}
    flaky = step("flaky", "flaky", "75", "1", "{{inputs.parameters.i}}", inputs=inputs("i"), retryStrategy=retry)
    one = {"name": "one", "inputs": inputs("i")} | {
        "steps": [[call("run", "flaky", arguments={"i": "{{inputs.parameters.i}}"})]]
    }
    loop = call("loop", "one", arguments={"i": "{{item}}"}, withItems=["a", "b"])
    main = {"name": "main", "steps": [[loop]], "parallelism": 1, "failFast": True}
    with Cluster(tmp_path, backoff_scale=1.0) as cluster:
        assert cluster.submit(workflow("wf", [main, one, flaky])).phase == "Succeeded"
        assert [line[-1] for line in cluster.trace()] == ["a", "a", "b", "b"]


# -- tags in the fields of a leaf -------------------------------------------------------------------------------------


def test_every_field_sees_the_last_attempt(cluster: Cluster) -> None:
    seen = "{{retries}}|{{lastRetry.exitCode}}|{{lastRetry.status}}|{{lastRetry.message}}"
    last = {"limit": "1", "expression": "asInt(lastRetry.exitCode) == 75"}
    code = "{{=asInt(retries) == 0 ? '75' : '0'}}"
    main = step("main", "exit", code, retryStrategy=last)
    main["container"]["env"] = [{"name": "SEEN", "value": seen}]
    main["container"]["command"] = ["sh", "-c"]
    main["container"]["args"] = [f'printf %s "$SEEN" > $MOERL_OUTPUTS_DIR/../seen; exit {code}']
    status = cluster.submit(workflow("wf", [main]))
    texts = [(Path(node.folder) / "seen").read_text() for node in status.attempts_of("wf")]
    assert texts == ["0|0||", "1|75|Failed|main: Error (exit code 75)"]


@pytest.mark.parametrize("field", ["affinity", "nodeSelector", "tolerations"])
def test_a_tag_in_a_field_for_clusters_must_resolve_here_too(cluster: Cluster, field: str) -> None:
    value: Any = {"capacity": "{{=asInt(retries) >= 2 ? 'on-demand' : workflow.parameters['capacity']}}"}
    arguments = {"parameters": [{"name": "capacity", "value": "spot"}]}
    good = step("good", "exit", "0", retryStrategy={"limit": "1"}, **{field: [value]})
    bad = step("bad", "exit", "0", **{field: [{"x": "{{inputs.parameters.capacity}}"}]})
    status = cluster.submit(workflow("wf", [dag(call("good"), call("bad")), good, bad], arguments=arguments))
    assert status.nodes["wf.good"].phase == "Succeeded"
    assert status.nodes["wf.bad"].message == "template bad: {{inputs.parameters.capacity}} is not defined here"


def test_the_templates_podspecpatch_is_laid_over_the_workflows(cluster: Cluster) -> None:
    grace = "terminationGracePeriodSeconds: {{=asInt(retries) == 0 ? '30' : '0'}}"
    deadline: dict[str, Any] = {"activeDeadlineSeconds": 2}
    inherits = step("inherits", "stubborn", "60", podSpecPatch="priority: 5", **deadline)
    decides = step("decides", "drain", "60", podSpecPatch=grace, retryStrategy={"limit": "0"}, **deadline)
    main = dag(call("inherits"), call("decides"))
    spec = {"podSpecPatch": "terminationGracePeriodSeconds: 0"}
    status = cluster.submit(workflow("wf", [main, inherits, decides], **spec))
    assert status.nodes["wf.inherits"].exit_code == "137"
    assert status.nodes["wf.decides(0)"].exit_code in ("75", "143")  # 143: it was asked before it could listen


# -- watchers of other objects ----------------------------------------------------------------------------------------

SLOW = step("slow", "sleep", "1.5")


def test_a_lost_watcher_finds_the_running_child_again(tmp_path: Path) -> None:
    deleted: list[object] = []

    def lose(event: Any) -> None:
        if event.workflow == "child" and event.template == "slow" and event.phase == "Running" and not deleted:
            deleted.append(event)
            cluster.delete_pod("wf", "wf(0)")

    templates = [workflow_template("slow", [SLOW])]
    with Cluster(tmp_path, templates=templates, on_event=lose) as cluster:
        main = {"name": "main", "resource": child_of("child", "slow"), "retryStrategy": {"retryPolicy": "Always"}}
        status = cluster.submit(workflow("wf", [main]))
        assert [(node.phase, node.message) for node in status.attempts_of("wf")] == [
            ("Error", "pod deleted"),
            ("Succeeded", ""),
        ]
        assert len(cluster.trace()) == 1


@pytest.mark.parametrize("level", ["template", "workflow"])
def test_a_deadline_ends_the_watcher_and_the_exit_handler_deletes_the_child(tmp_path: Path, level: str) -> None:
    slow = step("slow", "drain", "60")
    deadline: dict[str, Any] = {"activeDeadlineSeconds": 1}
    child = child_of("child", "slow")
    child["manifest"] = child["manifest"].replace('{name: "child"}', "{name: child, labels: {moerl/campaign: wf}}")
    main = {"name": "main", "resource": child, **(deadline if level == "template" else {})}
    flags = [
        "workflows.argoproj.io",
        "--selector=moerl/campaign={{workflow.name}},workflows.argoproj.io/completed!=true",
    ]
    bye = {"name": "bye", "resource": {"action": "delete", "flags": [*flags, "--wait=false"]}}
    with Cluster(tmp_path, templates=[workflow_template("slow", [slow])]) as cluster:
        spec = deadline if level == "workflow" else {}
        status = cluster.submit(workflow("wf", [main, bye], onExit="bye", **spec))
        assert (status.phase, status.message) == ("Failed", "Step exceeded its deadline")
        assert (status.nodes["wf.onExit"].phase, cluster.status("child")) == ("Succeeded", None)


def test_a_deletion_by_label_spares_what_has_ended(tmp_path: Path) -> None:
    flags = ["workflow", "-l", "moerl/campaign=wf,workflows.argoproj.io/completed!=true"]
    delete = {"name": "main", "resource": {"action": "delete", "flags": flags}}
    ended = [workflow(name, [template]) for name, template in (("done", OK), ("failed", FAIL))]
    with Cluster(tmp_path) as cluster:
        for manifest in ended:
            manifest["metadata"]["labels"] = {"moerl/campaign": "wf"}
            cluster.submit(manifest)
        assert cluster.submit(workflow("wf", [delete])).phase == "Succeeded"
        assert cluster.status("done") is not None and cluster.status("failed") is not None


def test_engines_which_are_never_made_here_need_no_deletion(tmp_path: Path) -> None:
    flags = ["statefulsets.apps/e-run", "services/e-run", "workflow/child", "--wait=false"]
    delete = {"name": "main", "resource": {"action": "delete", "flags": flags}}
    with Cluster(tmp_path) as cluster:
        cluster.submit(workflow("child", [OK]))
        assert cluster.submit(workflow("wf", [delete])).phase == "Succeeded"
        assert cluster.status("child") is None


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["workflow", "--all"], "flag --all is not known to the local executor"),
        (["workflow"], "delete needs a manifest, or flags KIND NAME, or flags KIND --selector=..."),
        (["pods", "x"], "delete of kind pods is not known to the local executor"),
        (["jobset", "-l", "a=b"], "delete of kind jobset by selector a=b is not known to the local executor"),
        (["workflow", "-l", "a~b"], "condition 'a~b' is not label-selector syntax"),
    ],
)
def test_deletions_that_are_not_known_are_errors_of_their_node(
    cluster: Cluster, flags: list[str], problem: str
) -> None:
    main = {"name": "main", "resource": {"action": "delete", "flags": flags}}
    status = cluster.submit(workflow("wf", [main]))
    assert (status.phase, problem in status.message) == ("Error", True)
