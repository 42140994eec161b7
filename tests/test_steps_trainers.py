"""Settings that change how a trainer is built, through a whole iteration."""

import json

import pytest

from steps.adapters import ledger
from steps.adapters.publications_manifest import read_manifest
from tests.fixtures_steps import RUN, TINY_CONFIG, StepRunner


def trained(steps: StepRunner, config: str) -> dict[str, float]:
    """Metrics of the first update."""
    started = steps.init(config)
    assert started.code == 0, started.log
    steps.iterate()
    metrics: dict[str, float] = ledger.get_iteration_metrics(steps.database, RUN, 1)["train"]["metrics"]
    return metrics


def test_a_kl_to_version_0_trains_from_the_first_iteration_on(steps: StepRunner) -> None:
    metrics = trained(steps, f"{TINY_CONFIG}\n[train.loss]\nkl_coefficient = 0.1\n")
    assert metrics["actor/kl_loss"] > 0.0


def test_a_nucleus_leaves_the_ratio_near_one(steps: StepRunner) -> None:
    config = TINY_CONFIG.replace("max_new_tokens = 4", "max_new_tokens = 4\ntop_p = 0.5").replace("1e-2", "1e-6")
    metrics = trained(steps, config)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-3)
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_a_bfloat16_policy_is_trained_in_float32_and_published_in_bfloat16(steps: StepRunner) -> None:
    trained(steps, TINY_CONFIG.replace("[model]", '[model]\ndtype = "bfloat16"').replace("1e-2", "1e-4"))
    first, second = ledger.list_publications(steps.database, RUN)
    assert first.weights_sha256 != second.weights_sha256
    for publication in (first, second):
        prefix = publication.uri.removeprefix(f"{steps.store.uri}/")
        key = read_manifest(steps.store, prefix).key_of(prefix, "config.json")
        assert json.loads(steps.store.get_bytes(key))["dtype"] == "bfloat16"


RANKS = "\n[train]\nranks = 2\n[moe]\ndispatcher = 'all_to_all'\n"


@pytest.mark.parametrize(
    ("section", "setting", "rest"),
    [
        ("[train.update]", "compute_dtype = 'bfloat16'", ""),
        ("[train.update]", "compute_dtype = 'bfloat16'", f"{RANKS}exchange_dtype = 'bfloat16'\n"),
        ("[train.update]", "recompute = 'moe'", f"{RANKS}routing_replay = 'sampler'\n"),
        ("[train.update]", "recompute = 'experts'", f"{RANKS}routing_replay = 'trainer'\ndeduplicate = 'rank'\n"),
        ("[model]", "family = 'deepseek_v3'", f"{RANKS}bias_update_rate = 0.01\nfreeze_router = true\n"),
    ],
)
def test_a_way_of_training_goes_through_a_whole_iteration(
    steps: StepRunner, section: str, setting: str, rest: str
) -> None:
    metrics = trained(steps, TINY_CONFIG.replace(section, f"{section}\n{setting}") + rest)
    assert metrics["actor/grad_norm"] > 0.0
    first, second = ledger.list_publications(steps.database, RUN)
    assert first.weights_sha256 != second.weights_sha256
