"""JobSets here: local gangs of real processes that start, fail, restart, are found again and deleted."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from steps.errors import ConfigError
from tests.local_cluster import Cluster, workflow
from workflows.local.job_sets import parse_job_set
from workflows.run_failure import explain_failure

ATTEMPT = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
POD_RULES = [
    {"action": "FailJob", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [65, 78]}},
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
]
RULES = [
    {
        "name": "UserError",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": ["rule at index 0"],
    },
    {"name": "Late", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]},
    {
        "name": "Disruption",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": ["rule at index 1"],
    },
]


def job_set(*arguments: str, pods: int = 2, ranks: int = 2, restarts: int = 1, grace_s: int = 20) -> dict[str, Any]:
    launcher = ["--nnodes", str(pods), f"--nproc_per_node={ranks}", "--node-rank=$(JOB_COMPLETION_INDEX)"]
    container = {
        "name": "trainer",
        "image": "x",
        "command": ["torchrun"],
        "args": [*launcher, "--master-addr=x-n-0-0.x", "-m", "tinystep", "rank", *arguments],
        "env": [{"name": "ATTEMPT", "valueFrom": ATTEMPT}],
        "resources": {"limits": {"nvidia.com/gpu": 8}},
    }
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": grace_s, "containers": [container]}
    job = {
        "completionMode": "Indexed",
        "parallelism": pods,
        "completions": pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": POD_RULES},
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "t-{{workflow.name}}", "labels": {"kueue.x-k8s.io/queue-name": "q"}},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": restarts, "rules": RULES},
            "replicatedJobs": [{"name": "n", "replicas": 1, "template": {"spec": job}}],
        },
    }


def gang(manifest: dict[str, Any], **template: Any) -> dict[str, Any]:
    resource = {
        "action": "apply",
        "setOwnerReference": True,
        "manifest": yaml.safe_dump(manifest),
        "successCondition": "status.terminalState == Completed",
        "failureCondition": "status.terminalState == Failed",
    }
    return {"name": "main", "resource": resource, **template}


BYE = {"name": "bye", "resource": {"action": "delete", "flags": ["jobsets.jobset.x-k8s.io", "t-{{workflow.name}}"]}}
NOBODY = ("0", "-1", "-1")


def ranks_of(folder: Path, pod: int, attempt: int = 0) -> list[dict[str, str]]:
    name = f"t-wf-n-0-{pod}" + (f"-restart-{attempt}" if attempt else "")
    outputs = folder / "runs" / "wf" / name / "outputs"
    return [json.loads(path.read_text()) for path in sorted(outputs.glob("rank-*"))]


def status_of(folder: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((folder / "runs" / ".jobsets" / "t-wf.json").read_text())["status"]
    return status


def count(folder: Path, what: str) -> int:
    """Ranks of the first attempt that have left such a file."""
    return len(list(folder.glob(f"runs/wf/t-wf-n-0-?/outputs/{what}-*")))


def when(condition: Callable[[], bool], action: Callable[[], object]) -> None:
    def wait() -> None:
        while not condition():
            time.sleep(0.01)
        action()

    threading.Thread(target=wait, daemon=True).start()


def test_every_rank_of_every_pod_is_told_its_place_as_by_torchrun(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        status = cluster.submit(workflow("wf", [gang(job_set(*NOBODY))]))
    assert status.phase == "Succeeded"
    places = [*ranks_of(tmp_path, 0), *ranks_of(tmp_path, 1)]
    assert [place["RANK"] for place in places] == ["0", "1", "2", "3"]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "0", "1"]
    assert [place["GROUP_RANK"] for place in places] == ["0", "0", "1", "1"]
    assert {(place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"]) for place in places} == {("4", "2")}
    assert len({(place["MASTER_ADDR"], place["MASTER_PORT"]) for place in places}) == 1
    assert status_of(tmp_path)["restarts"] == 0


def test_a_rank_that_fails_restarts_the_whole_gang(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        status = cluster.submit(workflow("wf", [gang(job_set("137", "3", "0"))]))
    assert status.phase == "Succeeded"
    assert [len(ranks_of(tmp_path, 0, attempt)) for attempt in (0, 1)] == [2, 2]
    assert (status_of(tmp_path)["restarts"], status_of(tmp_path)["terminalState"]) == (1, "Completed")


def test_an_evicted_pod_restarts_the_gang_without_counting(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        when(lambda: count(tmp_path, "started") == 4, lambda: cluster.delete_pod("wf", "t-wf-n-0-1"))
        status = cluster.submit(workflow("wf", [gang(job_set("0", "-1", "0", restarts=0))]))
    assert status.phase == "Succeeded"
    jobs = status_of(tmp_path)
    assert (jobs["restarts"], jobs["restartsCountTowardsMax"]) == (1, 0)


def test_a_jobs_deadline_ends_the_gang_for_good(tmp_path: Path) -> None:
    manifest = job_set("0", "-1", "0", restarts=5)
    job_of(manifest)["activeDeadlineSeconds"] = 1
    with Cluster(tmp_path) as cluster:
        status = cluster.submit(workflow("wf", [gang(manifest)]))
    assert (status.phase, status_of(tmp_path)["restarts"]) == ("Failed", 0)


@pytest.mark.parametrize(
    ("code", "restarts", "reason"),
    [("1", 0, "ReachedMaxRestarts"), ("78", 5, "FailJobSetFailurePolicyAction")],
)
def test_a_gang_fails_at_its_limit_or_at_once_for_a_users_error(
    tmp_path: Path, code: str, restarts: int, reason: str
) -> None:
    attach = {"limit": "3", "expression": "!(lastRetry.message matches 'failure condition')"}
    main = gang(job_set(code, "2", "0", restarts=restarts), retryStrategy=attach)
    with Cluster(tmp_path) as cluster:
        status = cluster.submit(workflow("wf", [main]))
    node = status.nodes["wf(0)"]
    assert (node.phase, node.exit_code, len(status.attempts_of("wf"))) == ("Failed", "64", 1)
    assert node.message == "failure condition '{status.terminalState == Failed}' evaluated true"
    assert [condition["reason"] for condition in status_of(tmp_path)["conditions"]] == [reason]
    failure = explain_failure(tmp_path / "runs", status)
    assert (failure.exit_code, failure.why) == (int(code), "the reason")


def test_a_failed_jobset_fails_the_next_apply_until_it_is_deleted(tmp_path: Path) -> None:
    failing = workflow("wf", [gang(job_set("78", "0", "0"))])
    with Cluster(tmp_path) as cluster:
        assert [cluster.submit(failing).phase for _ in range(2)] == ["Failed", "Failed"]
        assert len(cluster.trace()) <= 4  # the second one started nothing
        delete = {"action": "delete", "flags": ["jobset", "t-wf"]}
        assert cluster.submit(workflow("other", [{"name": "main", "resource": delete}])).phase == "Succeeded"
        assert cluster.submit(workflow("wf", [gang(job_set(*NOBODY))])).phase == "Succeeded"


def test_stopping_ends_the_watcher_and_the_exit_handler_ends_the_gang(tmp_path: Path) -> None:
    main = gang(job_set("0", "-1", "0"))
    with Cluster(tmp_path) as cluster:
        when(lambda: count(tmp_path, "started") == 4, cluster.stop)
        status = cluster.submit(workflow("wf", [main, BYE], onExit="bye"))
    assert (status.phase, status.message) == ("Failed", "Stopped with strategy 'Stop'")
    assert (status.nodes["wf"].exit_code, status.nodes["wf.onExit"].phase) == ("-1", "Succeeded")
    assert count(tmp_path, "drained") == 4
    assert not (tmp_path / "runs" / ".jobsets" / "t-wf.json").exists()


def test_a_gang_that_nobody_deletes_ends_with_the_submission(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        when(lambda: count(tmp_path, "started") == 4, lambda: cluster.delete_pod("wf", "wf"))
        status = cluster.submit(workflow("wf", [gang(job_set("0", "-1", "0"))]))
    assert (status.phase, status.message) == ("Error", "pod deleted")
    assert count(tmp_path, "drained") == 4


def test_a_lost_watcher_finds_the_running_gang_again(tmp_path: Path) -> None:
    retry = {"limit": "3", "retryPolicy": "Always", "expression": "!(lastRetry.message matches 'failure condition')"}
    with Cluster(tmp_path) as cluster:
        when(lambda: count(tmp_path, "started") == 4, lambda: cluster.delete_pod("wf", "wf(0)"))
        when(lambda: any(e.attempt == 1 and e.phase == "Running" for e in cluster.events), cluster.stop)
        status = cluster.submit(workflow("wf", [gang(job_set("0", "-1", "0"), retryStrategy=retry), BYE], onExit="bye"))
    assert [node.message for node in status.attempts_of("wf")] == ["pod deleted", "Stopped with strategy 'Stop'"]
    assert len(cluster.trace()) == 4


Change = Callable[[dict[str, Any]], object]


def job_of(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    return found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m["spec"].update(startupPolicy={"a": 1}), "JobSet t-{{workflow.name}}.spec: field startupPolicy"),
        (lambda m: m["spec"]["replicatedJobs"].append({}), "has 2 replicatedJobs; one is known here"),
        (lambda m: m["spec"]["replicatedJobs"][0].update(replicas=2), "replicas must be 1"),
        (lambda m: m["spec"]["successPolicy"].update(operator="Any"), "successPolicy must be All"),
        (lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="RestartJob"), "action RestartJob is not"),
        (lambda m: job_of(m).update(completionMode="NonIndexed"), "completionMode must be Indexed"),
        (lambda m: job_of(m).update(completions=3), "as many completions as parallelism"),
        (lambda m: job_of(m).update(backoffLimit=3), "backoffLimit must be 0"),
        (lambda m: job_of(m)["podFailurePolicy"]["rules"][0].update(action="Ignore"), "action must be FailJob"),
        (lambda m: job_of(m)["template"]["spec"].update(restartPolicy="Always"), "restartPolicy must be Never"),
        (lambda m: job_of(m)["template"]["spec"].update(initContainers=[]), "field initContainers"),
        (lambda m: job_of(m)["template"]["spec"]["containers"].append({}), "has 2 containers"),
    ],
)
def test_what_is_not_known_of_a_jobset_is_refused_with_its_place(change: Change, problem: str) -> None:
    manifest = job_set(*NOBODY)
    manifest["spec"]["successPolicy"] = {"operator": "All"}
    parse_job_set(json.loads(json.dumps(manifest)))
    change(manifest := json.loads(json.dumps(manifest)))
    with pytest.raises(ConfigError) as refusal:
        parse_job_set(manifest)
    assert problem in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--nnodes=3", "-m", "x"], "torchrun's --nnodes is 3, but the Job has 2 pods"),
        (["--nnodes=2", "--nproc-per-node=auto", "-m", "x"], "--nproc-per-node is 'auto'; here it must be a number"),
        (["--standalone", "-m", "x"], "torchrun's option --standalone is not known"),
        (["--nnodes=2"], "torchrun has nothing to run"),
    ],
)
def test_torchrun_options_that_do_not_fit_are_an_error_of_the_node(
    tmp_path: Path, arguments: list[str], problem: str
) -> None:
    manifest = job_set(*NOBODY)
    job_of(manifest)["template"]["spec"]["containers"][0]["args"] = arguments
    with Cluster(tmp_path) as cluster:
        status = cluster.submit(workflow("wf", [gang(manifest)]))
    assert (status.phase, problem in status.message) == ("Error", True)
