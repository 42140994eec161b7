from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.batch import BatchCutter, TrainingBatch, mini_batches

PAD = 0


def make_batch(prompt_lens: list[int], response_lens: list[int], groups: list[int]) -> TrainingBatch:
    """Group g's prompt is filled with 10 + g, response r with 100 + r."""
    return TrainingBatch.from_rows(
        prompts=[[10 + group] * prompt_lens[group] for group in groups],
        responses=[[100 + row] * length for row, length in enumerate(response_lens)],
        logprobs=[[-float(row)] * length for row, length in enumerate(response_lens)],
        versions=[[row] * length for row, length in enumerate(response_lens)],
        rewards=[None if row == 1 else float(row) for row in range(len(groups))],
        groups=groups,
    )


def test_rows_become_flat_fields() -> None:
    batch = make_batch([2, 1], [1, 2, 1], [0, 0, 1])
    assert batch.prompt_ids.tolist() == [10, 10, 10, 10, 11]
    assert batch.response_ids.tolist() == [100, 101, 101, 102]
    assert batch.rewards_N.tolist() == [0.0, 0.0, 2.0]
    assert batch.reward_ok_N.tolist() == [True, False, True]
    assert (len(batch), batch.num_groups) == (3, 2)


def test_bytes_round_trip_and_are_deterministic() -> None:
    batch = make_batch([2, 1], [1, 2, 1], [0, 0, 1])
    loaded = TrainingBatch.from_bytes(batch.to_bytes())
    assert loaded.to_bytes() == batch.to_bytes()
    for name, tensor in batch.to_tensors().items():
        assert torch.equal(tensor, getattr(loaded, name)), name


def test_bytes_that_are_no_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="not a safetensors file"):
        TrainingBatch.from_bytes(b"nonsense")
    tensors = make_batch([1], [1, 1], [0, 0]).to_tensors()
    del tensors["versions"]
    with pytest.raises(ValueError, match="versions"):
        TrainingBatch.from_tensors(tensors)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", torch.zeros(3)),
        ("logprobs", torch.zeros(2, dtype=torch.float64)),
        ("logprobs", torch.tensor([0.0, torch.nan])),
        ("rewards_N", torch.zeros(1)),
        ("group_N", torch.tensor([0, 2], dtype=torch.int32)),
        ("response_lens_N", torch.tensor([0, 2], dtype=torch.int32)),
    ],
)
def test_a_malformed_field_is_named(field: str, value: torch.Tensor) -> None:
    batch = make_batch([1], [1, 1], [0, 0])
    with pytest.raises(ValueError, match=f"batch {field}"):
        replace(batch, **{field: value})


def test_prompts_are_padded_left_once_and_responses_right() -> None:
    batch = make_batch([3, 1], [2, 1, 2], [0, 1, 0])
    (micro,) = BatchCutter(batch, PAD).micro_batches(range(3), 1000)
    assert micro.rows_B.tolist() == [1, 0, 2]
    assert micro.prompt_ids_UP.tolist() == [[0, 0, 11], [10, 10, 10]]
    assert micro.prompt_mask_UP.tolist() == [[False, False, True], [True, True, True]]
    assert micro.prompt_of_row_B.tolist() == [0, 1, 1]
    assert micro.response_ids_BR.tolist() == [[101, 0], [100, 100], [102, 102]]
    assert micro.response_mask_BR.tolist() == [[True, False], [True, True], [True, True]]
    assert batch.response_ids[micro.flat_BR][micro.response_mask_BR].tolist() == [101, 100, 100, 102, 102]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), min_size=1, max_size=20),
    st.integers(1, 60),
)
def test_micro_batches_hold_each_row_once_within_the_budget(
    prompt_lens: list[int], rows: list[tuple[int, int]], budget: int
) -> None:
    dense = {group: index for index, group in enumerate(dict.fromkeys(group for group, _ in rows))}
    groups = [dense[group] for group, _ in rows]
    batch = make_batch((prompt_lens * 4)[: len(dense)], [length for _, length in rows], groups)
    micros = list(BatchCutter(batch, PAD).micro_batches(range(len(rows)), budget))
    assert sorted(row for micro in micros for row in micro.rows_B.tolist()) == list(range(len(rows)))
    for micro in micros:
        assert micro.prompt_ids_UP.numel() + micro.response_ids_BR.numel() <= budget or len(micro.rows_B) == 1
        for index, row in enumerate(micro.rows_B.tolist()):
            own = micro.response_ids_BR[index][micro.response_mask_BR[index]].tolist()
            assert own == [100 + row] * rows[row][1]
            prompt = micro.prompt_of_row_B[index]
            prompt_ids = micro.prompt_ids_UP[prompt][micro.prompt_mask_UP[prompt]].tolist()
            assert prompt_ids == [10 + groups[row]] * (prompt_lens * 4)[groups[row]]


def test_the_cut_does_not_depend_on_the_order_of_rows() -> None:
    batch = make_batch([3, 1], [2, 1, 2, 4, 1], [0, 1, 0, 1, 1])
    cutter = BatchCutter(batch, PAD)
    forwards = [micro.rows_B.tolist() for micro in cutter.micro_batches([0, 1, 2, 3, 4], 12)]
    backwards = [micro.rows_B.tolist() for micro in cutter.micro_batches([4, 3, 2, 1, 0], 12)]
    assert forwards == backwards
    assert len(forwards) > 1


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**63), st.integers(0, 3))
def test_mini_batches_partition_whole_groups(num_groups: int, size: int, count: int, seed: int, epoch: int) -> None:
    group_N = torch.arange(num_groups, dtype=torch.int32).repeat(size)
    parts = mini_batches(group_N, count, seed, epoch)
    assert parts == mini_batches(group_N, count, seed, epoch)
    assert len(parts) == min(count, num_groups)
    assert sorted(row for part in parts for row in part) == list(range(num_groups * size))
    sets = [{int(group_N[row]) for row in part} for part in parts]
    assert sum(map(len, sets)) == num_groups
    assert max(map(len, sets)) - min(map(len, sets)) <= 1


