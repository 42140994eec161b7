"""`moerl watch`: it follows a run to its end, over a watch that ends, expires or breaks off."""

import json
import threading
import time
from collections.abc import Callable

import pytest

from steps.errors import DataError
from tests.cluster_runs import campaign, child, failed_run, half_done_run, init, status
from tests.doubles.kubernetes_api import KubernetesApi
from tests.fixtures_cluster import Moerl
from workflows.cluster.client import PAUSES_S, Cluster, ConnectionLost
from workflows.cluster.status import RunView
from workflows.cluster.tree import changes
from workflows.cluster.watch import watch_run

FINISHED = status("Succeeded", init(2), child(1, "Succeeded", "0.512"), child(2, "Succeeded", "0.75"))


def no_pause(seconds: float) -> None:
    """Instead of time.sleep."""


def follow(cluster: Cluster, run: str, *steps: Callable[[], object]) -> list[RunView]:
    """All views; after the first, the second, ... one the next of `steps` happens to the cluster."""
    waiting = list(steps)
    views = []
    for view in watch_run(cluster, run, no_pause):
        views.append(view)
        if waiting:
            waiting.pop(0)()
    return views


def finish(api: KubernetesApi) -> None:
    api.patch("workflows", "digits", {"status": FINISHED})


def test_it_follows_every_change_to_the_end(api: KubernetesApi, cluster: Cluster) -> None:
    half_done_run(api)
    two = {"status": {"phase": "Succeeded", "outputs": {"parameters": [{"name": "reward-eval", "value": "0.75"}]}}}
    views = follow(
        cluster, "digits", lambda: None, lambda: api.patch("workflows", "digits-00002", two), lambda: finish(api)
    )
    assert [view.phase for view in views] == ["Running", "Running", "Running", "Succeeded"]
    assert [view.iterations_done for view in views] == [1, 1, 2, 2]
    assert views[-1].iterations[-1].reward_eval == 0.75


def test_a_watch_that_the_server_ends_is_taken_up_where_it_ended(api: KubernetesApi, cluster: Cluster) -> None:
    half_done_run(api)
    api.watch_limit_s = 0.05

    def watches() -> int:
        return sum(request.verb == "watch" for _, request in api.calls)

    def finish_in_the_third() -> None:
        while watches() < 3:
            time.sleep(0.01)
        finish(api)

    thread = threading.Thread(target=finish_in_the_third)
    thread.start()
    assert follow(cluster, "digits")[-1].phase == "Succeeded"
    thread.join()
    verbs = [request.verb for _, request in api.calls if request.resource == "workflows"]
    assert verbs.count("list") == 3  # the run, its iterations, and once before the watches


def test_a_watch_that_expires_lists_again_and_goes_on(api: KubernetesApi, cluster: Cluster) -> None:
    half_done_run(api)
    api.watch_limit_s = 0.05

    def expire_between_watches() -> None:
        with api.store.changed:
            api.patch("workflows", "digits-00001", {"metadata": {"labels": {"unrelated": "1"}}})
            finish(api)
            api.store.forget_history()

    views = follow(cluster, "digits", lambda: None, expire_between_watches)
    assert views[-1].phase == "Succeeded"
    verbs = [request.verb for _, request in api.calls if request.resource == "workflows"]
    assert verbs.count("list") == 4


def test_a_connection_that_breaks_off_is_taken_up_again(api: KubernetesApi, cluster: Cluster) -> None:
    half_done_run(api)
    api.refuse("WATCH workflows", times=3)
    views = follow(cluster, "digits", lambda: None, lambda: None, lambda: None, lambda: finish(api))
    assert views[-1].phase == "Succeeded"


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_cluster_that_can_not_answer_for_a_while_is_asked_again(
    api: KubernetesApi, cluster: Cluster, code: int
) -> None:
    half_done_run(api)
    api.answer("GET .*watch=true", code, "<html>busy</html>", times=2)
    views = follow(cluster, "digits", lambda: None, lambda: None, lambda: None, lambda: finish(api))
    assert views[-1].phase == "Succeeded"


@pytest.mark.parametrize("text", ["<html>Log in</html>", '{"type": "MODIFIED", "obj'])
def test_what_is_no_event_is_a_connection_that_breaks_off(api: KubernetesApi, cluster: Cluster, text: str) -> None:
    half_done_run(api)
    api.answer("GET .*watch=true", 200, text, times=2)
    views = follow(cluster, "digits", lambda: None, lambda: None, lambda: None, lambda: finish(api))
    assert views[-1].phase == "Succeeded"
    api.patch("workflows", "digits", {"status": {"phase": "Running"}})
    api.answer("GET .*watch=true", 200, text, times=100)
    with pytest.raises(ConnectionLost, match="is no event"):
        list(watch_run(cluster, "digits", no_pause))


