"""`moerl status` and `moerl stop`: the iteration tree with reward and phase, what failed, and what is asked to stop."""

import base64
import gzip
import json

import pytest
from rich.console import Console

from tests.cluster_runs import campaign, child, failed_run, half_done_run, init, iteration, node, status
from tests.doubles.kubernetes_api import KubernetesApi
from tests.doubles.kubernetes_store import ApiError
from tests.fixtures_cluster import Moerl
from workflows.cluster.client import WORKFLOWS, Cluster
from workflows.cluster.status import load_view
from workflows.cluster.stop import stop_run
from workflows.cluster.tree import run_tree

NOT_FOUND = ApiError(404, "NotFound", 'workflows.argoproj.io "digits-00002" not found')
CONFLICT = ApiError(409, "Conflict", "the object has been modified")


def test_the_tree_shows_iterations_with_reward_phase_and_running_steps(api: KubernetesApi, moerl: Moerl) -> None:
    half_done_run(api)
    code, out, err = moerl("status", "digits")
    assert code == 0, err
    lines = [line.strip("│├└─ ") for line in out.splitlines()]
    assert lines[0].startswith("digits  Running  1 of 3 iterations") and "namespace moerl" in lines[0]
    assert lines[1].startswith("init  Succeeded  2m05s")
    assert lines[2] == "iteration 1  Succeeded  held-out 0.512  validated  2m05s"
    assert lines[3].startswith("iteration 2  Running")
    assert lines[4] == "plan-00002  Succeeded  2m05s"
    assert any(line.startswith("rollout-0  Running  12/32") for line in lines)
    assert any(line.startswith("rollout-1  Running  attempt 2") for line in lines)
    assert not any(line.startswith("rollout-1(") for line in lines)


def test_a_watched_run_shows_the_last_iterations_only(api: KubernetesApi, cluster: Cluster) -> None:
    done = [child(number, "Succeeded", "0.5") for number in range(1, 31)]
    api.add("workflows", campaign("digits", status("Running", init(40), *done)))
    console = Console(width=120, record=True)
    console.print(run_tree(load_view(cluster, "digits"), most=3))
    text = console.export_text()
    assert "27 earlier iterations" in text and "iteration 28 " in text and "iteration 27 " not in text


def test_only_iterations_that_did_not_succeed_are_read(api: KubernetesApi, cluster: Cluster) -> None:
    half_done_run(api)
    view = load_view(cluster, "digits")
    assert [(one.iteration, len(one.steps)) for one in view.iterations] == [(1, 0), (2, 3)]


