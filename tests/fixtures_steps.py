"""Runs steps as real processes, forked from a warm server so that each costs a fraction of a second."""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from steps.adapters import ledger
from steps.adapters.database import Database, open_database
from steps.adapters.store import Store, open_store
from workflows.local.warm_client import WarmClient, WarmServer

REPOSITORY = Path(__file__).resolve().parent.parent
RUN = "tiny"
STAGES = ("plan", "rollout", "reward", "flush", "train", "publish", "evaluate", "report")
TINY_CONFIG = """
name = "tiny"
iterations = 2
[task]
digits = 3
train_size = 200
heldout_size = 16
verifier = "per_position"
[model]
hidden_size = 16
num_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
moe_intermediate_size = 16
num_experts = 4
[rollout]
prompts_per_iteration = 8
prompts_per_unit = 2
group_size = 4
lease_s = 2.0
[rollout.sampling]
max_new_tokens = 4
[train.optimizer]
learning_rate = 1e-2
[train.update]
optimizer_steps_per_epoch = 8
"""


@dataclass(frozen=True)
class StepResult:
    """How a step ended: exit code as Kubernetes shows it, all that it printed, and its outputs."""

    code: int
    log: str
    outputs: dict[str, str]


class StepRunner:
    """A run's services and a way to run its steps. Commands are those of the manifests."""

    def __init__(self, server: WarmServer, folder: Path, store_uri: str, database_url: str) -> None:
        self._server, self._folder, self._ids = server, folder, itertools.count()
        self.store_uri, self.database_url = store_uri, database_url
        self.env = {
            "MOERL_STORE": store_uri,
            "MOERL_DATABASE_URL": database_url,
            "MOERL_CACHE_DIR": str(folder / "cache"),
            "MOERL_CAPACITY_TYPE": "local",
        }

    @property
    def database(self) -> Database:
        return open_database(self.database_url)

    @property
    def store(self) -> Store:
        return open_store(self.store_uri)

    def init(self, config: str = TINY_CONFIG, run: str = RUN) -> StepResult:
        return self.run(["steps.init_run", "--run", run, "--config", config])

    def step(self, stage: str, iteration: int = 1, worker: int = 0) -> StepResult:
        return self.run(stage_argv(stage, iteration, worker))

    def iterate(self, iteration: int = 1) -> None:
        """All stages of an iteration; fails the test when one fails."""
        for stage in STAGES:
            result = self.step(stage, iteration)
            assert result.code == 0, result.log

    def run(self, argv: Sequence[str]) -> StepResult:
        return self.run_together([argv])[0]

    def run_together(
        self, argvs: Sequence[Sequence[str]], *, signal_when: tuple[Callable[[], bool], signal.Signals] | None = None
    ) -> list[StepResult]:
        """Run steps at the same time. `signal_when` sends a signal to the first one once its condition holds."""
        return asyncio.run(self._run_together(argvs, signal_when))

    async def _run_together(
        self, argvs: Sequence[Sequence[str]], signal_when: tuple[Callable[[], bool], signal.Signals] | None
    ) -> list[StepResult]:
        folders = [self._folder / f"step-{next(self._ids)}" for _ in argvs]
        async with WarmClient(self._server) as client:
            steps = []
            for argv, folder in zip(argvs, folders, strict=True):
                folder.mkdir(parents=True)
                (folder / "log").touch()  # a step may be killed before it writes a line
                env = {**os.environ, **self.env, "MOERL_OUTPUTS_DIR": str(folder / "outputs")}
                command = ["python", "-m", *argv]
                steps.append(client.start(command, env, REPOSITORY, folder / "log"))
            if signal_when is not None:
                condition, number = signal_when
                await steps[0].started
                while not steps[0].ended.done() and not condition():
                    await asyncio.sleep(0.001)
                client.signal(steps[0], number)
            codes = [await step.ended for step in steps]
        return [_result(code, folder) for code, folder in zip(codes, folders, strict=True)]

    def final_weights(self) -> str:
        return self.weights()[-1]

    def weights(self) -> list[str]:
        """SHA-256 of each version's."""
        return [row.weights_sha256 for row in ledger.list_publications(self.database, RUN)]


def stage_argv(stage: str, iteration: int = 1, worker: int = 0) -> list[str]:
    argv = [f"steps.{stage}", "--run", RUN, "--iteration", str(iteration)]
    return [*argv, "--worker", str(worker)] if stage in ("rollout", "reward") else argv


def _result(code: int, folder: Path) -> StepResult:
    outputs = folder / "outputs"
    names = sorted(outputs.iterdir()) if outputs.is_dir() else []
    return StepResult(code, (folder / "log").read_text(), {path.name: path.read_text() for path in names})


@pytest.fixture(scope="session")
def warm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmServer]:
    server = WarmServer(log=tmp_path_factory.mktemp("warm") / "server.log", cwd=REPOSITORY)
    yield server
    server.close()


@pytest.fixture
def steps(warm_server: WarmServer, tmp_path: Path) -> StepRunner:
    """A fresh run on a directory and SQLite, not initialised yet."""
    return StepRunner(warm_server, tmp_path, f"{tmp_path}/store", f"sqlite:///{tmp_path}/moerl.sqlite")


@pytest.fixture(scope="session")
def undisturbed_weights(undisturbed_versions: list[str]) -> str:
    """What two iterations of the tiny run come to when nothing is in their way."""
    return undisturbed_versions[-1]


@pytest.fixture(scope="session")
def undisturbed_versions(warm_server: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Weights of that run's versions, from 0 to 2."""
    folder = tmp_path_factory.mktemp("undisturbed")
    runner = StepRunner(warm_server, folder, f"{folder}/store", f"sqlite:///{folder}/moerl.sqlite")
    assert runner.init().code == 0
    runner.iterate(1)
    runner.iterate(2)
    return runner.weights()
