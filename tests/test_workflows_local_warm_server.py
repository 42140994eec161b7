"""The process that forks the steps: one thread, clean children, modules loaded once."""

import os
import subprocess
import sys
from pathlib import Path

from tests.local_cluster import Cluster, output, workflow
from workflows.local.warm_client import DEFAULT_PRELOAD, SINGLE_THREADED, Preload
from workflows.local.warm_server import exit_code, module_of


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
