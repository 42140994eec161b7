"""Signals, deadlines, deleted pods, stopping, and an executor that is killed: real processes all."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from steps.errors import ServiceUnavailable
from tests.local_cluster import Cluster, call, output, step, workflow
from workflows.local.events import Event
from workflows.local.status import load_status

REPOSITORY = Path(__file__).resolve().parents[1]
GRACE = "terminationGracePeriodSeconds: 20\n"
NO_GRACE = "terminationGracePeriodSeconds: 0\n"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, max_parallel_pods=4) as cluster:
        yield cluster


def when_started(cluster: Cluster, node: str, action: Callable[[], object]) -> threading.Thread:
    """Calls `action` once the step has set up its signal handlers."""

    def wait() -> None:
        folder = cluster_folder(cluster, node)
        while not (folder / "outputs" / "started").exists():
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def cluster_folder(cluster: Cluster, node: str) -> Path:
    while True:
        status = cluster.status("wf")
        if status is not None and node in status.nodes and status.nodes[node].folder:
            return Path(status.nodes[node].folder)
        time.sleep(0.01)


def pid_of(cluster: Cluster, node: str) -> int:
    status = cluster.status("wf")
    assert status is not None
    return status.nodes[node].pid


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, 137), (signal.SIGSEGV, 139)])
def test_death_by_a_signal_is_128_plus_its_number(cluster: Cluster, number: int, code: int) -> None:
    status = cluster.submit(workflow("wf", [step("main", "kill", str(int(number)))]))
    assert (status.phase, status.message) == ("Failed", f"main: Error (exit code {code})")
    assert status.nodes["wf"].exit_code == str(code)


def test_a_step_killed_from_outside_is_retried(cluster: Cluster) -> None:
    retry = {"limit": "2", "expression": "asInt(lastRetry.exitCode) in [75, 137, 143]"}
    main = step("main", "sleep", "{{=retries == '0' ? '60' : '0'}}", retryStrategy=retry)
    thread = when_started(cluster, "wf(0)", lambda: os.kill(pid_of(cluster, "wf(0)"), signal.SIGKILL))
    status = cluster.submit(workflow("wf", [main]))
    thread.join()
    assert [node.phase for node in status.attempts_of("wf")] == ["Failed", "Succeeded"]
    assert status.nodes["wf(0)"].message == "main: Error (exit code 137)"


def test_deadline_asks_then_kills(cluster: Cluster) -> None:
    asked = step("asked", "drain", "60", activeDeadlineSeconds=1, podSpecPatch=GRACE)
    killed = step("killed", "stubborn", "60", activeDeadlineSeconds="1", podSpecPatch=NO_GRACE)
    main = {"name": "main", "dag": {"tasks": [call("asked"), call("killed")]}}
    status = cluster.submit(workflow("wf", [main, asked, killed]))
    nodes = [status.nodes["wf.asked"], status.nodes["wf.killed"]]
    assert [node.message for node in nodes] == ["Step exceeded its deadline"] * 2
    assert [(node.phase, node.exit_code) for node in nodes] == [("Failed", "75"), ("Failed", "137")]


def test_workflow_deadline_ends_all_and_the_exit_handler_runs(cluster: Cluster) -> None:
    bye = step("bye", "write", "x", "1", outputs=[output("x")])
    body = workflow("wf", [step("main", "sleep", "60"), bye], onExit="bye", activeDeadlineSeconds=1)
    status = cluster.submit(body | {"spec": body["spec"] | {"podSpecPatch": NO_GRACE}})
    assert (status.phase, status.message) == ("Failed", "Step exceeded its deadline")
    assert status.nodes["wf.onExit"].phase == "Succeeded"


def test_a_deleted_pod_is_an_error_without_exit_code(cluster: Cluster) -> None:
    thread = when_started(cluster, "wf", lambda: cluster.delete_pod("wf", "wf"))
    status = cluster.submit(workflow("wf", [step("main", "drain", "60", podSpecPatch=GRACE)]))
    thread.join()
    node = status.nodes["wf"]
    assert (node.phase, node.message, node.exit_code) == ("Error", "pod deleted", "-1")


def test_stop_drains_persists_and_resumes(cluster: Cluster) -> None:
    first = step("first", "write", "x", "1", outputs=[output("x")])
    last = step("last", "drain", "{{=retries == '0' ? '60' : '0'}}", retryStrategy={"limit": "3"}, podSpecPatch=GRACE)
    manifest = workflow("wf", [{"name": "main", "steps": [[call("first")], [call("last")]]}, first, last])
    manifest["spec"]["onExit"] = "first"
    thread = when_started(cluster, "wf[1].last(0)", cluster.stop)
    status = cluster.submit(manifest)
    thread.join()
    assert (status.phase, status.message) == ("Failed", "Stopped with strategy 'Stop'")
    assert (status.nodes["wf[1].last(0)"].exit_code, status.nodes["wf.onExit"].phase) == ("75", "Succeeded")
    assert cluster.status("wf") == status
    resumed = cluster.submit(manifest)
    assert resumed.phase == "Succeeded"
    assert [node.attempt for node in resumed.attempts_of("wf[1].last")] == [0, 1]
    # The exit handler runs after each end, the kept first step only once.
    assert cluster.trace() == ["write x 1", "drain 60", "write x 1", "drain 0", "write x 1"]


def test_a_second_stop_waits_for_no_grace_period_and_runs_no_exit_handler(cluster: Cluster) -> None:
    def stop_twice() -> None:
        cluster.stop()
        cluster.stop()

    thread = when_started(cluster, "wf", stop_twice)
    stubborn = step("main", "stubborn", "60", podSpecPatch=GRACE)
    status = cluster.submit(workflow("wf", [stubborn, step("bye", "exit", "0")], onExit="bye"))
    thread.join()
    assert (status.message, status.nodes["wf"].exit_code) == ("Stopped with strategy 'Terminate'", "137")
    assert "wf.onExit" not in status.nodes


def test_stop_before_anything_started_leaves_everything_to_the_resume(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event.kind == "workflow" and event.phase == "Running" and not stopped:
            stopped.append(event)
            cluster.stop()

    stopped: list[Event] = []
    main = {"name": "main", "dag": {"tasks": [call("ok", withSequence={"count": "3"})]}}
    manifest = workflow("wf", [main, step("ok", "exit", "0")])
    with Cluster(tmp_path, on_event=stop) as cluster:
        assert cluster.submit(manifest).message == "Stopped with strategy 'Stop'"
        assert cluster.submit(manifest).phase == "Succeeded"
        assert len([line for line in cluster.trace() if line == "exit 0"]) >= 3


def test_a_workflow_that_was_stopped_before_it_began_has_no_exit_handler_to_run(cluster: Cluster) -> None:
    cluster.stop()
    status = cluster.submit(workflow("wf", [step("main", "exit", "0")], onExit="main"))
    assert (status.phase, status.message, cluster.trace()) == ("Failed", "Stopped with strategy 'Stop'", [])


def test_what_a_step_leaves_running_ends_with_it(cluster: Cluster, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 300 & echo $! > {pid_file}"
    main = {"name": "main", "container": {"command": ["sh", "-c", script]}}
    assert cluster.submit(workflow("wf", [main])).phase == "Succeeded"
    assert ended(int(pid_file.read_text()))


def ended(pid: int) -> bool:
    """True once the process is gone, or a zombie that nobody here can reap."""
    for _ in range(500):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


EXECUTOR = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.local_cluster import Cluster
with Cluster(Path(sys.argv[2])) as cluster:
    print(json.dumps(cluster.submit(json.loads(sys.argv[3])).phase))
"""


