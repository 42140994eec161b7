import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.config import MoeConfig
from moe.dispatch import exchange
from moe.dispatch.base import ExpertGroup, ExpertShape, TokenDispatcher
from moe.dispatch.catalog import build_dispatcher
from moe.dispatch.exchange import Staging, sum_rows
from moe.dispatch.monitor import LayerExchange
from tests.dense_reference import KINDS, check_dispatcher, expert_group, random_case
from tests.ranks import run_ranks

torch.set_num_threads(1)
EXPERTS, TOP_K, HIDDEN = 12, 3, 8
RANKS_PER_NODE = {1: 1, 2: 1, 3: 1, 4: 2}
DEDUPLICATE = ("none", "rank", "node")
CaseArguments = tuple[int, int, str, str]  # seed, tokens, kind, deduplicate


def _build(group: ExpertGroup, **fields: Any) -> TokenDispatcher:
    return build_dispatcher(MoeConfig(dispatcher="all_to_all", **fields), group)


def _check_all(rank: int, world_size: int, cases: list[CaseArguments], layers: int) -> None:
    for seed, tokens, kind, deduplicate in cases:
        case = random_case(seed, tokens, EXPERTS, TOP_K, HIDDEN, kind)  # type: ignore[arg-type]
        check_dispatcher(
            lambda group, d=deduplicate: _build(group, deduplicate=d),  # type: ignore[misc]
            rank,
            world_size,
            case,
            ranks_per_node=RANKS_PER_NODE[world_size],
            layers=layers,
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_outputs_and_all_gradients_equal_the_dense_reference(world_size: int) -> None:
    cases = [(seed, 29, kind, deduplicate) for deduplicate in DEDUPLICATE for seed, kind in enumerate(KINDS)]
    run_ranks(world_size, _check_all, cases, 1)


CASES = st.tuples(st.integers(0, 2**31), st.integers(0, 40), st.sampled_from(KINDS), st.sampled_from(DEDUPLICATE))


@settings(deadline=None, max_examples=5, suppress_health_check=list(HealthCheck))
@given(world_size=st.integers(1, 4), cases=st.lists(CASES, min_size=6, max_size=6), layers=st.integers(1, 3))
def test_any_case_equals_the_dense_reference(world_size: int, cases: list[CaseArguments], layers: int) -> None:
    run_ranks(world_size, _check_all, cases, layers)


def _check_dtypes(rank: int, world_size: int, checks: list[tuple[torch.dtype, float, dict[str, Any]]]) -> None:
    for dtype, tolerance, fields in checks:
        for kind in KINDS:
            case = random_case(3, 40, EXPERTS, TOP_K, HIDDEN, kind)
            for weights_dtype in (dtype, torch.float32):
                check_dispatcher(
                    lambda group, f=fields: _build(group, **f),  # type: ignore[misc]
                    rank,
                    world_size,
                    case,
                    dtype,
                    tolerance,
                    weights_dtype=weights_dtype,
                    ranks_per_node=1,
                )


def test_float32_is_within_2e_6_and_bfloat16_within_3e_2_of_the_largest_value() -> None:
    checks: list[tuple[torch.dtype, float, dict[str, Any]]] = []
    for deduplicate in DEDUPLICATE:
        checks.append((torch.float32, 2e-6, {"deduplicate": deduplicate}))
        checks.append((torch.bfloat16, 3e-2, {"deduplicate": deduplicate}))
        checks.append((torch.float32, 3e-2, {"deduplicate": deduplicate, "exchange_dtype": "bfloat16"}))
    run_ranks(2, _check_dtypes, checks)


def _one_pass(
    rank: int,
    world_size: int,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    per_node: int,
    fields: dict[str, Any],
) -> tuple[Tensor, dict[int, LayerExchange]]:
    """Output and record of a forward pass of random routes."""
    group = expert_group(rank, world_size, per_node)
    dispatcher = _build(group, **fields)
    generator = torch.Generator().manual_seed(rank)
    hidden_TH = torch.randn(tokens, hidden, generator=generator)
    ids_TK = torch.rand(tokens, experts, generator=generator).topk(top_k, -1).indices
    group.monitor.layer = 5
    dispatched = dispatcher.dispatch(hidden_TH, ids_TK, torch.rand(tokens, top_k, generator=generator), experts)
    output = dispatcher.combine(dispatched.rows_SH, dispatched)
    dispatcher.close()
    return output, group.monitor.take()


def _copies(passes: list[tuple[Tensor, dict[int, LayerExchange]]], field: str, hidden: int, tokens: int) -> float:
    """Rows that were sent for each token in one direction; hidden is large, so that metadata does not count."""
    sent_bytes = sum(getattr(record[5], field) for _, record in passes)
    return sent_bytes / (2 * hidden * 4) / (tokens * len(passes))


def _visits(groups: int, experts: int, top_k: int) -> float:
    """Probability that a token of `top_k` distinct uniform experts goes to one given group of experts/groups."""
    return 1 - math.comb(experts - experts // groups, top_k) / math.comb(experts, top_k)


@pytest.mark.parametrize("deduplicate", DEDUPLICATE)
def test_sent_rows_are_those_of_the_closed_form_within_2_percent(deduplicate: str) -> None:
    """4 ranks on 2 nodes, 32 experts, top-8; the closed forms count distinct ranks and nodes of uniform choices."""
    tokens, experts, top_k, hidden, ranks, nodes = 800, 32, 8, 512, 4, 2
    passes = run_ranks(ranks, _one_pass, tokens, experts, top_k, hidden, 2, {"deduplicate": deduplicate})
    on_a_rank, on_a_node = _visits(ranks, experts, top_k), _visits(nodes, experts, top_k)
    off_node = {"none": top_k / 2, "rank": 2 * on_a_rank, "node": on_a_node}[deduplicate]
    inside = {
        "none": top_k / 4,
        "rank": on_a_rank,
        # The gateway's own tokens and those of its peer each go on to the other rank of the node.
        "node": 2 * on_a_rank,
    }[deduplicate]
    assert _copies(passes, "sent_off_node_bytes", hidden, tokens) == pytest.approx(off_node, rel=0.02)
    assert _copies(passes, "sent_bytes", hidden, tokens) == pytest.approx(off_node + inside, rel=0.02)


def test_sent_bytes_are_exact() -> None:
    """Rows there and back, 8 bytes of counts twice over for each peer, and per route 4 bytes and its float32 weight."""
    tokens, experts, top_k, hidden = 50, 4, 2, 16
    passes = run_ranks(2, _one_pass, tokens, experts, top_k, hidden, 1, {})
    for rank, (_, layers) in enumerate(passes):
        routes = [0, 0]
        for source in range(2):
            generator = torch.Generator().manual_seed(source)
            torch.randn(tokens, hidden, generator=generator)
            ids = torch.rand(tokens, experts, generator=generator).topk(top_k, -1).indices
            routes[source] = int((ids // 2 != source).sum())
        record = layers[5]
        assert record.sent_bytes == sum(routes) * hidden * 4 + 2 * 8 + routes[rank] * 8
        assert record.sent_off_node_bytes == record.sent_bytes
        assert record.received_rows == tokens * top_k - routes[rank] + routes[1 - rank]
        assert record.seconds > 0


def test_a_bfloat16_wire_halves_the_bytes_of_rows() -> None:
    sent = [
        sum(layers[5].sent_bytes for _, layers in run_ranks(2, _one_pass, 64, 8, 2, 1024, 1, {"exchange_dtype": dtype}))
        for dtype in ("model", "bfloat16")
    ]
    assert sent[1] / sent[0] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("deduplicate", DEDUPLICATE)
def test_results_are_bit_identical_when_repeated(deduplicate: str) -> None:
    first, again = (run_ranks(4, _one_pass, 60, 8, 3, 16, 2, {"deduplicate": deduplicate}) for _ in range(2))
    for (output, _), (repeated, _) in zip(first, again, strict=True):
        assert torch.equal(output, repeated)


def test_one_process_needs_no_process_group() -> None:
    check_dispatcher(_build, 0, 1, random_case(0, 9, EXPERTS, TOP_K, HIDDEN, "masked"))


def _report(rank: int, world_size: int) -> dict[str, Any]:
    dispatcher = _build(expert_group(rank, world_size, 1), deduplicate="node")
    report = dispatcher.transport_report()
    dispatcher.close()
    return {"requested": report.requested, "observed": report.observed, **report.details}


def test_the_report_names_the_process_groups_backend() -> None:
    report = run_ranks(2, _report)[0]
    assert report == {
        "requested": "all_to_all",
        "observed": "all_to_all",
        "process_group_backend": "gloo",
        "ranks": 2,
        "nodes": 2,
        "deduplicate": "node",
    }


def test_experts_that_do_not_spread_evenly_are_refused() -> None:
    shape = ExpertShape(num_experts=10, top_k=2, hidden_size=8, dtype=torch.float32, ep_size=4)
    with pytest.raises(ValueError, match="10 experts do not spread evenly over 4 expert-parallel ranks"):
        _build(expert_group(0, 1)).validate(shape)


def test_nodes_that_the_group_does_not_fill_are_refused() -> None:
    group = expert_group(0, 1)
    group = ExpertGroup(rank=0, size=3, ranks_per_node=2, monitor=group.monitor)
    with pytest.raises(ValueError, match="3 expert-parallel ranks do not fill nodes of 2"):
        _build(group, deduplicate="node")


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 6), st.integers(0, 9), st.integers(0, 5), st.integers(1, 6), st.booleans(), st.integers(0, 2**31))
def test_sum_rows_equals_a_loop(rows: int, added: int, sums: int, at_once: int, add: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows_SH = torch.randn(rows, 3, dtype=torch.float64, generator=generator)
    added = added if rows and sums else 0
    index = torch.randint(max(rows, 1), (added,), generator=generator)
    owner = torch.randint(max(sums, 1), (added,), generator=generator).sort().values
    weights = torch.rand(added, dtype=torch.float64, generator=generator)
    total = torch.randn(sums, 3, dtype=torch.float64, generator=generator)
    want = total.clone() if add else torch.zeros_like(total)
    for position in range(added):
        want[owner[position]] += weights[position] * rows_SH[index[position]]
    ends = torch.searchsorted(owner, torch.arange(sums + 1))
    with patch.object(exchange, "_CACHED_BYTES", at_once * rows_SH.element_size() * 3):
        assert sum_rows(total, rows_SH, index, ends, weights, add=add) is total
    torch.testing.assert_close(total, want, rtol=0, atol=1e-12)


def test_memory_of_results_is_reused_only_when_no_tensor_is_left_on_it() -> None:
    staging, like = Staging(), torch.empty(0, 4)
    first = staging.result("rows", 3, like)
    place, row = first.data_ptr(), first[1].detach()
    del first
    while_in_use = staging.result("rows", 3, like)
    assert while_in_use.data_ptr() != place  # `row` is still on it
    del row
    again = staging.result("rows", 2, like)
    assert (again.data_ptr(), again.shape, again.dtype) == (place, (2, 4), torch.float32)
    del again
    larger = staging.result("rows", 1000, like)
    assert larger.shape == (1000, 4)
    assert staging.result("rows", 3, like.bfloat16()).dtype == torch.bfloat16
    place = larger.data_ptr()
    del larger
    assert staging.result("tokens", 3, like).data_ptr() != place  # not the memory of a larger kind of result


def _check_in_pairs(rank: int, world_size: int, deduplicate: str) -> None:
    """Two expert-parallel groups of two nodes each, of one rank, in a world of four; built twice."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    exchange._CACHED_BYTES = 3 * HIDDEN * 8  # some rows at once, as with large ones
    for seed in range(2):
        check_dispatcher(
            lambda group: _build(replace(group, process_group=pairs[rank // 2]), deduplicate=deduplicate),
            rank % 2,
            2,
            random_case(seed + rank // 2, 20, EXPERTS, TOP_K, HIDDEN, "uniform"),
            ranks_per_node=1,
        )


@pytest.mark.parametrize("deduplicate", DEDUPLICATE)
def test_replicas_of_the_experts_exchange_among_themselves(deduplicate: str) -> None:
    run_ranks(4, _check_in_pairs, deduplicate)
