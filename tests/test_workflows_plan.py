"""`moerl plan`: its arithmetic against independent reckoning, the ready configurations, and what it refuses."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steps.config import RunConfig
from steps.config_loader import load_config
from workflows import cli
from workflows.capacity.exchange import crossing, reached
from workflows.capacity.memory import cache_bytes_per_token, engine_terms, trainer_terms
from workflows.capacity.model import Setting, new_setting
from workflows.capacity.phases import phases
from workflows.capacity.problems import setting_problems
from workflows.platform import load_profile

CONFIGS = Path(__file__).parents[1] / "configs"
READY = ("qwen3-30b-a3b-p5en", "qwen3-235b-a22b-p5en", "super-sparse-48")
# Qwen3-30B-A3B, as tests/test_moe_model_size.py counts it.
SIZES: dict[str, Any] = {
    "family": "qwen3_moe",
    "num_layers": 48,
    "num_moe_layers": 48,
    "hidden_size": 2048,
    "vocab_size": 151936,
    "num_experts": 128,
    "top_k": 8,
    "expert_width": 768,
    "query_width": 4096,
    "key_value_values": 49152,
    "total_parameters": 30532122624,
    "expert_parameters": 28991029248,
    "embedding_parameters": 311164928,
    "largest_layer_parameters": 19140864,
}

DENSE = SIZES["total_parameters"] - SIZES["expert_parameters"]


def setting(config: RunConfig | None = None, profile: str = "p5en", **sizes: Any) -> Setting:
    config = config or load_config(str(CONFIGS / "qwen3-30b-a3b-p5en.toml"))
    platform = load_profile(profile)
    assert platform.accelerator is not None
    return new_setting(config, SIZES | sizes, platform, platform.accelerator, None)


def with_moe(found: Setting, **fields: Any) -> Setting:
    return replace(found, config=replace(found.config, moe=replace(found.config.moe, **fields)))


def run_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize("name", READY)
def test_a_ready_configuration_fits_its_platform(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_plan(capsys, name, "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    training, rollout = plan["training"], plan["rollout"]
    assert plan["problems"] == []
    assert sum(training["memory_bytes"].values()) < training["gpu_memory_bytes"]
    assert all(phase["seconds"] > 0 and phase["source"] for phase in plan["phases"])
    assert (training["nodes"], rollout["nodes"]) == {"qwen3-30b-a3b-p5en": (2, 4), "super-sparse-48": (16, 32)}.get(
        name, (16, 16)
    )


def test_the_tables_show_memory_exchange_and_phases_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_plan(capsys, "qwen3-30b-a3b-p5en")
    assert code == 0
    for part in ("optimizer", "KV cache", "expert-parallel groups of 16", "bytes off the node", "rollout", "verl"):
        assert part in out


def test_expected_copies_agree_with_a_simulation() -> None:
    found, draw = setting(), random.Random(0)
    for dispatcher, deduplicate, key in (
        ("all_to_all", "none", lambda rank: rank),
        ("all_to_all", "rank", lambda rank: rank),
        ("deepep", "none", lambda rank: rank // 8),
    ):
        copies = crossing(with_moe(found, dispatcher=dispatcher, deduplicate=deduplicate)).off_node
        crossed = 0
        for _ in range(20_000):
            ranks = [expert // 8 for expert in draw.sample(range(128), 8)]
            home = draw.randrange(2)
            away = [key(rank) for rank in ranks if rank // 8 != home]
            crossed += len(away if (dispatcher, deduplicate) == ("all_to_all", "none") else set(away))
        assert copies == pytest.approx(crossed / 20_000, rel=0.02), (dispatcher, deduplicate)


def test_probability_of_a_part_is_exact() -> None:
    chosen = list(itertools.combinations(range(12), 3))
    share = sum(any(expert < 4 for expert in experts) for experts in chosen) / len(chosen)
    assert reached(12, 3, 3) == pytest.approx(share)


def test_training_state_is_sixteen_bytes_a_parameter_over_the_ranks_that_share_it() -> None:
    found = setting()
    state = sum(term.size_bytes for term in trainer_terms(found)[:3])
    assert state == pytest.approx(16 * SIZES["total_parameters"] / 16)
    replicated = replace(found, config=replace(found.config, train=replace(found.config.train, fsdp_size=1)))
    state = sum(term.size_bytes for term in trainer_terms(replicated)[:3])
    assert state == pytest.approx(16 * (DENSE + SIZES["expert_parameters"] / 16))


def test_an_engine_holds_its_share_of_the_weights_and_the_rest_is_cache() -> None:
    found = setting()
    weights, reserve, cache = (term.size_bytes for term in engine_terms(found))
    assert weights == pytest.approx(2 * (DENSE + SIZES["expert_parameters"] / 8))
    assert weights + reserve + cache == pytest.approx(0.9 * found.accelerator.memory_bytes)
    assert cache_bytes_per_token(found) == 2 * 48 * 2 * 4 * 128


def test_deltas_make_publications_smaller() -> None:
    found = setting()
    whole = replace(found, config=replace(found.config, publish=replace(found.config.publish, full_every=1)))
    seconds, smaller = ({phase.name: phase.seconds for phase in phases(case)} for case in (whole, found))
    assert seconds["publish"] == pytest.approx(2 * SIZES["total_parameters"] / 2e9)
    assert smaller["publish"] == pytest.approx(seconds["publish"] * (1 + 7 * 0.05) / 8)


def test_more_network_makes_the_exchange_faster_and_nothing_else() -> None:
    slow, fast = setting(), setting(profile="p6-b300")
    slower = {phase.name.strip(): phase.seconds for phase in phases(slow)}
    faster = {phase.name.strip(): phase.seconds for phase in phases(fast)}
    assert faster["of it exchange, at most"] < slower["of it exchange, at most"]
    assert faster["publish"] == slower["publish"]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.update.recompute=none", "train: "),
        ("train.update.optimizer_steps_per_epoch=128", ""),
        ("rollout.prompts_per_unit=64", "rollout.prompts_per_unit = 64"),
        ("rollout.server.data_parallel_size=16", "a worker's engine stays on one node"),
        ("rollout.server.gpu_memory_fraction=0.05", "leave no cache for one sequence"),
        ("train.ranks=12", "train.ranks = 12: must fill nodes of 8 GPUs"),
    ],
)
def test_a_setting_that_cannot_work_is_named(override: str, named: str) -> None:
    overrides = [override]
    if override == "train.ranks=12":
        overrides += ["moe.expert_parallel_size=4", "train.fsdp_size=4"]
    if override == "train.update.recompute=none":
        overrides += ["train.update.micro_batch_tokens=32768", "moe.max_tokens_per_rank=32768"]
    config = load_config(str(CONFIGS / "qwen3-30b-a3b-p5en.toml"), overrides)
    problems = setting_problems(setting(config))
    assert any(named in problem for problem in problems) if named else not problems


def test_a_plan_that_cannot_work_ends_with_a_configuration_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_plan(capsys, "qwen3-235b-a22b-p5en", "--set", "train.ranks=64", "--set", "train.fsdp_size=64")
    assert code == 78
    assert "GiB a GPU, H200 has 141" in err and "Traceback" not in err
    assert "optimizer" in out  # the arithmetic is shown all the same


def test_a_platform_without_gpus_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_plan(capsys, "reverse-digits")
    assert code == 78 and "no GPUs to plan for" in err


def test_a_model_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_plan(capsys, "qwen3-30b-a3b-p5en", "--set", "warmup.start=/nowhere/Some-Model")
    assert code == 78 and "no config.json there" in err and "Traceback" not in err


def test_a_model_from_scratch_is_planned_from_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_plan(capsys, "reverse-digits", "--profile", "g6e", "--json")
    assert code == 0
    assert 5e5 < json.loads(out)["model"]["parameters"] < 1e6


def test_every_dispatcher_can_be_planned() -> None:
    for dispatcher in ("local", "all_to_all", "deepep", "uccl_ep", "nccl_ep"):
        size = 1 if dispatcher == "local" else 16
        found = with_moe(setting(), dispatcher=dispatcher, expert_parallel_size=size)
        assert all(phase.seconds >= 0 for phase in phases(found))
        assert not setting_problems(found)
