from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from moe.config import MoeConfig, UpdateConfig, layout_problems
from moe.experts import expert_modules
from moe.model import build_model, empty_model, materialize
from moe.parallel import ParallelLayout, parallelize
from moe.placement import EXPERT_SLICE_ATTRIBUTE, ExpertSlice, expert_slices
from moe.update_shares import share_of_rows
from tests.parallel_updates import SIZES, VOCAB
from tests.ranks import run_ranks

EP2 = MoeConfig(dispatcher="all_to_all", expert_parallel_size=2)


@pytest.mark.parametrize(
    ("ranks", "moe", "fsdp_size", "problem"),
    [
        (4, MoeConfig(expert_parallel_size=2), 1, 'moe.dispatcher = "local" holds all experts'),
        (4, MoeConfig(dispatcher="all_to_all", expert_parallel_size=3), 1, "must divide train.ranks = 4"),
        (4, EP2, 3, "train.fsdp_size = 3: must divide train.ranks = 4"),
        (6, EP2, 3, "must be a multiple or a divisor of moe.expert_parallel_size = 2"),
        (8, MoeConfig(dispatcher="all_to_all"), 1, "must divide the model's number of experts, 12"),
    ],
)
def test_sizes_that_do_not_fit_are_named(ranks: int, moe: MoeConfig, fsdp_size: int, problem: str) -> None:
    assert any(problem in line for line in layout_problems(ranks, moe, fsdp_size, 12))


def test_sizes_that_fit_have_no_problem() -> None:
    for ranks, moe, fsdp_size in [(1, MoeConfig(), 1), (4, EP2, 0), (4, EP2, 1), (12, MoeConfig(), 3)]:
        assert list(layout_problems(ranks, moe, fsdp_size, 12)) == []


def groups_of(rank: int, world_size: int, fsdp_size: int) -> dict[str, Any]:
    layout = ParallelLayout.create(world_size, EP2, fsdp_size, 1)

    def members(group: dist.ProcessGroup | None) -> list[int]:
        return [rank] if group is None else dist.get_process_group_ranks(group)

    return {
        "experts": members(layout.expert_group.process_group),
        "expert rank": layout.expert_group.rank,
        "nodes": layout.expert_group.num_nodes,
        "dense shards": members(layout.dense.shard_group),
        "dense replicas": members(layout.dense.replica_group),
        "expert shards": members(layout.experts.shard_group),
        "expert replicas": members(layout.experts.replica_group),
        "replica": (layout.replica(False), layout.replica(True)),
    }


def test_the_groups_are_those_of_the_dense_and_the_sparse_mesh() -> None:
    sharded = run_ranks(4, groups_of, 4)
    assert [rank["experts"] for rank in sharded] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["expert shards"] for rank in sharded] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["expert replicas"] for rank in sharded] == [[0], [1], [2], [3]]
    assert all(rank["dense shards"] == [0, 1, 2, 3] for rank in sharded)
    assert all(rank["replica"] == ((0, 1), (0, 1)) for rank in sharded)
    replicated = run_ranks(4, groups_of, 2)
    assert [rank["dense shards"] for rank in replicated] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["dense replicas"] for rank in replicated] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["expert replicas"] for rank in replicated] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["replica"] for rank in replicated] == [((0, 2), (0, 2))] * 2 + [((1, 2), (1, 2))] * 2
    assert [rank["expert rank"] for rank in replicated] == [0, 1, 0, 1]
    assert all(rank["nodes"] == 2 for rank in replicated)


def refusals(rank: int, world_size: int) -> list[str]:
    messages = []
    for ranks, moe, fsdp_size, ranks_per_node in [
        (3, EP2, 1, 8),
        (2, EP2, 3, 8),
        (2, MoeConfig(dispatcher="all_to_all", expert_parallel_size=4), 1, 8),
    ]:
        with pytest.raises(ValueError, match=r"=") as refused:
            ParallelLayout.create(ranks, moe, fsdp_size, ranks_per_node)
        messages.append(str(refused.value))
    layout = ParallelLayout.create(2, EP2, 1, 8)
    with pytest.raises(ValueError, match="number of experts, 3"):
        odd = SIZES.__class__(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_experts=3)
        parallelize(build_model(odd, VOCAB, 0), EP2, UpdateConfig(), layout)
    return messages


def test_a_layout_that_does_not_fit_its_world_is_refused_in_one_line() -> None:
    for messages in run_ranks(2, refusals):
        assert messages[0] == "train.ranks = 3: 2 processes were started"
        assert messages[1].startswith("train.fsdp_size = 3") and "moe.expert_parallel_size = 4" in messages[2]
        assert not any("\n" in message for message in messages)


def parts_of(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    layout = ParallelLayout.create(world_size, EP2, 2, 8)
    model = empty_model(folder)
    parallelize(model, EP2, UpdateConfig(), layout)
    materialize(model, torch.device("cpu"))
    experts = expert_modules(model)
    assert all(module.num_experts == SIZES.num_experts for module in experts)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    return {
        "slices": {getattr(module, EXPERT_SLICE_ATTRIBUTE) for module in experts},
        "sliced": set(expert_slices(model)),
        "elements": sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters()),
    }


def test_an_empty_model_becomes_a_ranks_part(tmp_path: Path) -> None:
    whole = build_model(SIZES, VOCAB, 0)
    whole.config.save_pretrained(tmp_path)
    ranks = run_ranks(2, parts_of, tmp_path)
    assert [rank["slices"] for rank in ranks] == [{ExpertSlice(0, 6, 12)}, {ExpertSlice(6, 6, 12)}]
    assert all(len(rank["sliced"]) == 2 * SIZES.num_layers for rank in ranks)
    assert sum(rank["elements"] for rank in ranks) == sum(parameter.numel() for parameter in whole.parameters())


@given(
    lens=st.lists(st.integers(1, 50), max_size=40),
    group_size=st.integers(1, 8),
    ranks=st.integers(1, 8),
)
def test_the_shares_are_a_partition_of_about_equal_tokens(lens: list[int], group_size: int, ranks: int) -> None:
    groups = [row // group_size for row in range(len(lens))]
    shares = [share_of_rows(range(len(lens)), groups, lens, rank, ranks) for rank in range(ranks)]
    assert sorted(row for share in shares for row in share) == list(range(len(lens)))
    longest = max(lens, default=0)
    assert all(sum(lens[row] for row in share) <= sum(lens) / ranks + longest for share in shares)
    divided = sum(len({groups[row] for row in share}) for share in shares) - len(set(groups))
    assert divided <= ranks - 1, "a group is divided only where a share ends"
