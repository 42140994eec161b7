"""The process that forks the steps: one thread, clean children, modules loaded once."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.local_cluster import Cluster, call, child_of, output, step, workflow, workflow_template
from workflows.local.status import WorkflowStatus
from workflows.local.warm_client import DEFAULT_PRELOAD, SINGLE_THREADED, Preload
from workflows.local.warm_server import exit_code, module_of
from workflows.run_failure import explain_failure

BOUND_S = 120  # against a hang only


def run_step(folder: Path, source: str, preload: Preload) -> dict[str, str]:
    """The output parameters of one run of `source` as `python -m tiny`."""
    (folder / "modules").mkdir()
    (folder / "modules" / "tiny.py").write_text(source)
    main = {"name": "main", "container": {"command": ["python", "-m", "tiny", "a b"]}, "outputs": {}}
    main["outputs"] = {"parameters": [output("x"), output("y", default="")]}
    with Cluster(folder, preload=preload) as cluster:
        status = cluster.submit(workflow("wf", [main]))
        log = Path(status.nodes["wf"].folder, "main.log").read_text()
    assert status.phase == "Succeeded", status.message + log
    return status.nodes["wf"].outputs


WRITE = """
import os, sys
from pathlib import Path

def write(name, value):
    Path(os.environ["MOERL_OUTPUTS_DIR"], name).write_text(str(value))
"""


def test_no_default_module_starts_a_thread() -> None:
    modules = DEFAULT_PRELOAD.first + DEFAULT_PRELOAD.when_idle
    code = (
        f"import importlib, os\nfor module in {modules}: importlib.import_module(module)\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    environment = os.environ | SINGLE_THREADED
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_step_is_like_a_fresh_interpreter(tmp_path: Path) -> None:
    source = (
        WRITE
        + """
import signal
main = sys.modules["__main__"]
assert __name__ == "__main__" and main.__file__ == __file__
assert sys.argv == [__file__, "a b"] and sys.path[0] == os.getcwd() == str(Path(__file__).parent)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and os.getpgrp() == os.getpid()
assert sys.stdin.read() == ""
write("x", "workflows" in sys.modules)
write("y", "decimal" in sys.modules)
"""
    )
    assert run_step(tmp_path, source, Preload(first=("decimal",))) == {"x": "False", "y": "True"}


def test_exit_functions_and_threads_of_a_step_end_before_it(tmp_path: Path) -> None:
    source = (
        WRITE
        + """