def test_rewards_of_samples_are_the_mean_of_the_workers(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", status("Running", init(3), child(1, "Running"))))
    workers = [
        node(
            f"reward-{number}",
            "reward",
            "Succeeded",
            outputs={"parameters": [{"name": "reward-mean", "value": str(mean)}]},
        )
        for number, mean in enumerate((0.25, 0.75))
    ]
    idle = node("reward-2", "reward", "Succeeded", outputs={"parameters": [{"name": "reward-mean", "value": ""}]})
    api.add("workflows", iteration("digits", 1, status("Running", *workers, idle)))
    code, out, _ = moerl("status", "digits", "--json")
    assert code == 0
    assert json.loads(out)["iterations"][0]["reward_mean"] == 0.5
    assert "sample reward 0.500" in moerl("status", "digits")[1]


def test_json_has_the_whole_view(api: KubernetesApi, moerl: Moerl) -> None:
    half_done_run(api)
    document = json.loads(moerl("status", "digits", "--json")[1])
    assert document["phase"] == "Running"
    assert (document["iterations_done"], document["iterations_total"]) == (1, 3)
    assert [(one["iteration"], one["phase"], one["reward_eval"]) for one in document["iterations"]] == [
        (1, "Succeeded", 0.512),
        (2, "Running", None),
    ]
    assert [(step["step"], step["attempts"]) for step in document["iterations"][1]["steps"]] == [
        ("plan", 1),
        ("rollout", 1),
        ("rollout", 2),
    ]


def test_a_failure_names_the_step_that_ended_the_run_and_not_a_mended_attempt(
    api: KubernetesApi, cluster: Cluster
) -> None:
    failed_run(api)
    view = load_view(cluster, "digits")
    assert view.exit_code == 65
    assert view.failure == (
        "train (train-00002, workflow digits-00002): main: Error (exit code 65): train: batch 2 is damaged"
    )


@pytest.mark.parametrize(("code", "expected"), [("64", 64), ("143", 75), ("-1", 75), ("1", 1), ("2", 1), ("", 1)])
def test_the_exit_code_of_a_failure_is_the_documented_one(
    api: KubernetesApi, cluster: Cluster, code: str, expected: int
) -> None:
    broken = node("init", "init", "Failed", outputs={"exitCode": code})
    api.add("workflows", campaign("digits", status("Failed", broken)))
    assert load_view(cluster, "digits").exit_code == expected


def test_a_failure_is_not_that_of_the_exit_handler_which_ran_after_it(api: KubernetesApi, cluster: Cluster) -> None:
    failed_run(api)
    name = "digits-00002.onExit[0].delete-jobset(0)"
    later = {"finishedAt": "2026-01-01T12:00:00Z", "message": "main: Error (exit code 64)"}
    handler = node(name, "delete-jobset", "Failed", **later)
    api.patch("workflows", "digits-00002", {"status": {"nodes": {name: handler}}})
    view = load_view(cluster, "digits")
    assert (view.exit_code, "batch 2 is damaged" in view.failure) == (65, True)


def test_nodes_that_are_damaged_are_one_line(api: KubernetesApi, moerl: Moerl) -> None:
    half_done_run(api)
    packed = base64.b64encode(gzip.compress(b"{}")[:10] + b"\xff\xff damaged").decode()
    api.patch("workflows", "digits", {"status": {"nodes": None, "compressedNodes": packed}})
    code, _, err = moerl("status", "digits")
    assert code == 65 and "can't be unpacked" in err and err.count("\n") == 1


def test_a_run_that_was_stopped_says_so_and_counts_as_interrupted(api: KubernetesApi, cluster: Cluster) -> None:
    watcher = child(1, "Failed", message="failure condition", **{"outputs": {"exitCode": "64"}})
    api.add("workflows", campaign("digits", status("Failed", watcher, message="Stopped with strategy 'Stop'")))
    api.patch("workflows", "digits", {"spec": {"shutdown": "Stop"}})
    view = load_view(cluster, "digits")
    assert (view.failure, view.exit_code) == ("stopped (Stopped with strategy 'Stop')", 75)


def test_the_exit_code_of_a_watcher_is_not_that_of_its_iteration(api: KubernetesApi, cluster: Cluster) -> None:
    watcher = child(1, "Failed", message="failure condition", **{"outputs": {"exitCode": "64"}})
    api.add("workflows", campaign("digits", status("Failed", watcher)))
    assert load_view(cluster, "digits").exit_code == 1


def test_what_a_run_waits_for_is_shown(api: KubernetesApi, moerl: Moerl) -> None:
    waiting = {"phase": "Pending", "message": "Waiting for moerl/Mutex/moerl-campaign-digits lock"}
    api.add("workflows", campaign("digits", waiting))
    assert "Waiting for moerl/Mutex/moerl-campaign-digits lock" in moerl("status", "digits")[1]


def test_iterations_of_earlier_campaigns_are_part_of_the_run(api: KubernetesApi, cluster: Cluster) -> None:
    failed_run(api)
    second = campaign(
        "digits", status("Running", init(2), child(2, "Succeeded", "0.7"), child(3, "Running")), "digits-2"
    )
    api.add("workflows", second)
    api.add("workflows", iteration("digits-2", 3, status("Running"), run="digits"))
    view = load_view(cluster, "digits")
    assert [(one.iteration, one.phase, one.workflow) for one in view.iterations] == [
        (1, "Succeeded", "digits-00001"),
        (2, "Succeeded", "digits-2-00002"),
        (3, "Running", "digits-2-00003"),
    ]
    assert (view.workflow, view.earlier, view.iterations_done, view.iterations_total) == ("digits-2", ("digits",), 1, 2)


def test_nodes_that_argo_keeps_elsewhere_are_made_up_for_by_the_children(api: KubernetesApi, cluster: Cluster) -> None:
    api.add("workflows", campaign("digits", {"phase": "Running", "offloadNodeStatusVersion": "v1"}, iterations="2"))
    done = status("Succeeded", outputs={"parameters": [{"name": "reward-eval", "value": "0.4"}]})
    api.add("workflows", iteration("digits", 1, done))
    api.add("workflows", iteration("digits", 2, status("Running")))
    view = load_view(cluster, "digits")
    assert [(one.iteration, one.reward_eval) for one in view.iterations] == [(1, 0.4), (2, None)]
    assert (view.iterations_done, view.iterations_total) == (1, 2)


def test_a_workflow_that_no_controller_has_seen_is_pending_and_found_by_its_name(
    api: KubernetesApi, moerl: Moerl
) -> None:
    fresh = campaign("digits", {})
    fresh["metadata"]["labels"] = {}
    api.add("workflows", fresh)
    code, out, _ = moerl("status", "digits")
    assert code == 0 and "Pending  0 of ? iterations" in out


def test_a_run_that_does_not_exist_is_one_line(moerl: Moerl) -> None:
    code, out, err = moerl("status", "absent")
    assert (code, out, err.count("\n")) == (65, "", 1)
    assert "no run 'absent' in namespace moerl of double" in err and "kubectl get workflows" in err


def test_stop_asks_the_campaign_and_its_running_iteration(api: KubernetesApi, moerl: Moerl) -> None:
    half_done_run(api)
    code, out, _ = moerl("stop", "digits")
    assert code == 0 and "stopping digits, digits-00002" in out and "resume digits" in out
    shutdowns = {name: api.get("workflows", name)["spec"].get("shutdown") for name in api.names("workflows")}
    assert shutdowns == {"digits": "Stop", "digits-00001": None, "digits-00002": "Stop"}
    assert "stopping" in moerl("status", "digits")[1]


def test_stop_of_a_suspended_run_lets_it_end(api: KubernetesApi, moerl: Moerl) -> None:
    """Argo looks at a suspended Workflow no further: its exit handler would not run, and it would not end."""
    half_done_run(api)
    for name in ("digits", "digits-00002"):
        api.patch("workflows", name, {"spec": {"suspend": True}})
    assert moerl("stop", "digits")[0] == 0
    for name in ("digits", "digits-00002"):
        spec = api.get("workflows", name)["spec"]
        assert spec["shutdown"] == "Stop" and "suspend" not in spec


@pytest.mark.parametrize(("meanwhile", "strategy"), [({}, "Terminate"), ({"phase": "Running"}, "Stop")])
def test_stop_of_a_run_that_waits_for_another_withdraws_it_unless_it_has_begun(
    api: KubernetesApi, cluster: Cluster, meanwhile: dict[str, str], strategy: str
) -> None:
    """Argo heeds no other strategy while a Workflow waits for its lock (releaseLocksForPendingShuttingdownWfs)."""
    waiting = campaign("digits", status("Pending", message="Waiting for argo/Mutex/moerl-campaign-digits lock"))
    api.add("workflows", waiting)
    found = cluster.get(WORKFLOWS, "digits")
    if meanwhile:
        api.patch("workflows", "digits", {"status": meanwhile})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workflows.cluster.stop.latest_campaign", lambda cluster, run_id: found)
        assert stop_run(cluster, "digits") == ["digits"]
    assert api.get("workflows", "digits")["spec"]["shutdown"] == strategy


def test_stop_as_json(api: KubernetesApi, moerl: Moerl) -> None:
    half_done_run(api)
    assert json.loads(moerl("stop", "digits", "--json")[1]) == {
        "run_id": "digits",
        "stopping": ["digits", "digits-00002"],
    }


def test_stop_of_a_run_that_has_ended_is_refused(api: KubernetesApi, moerl: Moerl) -> None:
    failed_run(api)
    code, _, err = moerl("stop", "digits")
    assert code == 65 and "has ended already" in err


def test_stop_of_an_iteration_that_went_away_meanwhile_still_stops_the_campaign(
    api: KubernetesApi, moerl: Moerl
) -> None:
    half_done_run(api)
    api.refuse("PATCH .*/digits-00002", NOT_FOUND)
    code, out, _ = moerl("stop", "digits")
    assert code == 0 and out.startswith("stopping digits;")


def test_a_patch_that_meets_a_conflict_is_tried_again(api: KubernetesApi, moerl: Moerl) -> None:
    half_done_run(api)
    api.refuse("PATCH .*/digits", CONFLICT, times=2)
    assert moerl("stop", "digits")[0] == 0
    assert api.get("workflows", "digits")["spec"]["shutdown"] == "Stop"
