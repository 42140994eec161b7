"""`moerl logs`: which pods, in which order, what each line says of its origin, and following to the end."""

import json
import threading

import pytest

from tests.cluster_runs import add_pod, campaign, half_done_run, iteration, status
from tests.doubles.kubernetes_api import KubernetesApi
from tests.doubles.kubernetes_store import ApiError
from tests.fixtures_cluster import Moerl
from workflows.cluster.client import PAUSES_S, Cluster, ConnectionLost, Forbidden
from workflows.cluster.logs import LogFilter, follow_logs


@pytest.fixture
def pods(api: KubernetesApi) -> KubernetesApi:
    half_done_run(api)
    add_pod(
        api, "digits-init-123", "digits", "made the run", node_name="digits[0].init(0)", started="2026-01-01T10:00:00Z"
    )
    add_pod(
        api,
        "digits-00002-rollout-1",
        "digits-00002",
        "leased unit 3",
        "sampled 16",
        node_name="digits-00002.rollout(3:3)(0)",
        started="2026-01-01T10:05:00Z",
    )
    add_pod(
        api,
        "t-digits-00002-n-0-5-abcde",
        "digits-00002",
        "rank 0 ready",
        container="trainer",
        labels={"batch.kubernetes.io/job-completion-index": "5"},
        started="2026-01-01T10:06:00Z",
    )
    add_pod(api, "digits-00002-rollout-2", "digits-00002", phase="Pending")
    add_pod(api, "other-init-1", "other", "not of this run")
    return api


@pytest.mark.usefixtures("pods")
def test_lines_name_their_iteration_and_step_in_the_order_of_the_pods(moerl: Moerl) -> None:
    code, out, err = moerl("logs", "digits")
    assert code == 0, err
    assert out.splitlines() == [
        "init: made the run",
        "2/rollout-3: leased unit 3",
        "2/rollout-3: sampled 16",
        "2/train-5: rank 0 ready",
    ]


@pytest.mark.usefixtures("pods")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--step", "rollout"], ["leased unit 3", "sampled 16"]),
        (["--step", "train"], ["rank 0 ready"]),
        (["--iteration", "2", "--tail", "1"], ["sampled 16", "rank 0 ready"]),
        (["--tail", "0", "--step", "init"], []),
    ],
)
def test_steps_iterations_and_last_lines_can_be_chosen(moerl: Moerl, options: list[str], expected: list[str]) -> None:
    code, out, _ = moerl("logs", "digits", *options)
    assert code == 0
    assert [line.split(": ", 1)[1] for line in out.splitlines()] == expected


@pytest.mark.usefixtures("pods")
def test_json_has_the_pod_and_the_time(moerl: Moerl) -> None:
    code, out, _ = moerl("logs", "digits", "--step", "init", "--json")
    assert code == 0
    assert json.loads(out) == {
        "source": "init",
        "pod": "digits-init-123",
        "time": "2026-01-01T10:00:00Z",
        "text": "made the run",
    }


@pytest.mark.usefixtures("pods")
@pytest.mark.parametrize("options", [["--iteration", "9"], ["--step", "no-such-step"], ["--iteration", "1"]])
def test_no_pod_that_matches_is_said_so(moerl: Moerl, options: list[str]) -> None:
    code, out, err = moerl("logs", "digits", *options)
    assert (code, out, err.count("\n")) == (65, "", 1)
    assert "no pods of run digits match" in err


def test_a_pod_that_goes_away_meanwhile_is_passed_over(pods: KubernetesApi, moerl: Moerl) -> None:
    pods.refuse("digits-init-123/log", ApiError(404, "NotFound", 'pods "digits-init-123" not found'))
    code, out, _ = moerl("logs", "digits")
    assert code == 0 and "made the run" not in out and "sampled 16" in out


