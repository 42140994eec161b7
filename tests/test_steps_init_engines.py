"""Rollout engines of a run, as init_run finds them out, and what it leaves to them."""

import json
from typing import Literal

import pytest

from steps import paths
from steps.adapters import ledger
from steps.config import RolloutConfig, RunConfig
from steps.init_run import Counts, engines_of
from tests.fixtures_steps import RUN, TINY_CONFIG, StepResult, StepRunner


def init(steps: StepRunner, *options: str) -> StepResult:
    return steps.run(["steps.init_run", "--run", RUN, "--config", TINY_CONFIG, *options])


def counts(workers: int, engine_pods: int | None) -> Counts:
    return Counts(
        iterations=0,
        rollout_workers=workers,
        reward_workers=0,
        training_nodes=0,
        most_ranks_per_node=0,
        engine_pods=engine_pods,
    )


@pytest.mark.parametrize(
    ("engine", "asked", "pods"),
    [("torch", None, 0), ("torch", 0, 0), ("vllm", None, 3), ("sglang", 2, 2), ("vllm", 0, 0)],
)
def test_a_run_gets_one_engine_for_each_rollout_worker_unless_it_asks_for_others(
    engine: Literal["torch", "vllm", "sglang"], asked: int | None, pods: int
) -> None:
    config = RunConfig(rollout=RolloutConfig(engine=engine, workers=2))
    assert engines_of(config, counts(3, asked)) == pods


def test_the_first_policy_waits_for_the_engines_that_the_run_gets(steps: StepRunner) -> None:
    given = ("--rollout-engine", "vllm", "--engine-pods", "from-config")
    result = init(steps, *given)
    assert result.code == 0, result.log  # it needs no package of the server's
    assert result.outputs["engine-pods"] == result.outputs["rollout-workers"]
    assert "held-out reward" not in result.log
    assert json.loads(steps.store.get_bytes(paths.config_key(RUN)))["rollout"]["engine"] == "vllm"
    assert ledger.list_evaluations(steps.database, RUN) == []


def test_engines_that_nothing_would_use_are_refused(steps: StepRunner) -> None:
    result = init(steps, "--engine-pods", "2")
    assert (result.code, result.log.count("\n")) == (78, 1), result.log
    assert "engine-pods = 2: rollout.engine = torch has no server" in result.log