def test_a_watch_that_ends_at_once_without_a_word_is_not_asked_again_without_a_pause(
    api: KubernetesApi, cluster: Cluster
) -> None:
    half_done_run(api)
    pauses: list[float] = []
    api.answer("GET .*watch=true", 200, "", times=3)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            finish(api)

    assert list(watch_run(cluster, "digits", pause))[-1].phase == "Succeeded"
    assert pauses == [PAUSES_S[0]] * 3


def test_a_connection_that_stays_away_is_given_up(api: KubernetesApi, cluster: Cluster) -> None:
    half_done_run(api)
    pauses: list[float] = []
    api.refuse("WATCH workflows", times=100)
    with pytest.raises(ConnectionLost):
        list(watch_run(cluster, "digits", pauses.append))
    assert pauses == list(PAUSES_S)


def test_a_run_that_is_deleted_meanwhile_is_told(api: KubernetesApi, cluster: Cluster) -> None:
    half_done_run(api)
    delete = lambda: api.store.delete(api.kind("workflows"), "moerl", "digits")  # noqa: E731
    with pytest.raises(DataError, match="digits was deleted from namespace moerl"):
        follow(cluster, "digits", lambda: None, delete)


def test_a_run_that_has_ended_is_shown_once(api: KubernetesApi, cluster: Cluster) -> None:
    failed_run(api)
    assert [view.phase for view in follow(cluster, "digits")] == ["Failed"]


def test_a_new_campaign_of_the_run_is_followed(api: KubernetesApi, cluster: Cluster) -> None:
    api.add("workflows", campaign("digits", status("Succeeded")))
    api.add("workflows", campaign("digits", status("Running"), "digits-2"))
    views = follow(
        cluster,
        "digits",
        lambda: None,
        lambda: api.patch("workflows", "digits-2", {"status": {"phase": "Succeeded"}}),
    )
    assert [(view.workflow, view.phase) for view in views][-1] == ("digits-2", "Succeeded")


def test_each_change_is_told_once(api: KubernetesApi, cluster: Cluster) -> None:
    half_done_run(api)
    views = follow(cluster, "digits", lambda: None, lambda: finish(api))
    lines = [list(changes(before, after)) for before, after in zip([None, *views], views, strict=False)]
    assert "iteration 1 Succeeded, held-out 0.512, validated" in lines[0]
    assert "iteration 2: rollout-1 Running, attempt 2" in lines[0]
    assert lines[1] == []
    assert lines[-1][-1] == "run digits Succeeded"
    assert "iteration 1" not in " ".join(lines[-1])


def test_the_command_prints_lines_where_there_is_no_terminal(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", FINISHED))
    code, out, _ = moerl("watch", "digits")
    assert code == 0
    assert out.splitlines() == [
        "iteration 1 Succeeded, held-out 0.512, validated",
        "iteration 2 Succeeded, held-out 0.750, validated",
        "init Succeeded",
        "run digits Succeeded",
    ]


def test_the_command_prints_one_document_a_line_as_json(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", FINISHED))
    code, out, _ = moerl("watch", "digits", "--json")
    assert code == 0
    assert [json.loads(line)["phase"] for line in out.splitlines()] == ["Succeeded"]


def test_the_command_ends_with_the_exit_code_of_the_step_that_failed(api: KubernetesApi, moerl: Moerl) -> None:
    failed_run(api)
    code, _, err = moerl("watch", "digits")
    assert code == 65
    assert err.count("\n") == 1 and "train (train-00002, workflow digits-00002): main: Error (exit code 65)" in err


def test_submit_can_watch_at_once(api: KubernetesApi, moerl: Moerl) -> None:
    def controller() -> None:
        with api.store.changed:
            while "digits" not in api.names("workflows"):
                api.store.changed.wait(0.1)
            api.patch("workflows", "digits", {"status": FINISHED})

    thread = threading.Thread(target=controller)
    thread.start()
    code, out, err = moerl("submit", "--run-id", "digits", "--watch")
    thread.join()
    assert code == 0, err
    assert out.splitlines()[-1] == "run digits Succeeded"