import atexit, threading, time, weakref
class Thing: pass
thing = Thing()
atexit.register(write, "x", "at exit")
weakref.finalize(thing, write, "y", "finalized")
threading.Thread(target=lambda: (time.sleep(0.1), write("x", "thread"))).start()
"""
    )
    assert run_step(tmp_path, source, Preload()) == {"x": "at exit", "y": "finalized"}


def test_a_module_that_is_not_installed_is_left_out(tmp_path: Path) -> None:
    source = WRITE + "write('x', 'decimal' in sys.modules)\n"
    preload = Preload(first=("no_such_module", "decimal"), when_idle=("no_such_module_either",))
    assert run_step(tmp_path, source, preload)["x"] == "True"


def test_exit_codes_are_the_interpreters() -> None:
    assert [exit_code(value) for value in (None, 0, 75, 256, -1, "text")] == [0, 0, 75, 0, 255, 1]


def test_only_python_dash_m_runs_in_the_fork() -> None:
    commands = (["python", "-m", "a.b", "x"], ["python3", "-m", "a"], ["python", "x.py"], ["python", "-u", "-m", "a"])
    assert [module_of(command) for command in commands] == ["a.b", "a", None, None]


# As a module to preload: they run in the server while a start request waits unread in its socket.
KILLED_WITH_A_REQUEST = """
import os, select, signal, sys
select.select([int(sys.argv[1])], [], [])
os.kill(os.getpid(), signal.SIGKILL)
"""
NEVER_DONE_WITH_A_REQUEST = """
import select, sys, time
from pathlib import Path
select.select([int(sys.argv[1])], [], [])
Path("asked").touch()
time.sleep(600)
"""


def submitted(cluster: Cluster, manifest: dict[str, Any]) -> WorkflowStatus:
    """The status of a run that must end by itself."""
    statuses: list[WorkflowStatus] = []
    thread = threading.Thread(target=lambda: statuses.append(cluster.submit(manifest)), daemon=True)
    thread.start()
    thread.join(BOUND_S)
    assert not thread.is_alive(), "the run hangs"
    return statuses[0]


def cluster_with(folder: Path, preloaded: str, **options: Any) -> Cluster:
    (folder / "modules").mkdir()
    (folder / "modules" / "preloaded.py").write_text(preloaded)
    return Cluster(folder, preload=Preload(first=("preloaded",)), **options)


@pytest.mark.parametrize("retry", [{}, {"retryStrategy": {"retryPolicy": "Always"}}])  # without limit: for ever
def test_a_server_killed_before_it_read_a_request_ends_the_run_with_69(tmp_path: Path, retry: dict[str, Any]) -> None:
    manifest = workflow("wf", [step("main", "exit", "0", **retry)])
    with cluster_with(tmp_path, KILLED_WITH_A_REQUEST) as cluster:
        status = submitted(cluster, manifest)
        assert (status.phase, "warm-server.log" in status.message) == ("Error", True)
        failure = explain_failure(tmp_path / "runs", status)
        assert (failure.exit_code, failure.what) == (69, "wf of wf failed (exit 69)")
        assert failure.why == status.message
        again = submitted(cluster, manifest)  # the server is known to be gone from the start
        assert explain_failure(tmp_path / "runs", again).exit_code == 69


def test_a_killed_server_fails_a_whole_campaign_with_69(tmp_path: Path) -> None:
    body = {"name": "body", "dag": {"tasks": [call("a", "leaf"), call("b", "leaf")]}}
    template = workflow_template("iteration", [body, step("leaf", "exit", "0")])
    with cluster_with(tmp_path, KILLED_WITH_A_REQUEST, templates=[template]) as cluster:
        child = {"name": "main", "resource": child_of("wf-00001", "iteration")}
        status = submitted(cluster, workflow("wf", [child]))
    assert (status.phase, status.nodes["wf"].exit_code) == ("Failed", "64")
    assert explain_failure(tmp_path / "runs", status).exit_code == 69


def test_stop_does_not_wait_for_a_server_that_still_imports(tmp_path: Path) -> None:
    def stop() -> None:
        while not (tmp_path / "modules" / "asked").exists():
            time.sleep(0.01)
        cluster.stop()

    manifest = workflow("wf", [step("main", "exit", "0")])
    with cluster_with(tmp_path, NEVER_DONE_WITH_A_REQUEST) as cluster:
        thread = threading.Thread(target=stop, daemon=True)
        thread.start()
        status = submitted(cluster, manifest)
        thread.join(BOUND_S)
    assert (status.phase, status.message) == ("Failed", "Stopped with strategy 'Stop'")
    assert (status.nodes["wf"].exit_code, status.nodes["wf"].pid, cluster.trace()) == ("-1", 0, [])
    with Cluster(tmp_path) as cluster:
        assert cluster.submit(manifest).phase == "Succeeded"


def test_a_pod_deleted_before_it_began_is_an_error_and_never_runs(tmp_path: Path) -> None:
    def delete(folder: Path) -> None:
        while not (folder / "asked").exists():
            time.sleep(0.01)
        cluster.delete_pod("wf", "wf")

    slow = NEVER_DONE_WITH_A_REQUEST.replace("600", "1")
    with cluster_with(tmp_path, slow) as cluster:
        threading.Thread(target=delete, args=(tmp_path / "modules",), daemon=True).start()
        status = submitted(cluster, workflow("wf", [step("main", "sleep", "600")]))
        after = submitted(cluster, workflow("wf2", [step("main", "exit", "0")]))
    assert (status.phase, status.message, status.nodes["wf"].exit_code) == ("Error", "pod deleted", "-1")
    assert after.phase == "Succeeded"


def test_a_module_that_breaks_when_imported_is_named_in_the_servers_log(tmp_path: Path) -> None:
    broken = 'raise RuntimeError("a bug\\nin two lines")\n'
    with cluster_with(tmp_path, broken) as cluster:
        assert submitted(cluster, workflow("wf", [step("main", "exit", "0")])).phase == "Succeeded"
    (log,) = tmp_path.rglob("warm-server.log")
    assert log.read_text() == "not preloaded: preloaded: RuntimeError('a bug\\nin two lines')\n"