def run_executor(folder: Path, manifest: dict[str, Any]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", EXECUTOR, str(REPOSITORY), str(folder), json.dumps(manifest)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE)


def test_a_killed_executor_takes_its_steps_along_and_is_resumed(tmp_path: Path) -> None:
    sequence = {"count": "2"}
    slow = step("slow", "sleep", "{{=retries == '0' ? '60' : '0'}}", retryStrategy={"limit": "1", "expression": "true"})
    main = {"name": "main", "steps": [[call("quick", withSequence=sequence)], [call("slow", withSequence=sequence)]]}
    manifest = workflow("wf", [main, step("quick", "exit", "0"), slow])
    executor = run_executor(tmp_path, manifest)
    pids: list[int] = []
    while len(pids) < 2:
        status = load_status(tmp_path / "runs", "wf")
        nodes = [] if status is None else [node for node in status.leaves() if node.template == "slow"]
        pids = [node.pid for node in nodes if node.pid and (Path(node.folder) / "outputs" / "started").exists()]
        time.sleep(0.01)
    executor.kill()
    executor.communicate()
    assert [ended(pid) for pid in pids] == [True, True]
    with Cluster(tmp_path) as cluster:
        status = cluster.submit(manifest)
        assert status.phase == "Succeeded"
        assert status.nodes["wf[1].slow(0:0)(0)"].message == "pod deleted"
        assert status.nodes["wf[1].slow(0:0)(1)"].phase == "Succeeded"
        assert sorted(cluster.trace()) == ["exit 0", "exit 0", "sleep 0", "sleep 0", "sleep 60", "sleep 60"]


def test_two_executors_never_run_one_workflow(cluster: Cluster, tmp_path: Path) -> None:
    other = run_executor(tmp_path, workflow("wf", [step("main", "sleep", "60")]))
    cluster_folder(cluster, "wf")
    with pytest.raises(ServiceUnavailable, match="run by another process"):
        cluster.submit(workflow("wf", [step("main", "exit", "0")]))
    other.kill()
    other.communicate()


def test_a_mutex_lets_one_workflow_at_a_time_pass(tmp_path: Path) -> None:
    mutexes = {"mutexes": [{"name": "run-{{workflow.parameters.run}}"}]}
    arguments = {"parameters": [{"name": "run", "value": "r"}]}
    spec = {"synchronization": mutexes, "arguments": arguments}
    manifests = [workflow(name, [step("main", "sleep", "0.3")], **spec) for name in ("wf", "wf2")]
    executors = [run_executor(tmp_path, manifest) for manifest in manifests]
    assert [json.loads(executor.communicate()[0]) for executor in executors] == ["Succeeded", "Succeeded"]
    spans = []
    for name in ("wf", "wf2"):
        status = load_status(tmp_path / "runs", name)
        assert status is not None
        spans.append((status.nodes[name].started_s, status.nodes[name].finished_s))
    first, second = sorted(spans)
    assert first[1] <= second[0]


def test_a_dead_warm_server_is_named_with_its_log(cluster: Cluster) -> None:
    def kill_server() -> None:
        for child in psutil.Process().children():
            if "warm_server.py" in " ".join(child.cmdline()) and str(cluster.status("wf")) and is_ours(child):
                child.kill()

    def is_ours(process: psutil.Process) -> bool:
        return any(child.pid == pid_of(cluster, "wf") for child in process.children())

    thread = when_started(cluster, "wf", kill_server)
    status = cluster.submit(workflow("wf", [step("main", "sleep", "60")]))
    thread.join()
    assert (status.phase, "warm-server.log" in status.message) == ("Error", True)