def test_mini_batches_differ_by_seed_and_epoch() -> None:
    group_N = torch.arange(64, dtype=torch.int32)
    drawn = [mini_batches(group_N, 2, seed, epoch)[0] for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(part) for part in drawn}) == 4


def routed(rows: list[int | None], layers: int = 2) -> TrainingBatch:
    """Two tokens a row, a prompt's and a response's; row r's ids are all `rows[r]`, None: it has none."""
    return TrainingBatch.from_rows(
        prompts=[[5]] * len(rows),
        responses=[[6]] * len(rows),
        logprobs=[[0.0]] * len(rows),
        versions=[[0]] * len(rows),
        rewards=[0.0] * len(rows),
        groups=[0] * len(rows),
        routings=[None if row is None else torch.full((2, layers, 3), row, dtype=torch.int16) for row in rows],
    )


def test_routing_travels_with_the_batch_and_a_row_without_is_missing() -> None:
    batch = TrainingBatch.from_bytes(routed([4, None]).to_bytes())
    assert batch.prompt_routing_PLK is not None and batch.response_routing_RLK is not None
    assert batch.prompt_routing_PLK[:, 0, 0].tolist() == [4, -1]
    assert batch.response_routing_RLK.dtype == torch.int16
    assert batch.response_routing_RLK.shape == (2, 2, 3)


def test_a_batch_without_routing_has_no_tensor_of_it() -> None:
    tensors = routed([None, None]).to_tensors()
    assert not [name for name in tensors if "routing" in name]
    assert TrainingBatch.from_tensors(tensors).prompt_routing_PLK is None


def test_a_malformed_routing_is_named() -> None:
    tensors = routed([1, 2]).to_tensors()
    for broken in (tensors["prompt_routing_PLK"][:1], tensors["prompt_routing_PLK"].int()):
        with pytest.raises(ValueError, match="batch prompt_routing_PLK: expected an int16"):
            TrainingBatch.from_tensors(tensors | {"prompt_routing_PLK": broken})
    with pytest.raises(ValueError, match="give both"):
        TrainingBatch.from_tensors({name: t for name, t in tensors.items() if name != "response_routing_RLK"})
    with pytest.raises(ValueError, match="give both"):
        TrainingBatch.from_tensors(tensors | {"prompt_routing_PLK": tensors["prompt_routing_PLK"][:, :1]})


def test_rows_of_different_models_are_refused() -> None:
    ids = [torch.zeros(2, layers, 3, dtype=torch.int16) for layers in (2, 1)]
    with pytest.raises(ValueError, match="batch row 1: routing of shape"):
        TrainingBatch.from_rows(
            prompts=[[5]] * 2,
            responses=[[6]] * 2,
            logprobs=[[0.0]] * 2,
            versions=[[0]] * 2,
            rewards=[0.0] * 2,
            groups=[0] * 2,
            routings=ids,
        )


def test_a_mask_says_which_tokens_the_policy_sampled() -> None:
    batch = make_batch([2, 1], [3, 2, 4], [0, 0, 1])
    masked = TrainingBatch.from_rows(
        prompts=[[10, 10], [10, 10], [11]],
        responses=[[100] * 3, [101] * 2, [102] * 4],
        logprobs=[[0.0] * 3, [0.0] * 2, [0.0] * 4],
        versions=[[0] * 3, [0] * 2, [0] * 4],
        rewards=[1.0, 2.0, 3.0],
        groups=[0, 0, 1],
        masks=[[True, False, True], None, [False, False, False, True]],
    )
    assert masked.sampled is not None
    assert masked.sampled_lens_N.tolist() == [2, 2, 1]
    assert batch.sampled is None and batch.sampled_lens_N is batch.response_lens_N
    loaded = TrainingBatch.from_bytes(masked.to_bytes())
    assert loaded.sampled is not None and torch.equal(loaded.sampled, masked.sampled)
    (micro,) = BatchCutter(masked, PAD).micro_batches(range(3), 1000)
    by_row = dict(zip(micro.rows_B.tolist(), micro.sampled_BR.tolist(), strict=True))
    assert by_row == {0: [True, False, True, False], 1: [True, True, False, False], 2: [False, False, False, True]}
    assert micro.response_mask_BR.sum() == 9


@pytest.mark.parametrize("mask", [[True], [1, 0], [True, False, False]])
def test_a_mask_that_does_not_fit_is_refused(mask: list[bool]) -> None:
    with pytest.raises(ValueError, match="batch sampled: "):
        replace(make_batch([1], [1, 1], [0, 0]), sampled=torch.tensor(mask))


def test_a_response_without_a_token_of_the_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="no token of the policy"):
        replace(make_batch([1], [1, 2], [0, 0]), sampled=torch.tensor([True, False, False]))


def test_a_batch_of_single_turns_has_the_tensors_that_it_always_had() -> None:
    assert "sampled" not in make_batch([1], [1, 2], [0, 0]).to_tensors()
