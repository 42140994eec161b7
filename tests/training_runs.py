"""Runs that are to train, copies of them, and what an update leaves behind."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steps import paths, train  # loaded here, so that the forks needn't
from steps.adapters import ledger
from steps.adapters.local_store import LocalStore
from tests import forked
from tests.fixtures_steps import RUN, STAGES, TINY_CONFIG, StepRunner, stage_argv
from workflows.local.warm_client import WarmServer

STEPS = 8
"""Optimizer steps of an update."""
CONFIG = TINY_CONFIG + "\n[train]\ncheckpoint_every = 2\n"
WALL_CLOCK = ("perf/", "timing_s/", "moe/exchange_")


def prepare(steps: StepRunner, config: str) -> None:
    """Everything up to a batch that the first update can be made of."""
    started = steps.init(config)
    assert started.code == 0, started.log
    until_batch(steps, 1)


def until_batch(steps: StepRunner, iteration: int) -> None:
    for stage in STAGES[: STAGES.index("train")]:
        result = steps.step(stage, iteration)
        assert result.code == 0, result.log


def in_folder(server: WarmServer, folder: Path) -> StepRunner:
    return StepRunner(server, folder, f"{folder}/store", f"sqlite:///{folder}/moerl.sqlite")


def copy_of(server: WarmServer, run: Path, folder: Path) -> StepRunner:
    """The same run once more, with an empty cache."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("step-*", "cache"))
    return in_folder(server, folder)


def train_here(steps: StepRunner, patch: Callable[[], None] = lambda: None, iteration: int = 1) -> tuple[int, str]:
    """The train step in a fork of this process, changed by `patch`: exit code (negative: a signal's) and output."""

    def main() -> None:
        patch()
        sys.argv = stage_argv("train", iteration)
        train.main()

    return forked.start(main, steps.env).finish()


def die_at_write(number: int) -> None:
    """From now on this process is killed when it is about to write to or delete from the store for that time."""
    done = 0

    def watch(name: str) -> None:
        original: Callable[..., Any] = getattr(LocalStore, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(LocalStore, name, watched)

    for name in ("put_bytes", "upload_file", "delete"):
        watch(name)


def states_inside(steps: StepRunner, iteration: int = 1) -> list[int]:
    """Optimizer steps of the complete states inside an update."""
    prefix = paths.partial_checkpoints_prefix(RUN, iteration)
    keys = [info.key for info in steps.store.list(prefix)]
    return sorted(int(key.split("/")[-2]) for key in keys if key.endswith("/manifest.json"))


def outcome(steps: StepRunner, iteration: int = 1) -> tuple[str, dict[str, Any]]:
    """Sha256 of the weights of a trained version, and what is recorded of its update, without measured times."""
    result = steps.step("publish", iteration)
    assert result.code == 0, result.log
    record = ledger.get_iteration_metrics(steps.database, RUN, iteration)["train"]
    for name in ("seconds", "samples_per_s", "transport"):
        del record[name]
    record["metrics"] = {name: value for name, value in record["metrics"].items() if not name.startswith(WALL_CLOCK)}
    for step in record["router_steps"]:
        for layer in step["layers"]:
            for name in ("exchange_s", "exchange_share"):
                layer.pop(name, None)
    return ledger.get_publication(steps.database, RUN, iteration).weights_sha256, record