@pytest.mark.parametrize(
    "error",
    [
        ApiError(400, "BadRequest", 'container "main" in pod "digits-init-123" is waiting to start: PodInitializing'),
        ApiError(500, "InternalError", "Get https://10.0.0.7:10250/containerLogs/...: dial tcp: i/o timeout"),
        None,
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_log_that_can_not_be_read_is_told_and_does_not_hide_the_others(
    pods: KubernetesApi, moerl: Moerl, error: ApiError | None, options: list[str]
) -> None:
    pods.refuse("digits-init-123/log", error)
    code, out, err = moerl("logs", "digits", *options)
    assert code == 0, err
    assert "no more of this log" in out.splitlines()[0] and "sampled 16" in out
    assert error is None or str(error).split(": ")[-1] in out


def test_what_the_kubelet_says_without_a_time_is_whole(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", status("Running")))
    add_pod(api, "digits-init-123", "digits").lines.append("unable to retrieve container logs for containerd://ab")
    assert moerl("logs", "digits")[1] == "init: unable to retrieve container logs for containerd://ab\n"


def test_a_run_without_an_iteration_yet_has_the_logs_of_its_campaign(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", status("Running")))
    add_pod(api, "digits-init-123", "digits", "made the run")
    assert moerl("logs", "digits")[:2] == (0, "init: made the run\n")


def test_following_ends_with_the_run_and_takes_in_pods_that_start_meanwhile(
    pods: KubernetesApi, cluster: Cluster
) -> None:
    log = add_pod(pods, "digits-summary-1", "digits", "first", ended=False, phase="Running")
    texts: list[str] = []
    pauses = iter(
        [
            lambda: add_pod(pods, "digits-late-1", "digits", "late"),
            lambda: log.lines.append("2026-01-01T10:09:00Z second"),
            lambda: (
                setattr(log, "ended", True),
                pods.patch("workflows", "digits", {"status": {"phase": "Succeeded"}}),
            ),
        ]
    )
    idle = threading.Event()

    def pause(seconds: float) -> None:
        next(pauses, lambda: idle.wait(0.02))()

    for line in follow_logs(cluster, "digits", LogFilter(), tail=None, pause=pause):
        texts.append(line.text)
    assert sorted(texts) == ["first", "late", "leased unit 3", "made the run", "rank 0 ready", "sampled 16", "second"]
    assert texts.index("first") < texts.index("second")


def test_what_ends_a_reader_ends_the_following(pods: KubernetesApi, cluster: Cluster) -> None:
    pods.refuse("/log", ApiError(403, "Forbidden", "pods/log is forbidden"), times=100)
    idle = threading.Event()
    with pytest.raises(Forbidden, match="pods/log is forbidden"):
        list(
            follow_logs(cluster, "digits", LogFilter(), tail=None, pause=lambda seconds: bool(idle.wait(0.02)) or None)
        )


def test_following_goes_on_where_a_connection_broke_off(pods: KubernetesApi, cluster: Cluster) -> None:
    log = add_pod(pods, "digits-summary-1", "digits", ended=False, phase="Running")
    log.lines += ["2026-01-01T10:09:00.1Z one", "2026-01-01T10:09:00.2Z two"]
    idle = threading.Event()
    texts = []
    for line in follow_logs(
        cluster, "digits", LogFilter(step="summary"), tail=None, pause=lambda seconds: bool(idle.wait(0.02)) or None
    ):
        texts.append(line.text)
        if texts == ["one", "two"]:
            pods.refuse("LOG digits-summary-1")
            pods.answer("GET .*labelSelector", 503, "busy", times=2)
            log.lines.append("2026-01-01T10:09:00.3Z three")
        if line.text == "three":
            log.ended = True
            pods.patch("workflows", "digits", {"status": {"phase": "Succeeded"}})
    assert texts == ["one", "two", "three"]
    assert not any(fault.times for fault in pods.faults)


def test_following_gives_up_a_cluster_that_stays_away(pods: KubernetesApi, cluster: Cluster) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        pods.answer("GET .*labelSelector", 503, "busy", times=100)

    with pytest.raises(ConnectionLost, match="503"):
        list(follow_logs(cluster, "digits", LogFilter(step="none"), tail=None, pause=pause))
    assert pauses[1:] == list(PAUSES_S)


def test_many_iterations_are_asked_for_in_parts(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("workflows", campaign("digits", status("Succeeded")))
    for number in range(1, 121):
        api.add("workflows", iteration("digits", number, status("Succeeded")))
    add_pod(api, "digits-00120-report-9", "digits-00120", "found")
    assert moerl("logs", "digits")[1].splitlines() == ["120/report: found"]
    assert len([request for _, request in api.calls if request.resource == "pods" and request.verb == "list"]) == 3
