"""Signals that steps send to themselves at chosen moments, for tests of what a kill costs.

A warm server preloads this module, which wraps the functions by which steps commit; the steps that it forks then ask
$FAULTS, a JSON object {run: {"step of iteration": [signal number, moment]}}, whether to fall. Only a first attempt
does, and leaves a file in $FAULTS_DIR to say so. The moments:

before: the attempt is in the ledger, and nothing else of it.
middle: of its outcome all is written but the last: the transaction not committed (rollout, reward: that of a unit
        half-way), the last file of the report not stored; train: half of its optimizer steps are done.
after:  its outcome is stored, and nobody was told: the process has not ended, no output is written.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.engine import Engine

from steps import entrypoint, trainers
from steps.adapters import buffer, ledger
from steps.adapters.local_store import LocalStore

# Step -> the module and the name of the function whose return means that the outcome is stored.
COMMITS: dict[str, tuple[Any, str]] = {
    "init_run": (ledger, "record_publication"),
    "plan": (ledger, "plan_iteration"),
    "rollout": (buffer, "commit_groups"),
    "reward": (buffer, "complete_reward"),
    "flush": (buffer, "finish_batch"),
    "train": (trainers, "finish_folder"),
    "publish": (ledger, "record_publication"),
    "evaluate": (ledger, "record_evaluation"),
    "report": (ledger, "set_iteration_metrics"),
    "summary": (LocalStore, "put_bytes"),
}
IN_THE_STORE = ("train", "summary")
"""Steps whose outcome is a file; that of the others is a transaction of the ledger."""
moments_now: set[str] = set()
"""Of the commit that is going on."""
commits: list[Connection] = []
"""Of this process, so far."""


def option(name: str) -> str:
    words = sys.argv
    return words[words.index(name) + 1] if name in words else ""


def step() -> str:
    module = Path(sys.argv[0]).stem if sys.argv[0].endswith(".py") else sys.argv[0].rpartition(".")[2]
    return "summary" if module == "report" and not option("--iteration") else module


def fall(moment: str) -> None:
    """Send the signal if this is the moment that the test has chosen."""
    iteration = int(option("--iteration") or 0)
    faults = json.loads(os.environ.get("FAULTS", "{}")).get(option("--run"), {})
    number, chosen = faults.get(f"{step()} {iteration}", (0, ""))
    mark = Path(os.environ.get("FAULTS_DIR", ".")) / f"{option('--run')} {step()} {iteration}"
    if chosen == moment and os.environ.get("MOERL_ATTEMPT") == "0":
        with suppress(FileExistsError):
            mark.touch(exist_ok=False)  # of several ranks only one falls
            os.kill(os.getpid(), number)


def moments_of(name: str, arguments: tuple[Any, ...]) -> set[str]:
    """The moments that fall into this call of the step's commit function."""
    if name in ("rollout", "reward"):
        unit = arguments[1].unit
        total = ledger.get_iteration(arguments[0], unit.run_id, unit.iteration).num_units
        return {moment for moment, number in (("middle", total // 2), ("after", total - 1)) if number == unit.unit}
    if name == "train":
        return {"after"}
    return {"middle", "after"} if name != "summary" or str(arguments[1]).endswith("run.html") else set()


def watch(names: list[str], owner: Any, attribute: str) -> None:
    original: Callable[..., Any] = getattr(owner, attribute)

    def watched(*arguments: Any, **options: Any) -> Any:
        moments = moments_of(step(), arguments) if step() in names else set()
        if step() == "summary" and moments:
            fall("middle")
        moments_now.update(moments)
        before = len(commits)
        result = original(*arguments, **options)
        moments_now.clear()
        if "after" in moments:
            if step() not in IN_THE_STORE and (len(commits) == before or commits[-1].in_transaction()):
                raise AssertionError(f"{attribute} has returned and committed nothing: no commit point")
            fall("after")
        return result

    setattr(owner, attribute, watched)


def on_commit(connection: Connection) -> None:
    """Called when all is written and before the database is told to commit."""
    if "middle" in moments_now:
        fall("middle")
    commits.append(connection)


def begin_attempt(*arguments: Any, **options: Any) -> int:
    attempt: int = BEGIN(*arguments, **options)
    fall("before")
    return attempt


def progress(self: entrypoint.StepContext, done: int, total: int) -> None:
    PROGRESS(self, done, total)
    if step() == "train" and 2 * done >= total:
        fall("middle")


BEGIN = ledger.begin_attempt
PROGRESS = entrypoint.StepContext.progress
ledger.begin_attempt = begin_attempt
entrypoint.StepContext.progress = progress  # type: ignore[method-assign]
event.listen(Engine, "commit", on_commit)
for where, what in {(owner, attribute) for owner, attribute in COMMITS.values()}:
    watch([name for name, commit in COMMITS.items() if commit == (where, what)], where, what)
