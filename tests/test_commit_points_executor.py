"""The local executor, killed by SIGKILL before and after each time that it writes down its status, and resumed.

docs/commit-points.md has the argument; MOERL_TEST_COMMIT_POINTS=all tries all points instead of some.
"""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.local_cluster import Cluster, call, child_of, inputs, output, step, workflow, workflow_template
from tests.test_commit_points import EVERY
from workflows.local.status import NodeStatus, load_status

pytestmark = pytest.mark.timeout(1800)  # of all points, on a busy machine
STATUS_FILES = ("workflow.json",)
RETRIED = {"limit": "3", "expression": "true"}
CHILD = workflow_template("other", [step("main", "write", "last", "3", retryStrategy=RETRIED)])
MANIFEST = workflow(
    "wf",
    [
        {
            "name": "main",
            "steps": [
                [call("first"), call("beside")],
                [call("second", arguments={"value": "{{steps.first.outputs.parameters.one}}"})],
                [call("child")],
            ],
            "outputs": {
                "parameters": [{"name": "two", "valueFrom": {"parameter": "{{steps.second.outputs.parameters.two}}"}}]
            },
        },
        step("first", "write", "one", "1", outputs=[output("one")], retryStrategy=RETRIED),
        step("beside", "exit", "0", retryStrategy=RETRIED),
        step("second", "write", "two", "{{inputs.parameters.value}}2", outputs=[output("two")], inputs=inputs("value"))
        | {"retryStrategy": RETRIED},
        {"name": "child", "resource": child_of("wf-child", "other"), "retryStrategy": RETRIED},
    ],
)


def execute(folder: Path, moment: tuple[int, str] | None = None) -> tuple[int, str, list[str]]:
    """Submit in a process of its own, which is killed at the moment (number of a write, side), if one is given.

    Returns its exit code, what it printed, and the names of the files that it wrote.
    """
    noted = folder / "writes"
    noted.unlink(missing_ok=True)

    def main() -> int:
        count, replace = 0, os.replace

        def counted(source: Any, target: Any) -> None:
            nonlocal count
            if Path(target).name not in STATUS_FILES:
                return replace(source, target)
            number, count = count, count + 1
            if moment == (number, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
            with noted.open("a") as file:
                file.write(f"{Path(target).parent.name}\n")
            if moment == (number, "after"):
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = counted  # type: ignore[assignment]
        with Cluster(folder, templates=[CHILD]) as cluster:
            return int(cluster.submit(MANIFEST).phase != "Succeeded")

    code, log = forked.start(main).finish()
    return code, log, noted.read_text().split() if noted.exists() else []


def leaves(folder: Path) -> dict[str, NodeStatus]:
    """The pods of both workflows that succeeded."""
    statuses = [status for name in ("wf", "wf-child") if (status := load_status(folder / "runs", name)) is not None]
    return {f"{s.name} {node.name}": node for s in statuses for node in s.leaves() if node.phase == "Succeeded"}


def test_an_executor_killed_at_a_write_of_its_status_is_resumed_and_repeats_no_step_that_it_knows_of(
    tmp_path: Path,
) -> None:
    (tmp_path / "undisturbed").mkdir()
    code, log, writes = execute(tmp_path / "undisturbed")
    assert code == 0, log
    assert {"wf", "wf-child"} == set(writes)
    expected = {name: node.outputs for name, node in leaves(tmp_path / "undisturbed").items()}
    points = [(number, side) for number in range(len(writes)) for side in ("before", "after")]
    for moment in [*points[::EVERY], points[-1]]:
        folder = tmp_path / "killed"
        folder.mkdir()
        code, log, _ = execute(folder, moment)
        assert code == -signal.SIGKILL, (moment, log)
        known = leaves(folder)
        code, log, _ = execute(folder)
        assert code == 0, (moment, log)
        after = leaves(folder)
        assert {name.split("(")[0] for name in after} == {name.split("(")[0] for name in expected}, moment
        assert sorted(map(str, (n.outputs for n in after.values()))) == sorted(map(str, expected.values())), moment
        assert {name: after[name].finished_s for name in known} == {n: node.finished_s for n, node in known.items()}
        shutil.rmtree(folder)
