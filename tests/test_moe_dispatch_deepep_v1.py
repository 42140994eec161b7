from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.config import MoeConfig
from moe.dispatch.base import ExpertGroup, ExpertShape
from moe.dispatch.buffer_limits import DEEPEP_LEGACY, DEEPEP_V1, BufferLimits, buffer_limits
from moe.dispatch.deepep_low_latency import DeepEpLowLatencyDispatcher
from moe.dispatch.deepep_v1 import DeepEpV1Dispatcher
from moe.dispatch.monitor import ExchangeFailed, ExchangeMonitor
from tests.buffer_checks import (
    HIDDEN,
    LOW_LATENCY_HIDDEN,
    NODE_HIDDEN,
    Flavour,
    check_cases,
    check_low_latency,
    check_nodes,
    check_whole_numbers,
    messages,
    signature,
)
from tests.dense_reference import KINDS, expert_group, random_case
from tests.doubles import deep_ep_v1
from tests.ranks import run_ranks

torch.set_num_threads(1)
V1 = Flavour(deep_ep_v1, DEEPEP_V1)
ALONE = ExpertGroup(monitor=ExchangeMonitor())


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_and_gradients_equal_the_dense_reference(world_size: int, dtype: torch.dtype) -> None:
    cases = [random_case(seed, 24, 8, 3, HIDDEN, kind) for seed, kind in enumerate(KINDS)]
    run_ranks(world_size, check_cases, V1, cases, dtype, 2)


@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**31),
            st.integers(0, 30),
            st.sampled_from([4, 8, 16]),
            st.integers(1, 4),
            st.sampled_from(KINDS),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([2, 4]),
)
def test_any_routes_equal_the_dense_reference(draws: list[tuple[int, int, int, int, Any]], world_size: int) -> None:
    cases = [random_case(seed, tokens, experts, top_k, 16, kind) for seed, tokens, experts, top_k, kind in draws]
    run_ranks(world_size, check_cases, V1, cases, torch.float32, 1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_whole_numbers_arrive_exactly(world_size: int) -> None:
    run_ranks(world_size, check_whole_numbers, V1)


def test_two_nodes_equal_the_dense_reference_and_a_token_crosses_once_to_a_node() -> None:
    kinds = tuple(kind for kind in KINDS if kind != "one_hot")
    counted = run_ranks(4, check_nodes, V1, kinds)
    for position, kind in enumerate(kinds):
        case = random_case(3, 20, 8, 3, NODE_HIDDEN, kind)
        for rank in range(4):
            routes = case.ids_TK[case.rows_of(rank, 4)]
            off_rank, off_node = _copies(routes, rank, 2), _copies(routes, rank, 4)
            sent, sent_off_node = counted[rank][position]
            assert (sent == 0, sent_off_node == 0) == (off_rank == 0, off_node == 0)
            assert sent * off_node == sent_off_node * off_rank


def _copies(ids_TK: Tensor, rank: int, experts_per_place: int) -> int:
    """Pairs of a token and another place that it goes to; two experts a rank, four a node."""
    own = rank * 2 // experts_per_place
    return sum(len({e // experts_per_place for e in ids if e >= 0} - {own}) for ids in ids_TK.tolist())


def test_low_latency_equals_the_dense_reference() -> None:
    run_ranks(2, check_low_latency, V1, ("uniform", "empty_rank", "masked", "zero_tokens"))


def _low_latency_refusals(rank: int, world_size: int) -> dict[str, str]:
    dispatcher = V1.build_low_latency(expert_group(rank, world_size))
    hidden_TH, ids_TK = torch.ones(17, LOW_LATENCY_HIDDEN), torch.zeros(17, 1, dtype=torch.int64)
    weights_TK = torch.ones(17, 1)
    few = hidden_TH[:3], ids_TK[:3], weights_TK[:3]
    dispatched = dispatcher.dispatch(*few, 8)
    outcome = messages(
        {
            "gradient": lambda: dispatcher.dispatch(few[0].clone().requires_grad_(), *few[1:], 8),
            "gradient of weights": lambda: dispatcher.dispatch(*few[:2], few[2].clone().requires_grad_(), 8),
            "gradient of rows": lambda: dispatcher.combine(dispatched.rows_SH.clone().requires_grad_(), dispatched),
            "tokens": lambda: dispatcher.dispatch(hidden_TH, ids_TK, weights_TK, 8),
        }
    )
    dispatcher.close()
    return outcome


def test_low_latency_refuses_gradients_and_too_many_tokens() -> None:
    outcome = run_ranks(2, _low_latency_refusals)[0]
    for name in ("gradient", "gradient of weights", "gradient of rows"):
        assert "set it to false for training" in outcome[name]
    assert "17 tokens of one rank are over moe.max_tokens_per_rank = 16" in outcome["tokens"]


def _report(rank: int, world_size: int) -> list[Any]:
    normal, few = (build(expert_group(rank, world_size)) for build in (V1.build, V1.build_low_latency))
    reports: list[Any] = [normal.transport_report()]
    inputs = torch.ones(2, LOW_LATENCY_HIDDEN), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    for dispatcher in (normal, few):
        dispatcher.combine(dispatcher.dispatch(*inputs, 4).rows_SH, dispatcher.dispatch(*inputs, 4))
        reports.append(dispatcher.transport_report())
        dispatcher.close()
        dispatcher.close()
    return reports


def test_report_names_the_library_and_its_buffers() -> None:
    before, normal, few = run_ranks(2, _report)[0]
    assert {(report.requested, report.observed) for report in (before, normal, few)} == {("deepep", "deepep")}
    assert normal.details["flavour"] == "DeepEP v1 (Buffer), normal"
    assert few.details["flavour"] == "DeepEP v1 (Buffer), low latency"
    assert str(normal.details["library_file"]).endswith("deep_ep_v1.py")
    assert "nvlink_buffer_bytes" not in before.details
    assert normal.details["nvlink_buffer_bytes"] > 0 and normal.details["rdma_buffer_bytes"] == 0
    assert few.details["rdma_buffer_bytes"] > 0


def _unrounded(rank: int, world_size: int) -> dict[str, str]:
    group = expert_group(rank, world_size)
    dispatcher = DeepEpV1Dispatcher(
        deep_ep_v1, MoeConfig(dispatcher="deepep"), group, requested="deepep", limits=DEEPEP_V1
    )
    inputs = torch.ones(2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    return messages({"float32": lambda: dispatcher.dispatch(*inputs, 4)})


def test_tokens_are_not_rounded_unless_asked_for() -> None:
    assert "set moe.exchange_dtype" in run_ranks(2, _unrounded)[0]["float32"]


def _lost_rank(rank: int, world_size: int) -> list[str]:
    """The library's own timeouts are RuntimeErrors; the monitor explains them, with their place."""
    group = expert_group(rank, world_size)
    group.monitor.explain = lambda error, place: ExchangeFailed(f"{place}: {error}")
    dispatcher = V1.build(group)
    hidden_TH = torch.ones(2, HIDDEN).requires_grad_()
    dispatched = dispatcher.dispatch(hidden_TH, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 4)
    output = dispatcher.combine(dispatched.rows_SH, dispatched)

    def time_out(*_: Any) -> None:
        raise RuntimeError("DeepEP error: CPU recv timeout")

    dispatcher._buffer.wire.agree = time_out
    places = []
    for attempt in (
        lambda: dispatcher.dispatch(hidden_TH, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 4),
        lambda: dispatcher.combine(dispatched.rows_SH, dispatched),
        lambda: output.sum().backward(),
    ):
        with pytest.raises(ExchangeFailed) as failure:
            attempt()
        places.append(str(failure.value))
    return places


def test_a_timeout_of_the_library_is_explained_with_its_place() -> None:
    phases = ("dispatch", "combine", "combine backward")
    expected = [f"optimizer step 1, layer 0, {phase}: DeepEP error: CPU recv timeout" for phase in phases]
    assert run_ranks(2, _lost_rank) == [expected, expected]


def test_a_lone_process_is_refused() -> None:
    for build in (V1.build, V1.build_low_latency):
        with pytest.raises(ValueError, match="deepep needs torch.distributed"):
            build(ALONE)


def test_a_library_from_before_explicit_destruction_is_refused() -> None:
    class Old:
        class Buffer:
            def __init__(self, group: object, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None: ...

    for kind in (DeepEpV1Dispatcher, DeepEpLowLatencyDispatcher):
        with pytest.raises(ValueError, match="is older than 1.2: install DeepEP 1.2.1"):
            group = replace(ALONE, process_group=object())  # type: ignore[arg-type]
            kind(Old, MoeConfig(), group, requested="deepep", limits=DEEPEP_V1)


SHAPE = ExpertShape(num_experts=128, top_k=8, hidden_size=4096, dtype=torch.bfloat16, ep_size=8, ranks_per_node=8)
NODES = replace(SHAPE, ep_size=16)


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (
            replace(SHAPE, dtype=torch.float32),
            {"exchange_dtype": "model"},
            "carries bfloat16 only, the hidden states are",
        ),
        (replace(SHAPE, top_k=200), {}, "num_experts_per_token 200 exceeds num_experts 128"),
        (replace(SHAPE, num_experts=100), {}, "num_experts 100 is no multiple of the 8 ranks"),
        (replace(SHAPE, ep_size=1), {}, "1 ranks, it has kernels for 2, 4, 8, 16"),
        (replace(SHAPE, ep_size=6, num_experts=96), {}, "6 ranks, it has kernels for 2, 4, 8, 16"),
        (replace(SHAPE, ep_size=24, num_experts=96), {}, "24 ranks, it has kernels for"),
        (replace(SHAPE, ranks_per_node=4), {}, "8 ranks of a group on nodes of 4"),
        (replace(NODES, ranks_per_node=4), {}, "4 ranks of a group on a node, a group of several nodes needs 8"),
        (replace(SHAPE, top_k=33), {}, "num_experts_per_token = 33 exceeds 32"),
        (replace(SHAPE, num_experts=2048), {}, "256 experts on a rank exceed 128"),
        (replace(SHAPE, hidden_size=4104), {}, "hidden_size = 4104 is no multiple of 16"),
        (replace(SHAPE, hidden_size=8192), {}, "hidden_size = 8192 exceeds 8176"),
        (replace(NODES, hidden_size=2880), {}, "hidden_size = 2880 is no multiple of 256"),
        (replace(NODES, hidden_size=8192), {}, "makes rows of 16472 bytes between nodes, more than 16384"),
        (replace(NODES, num_experts=1040), {}, "520 experts on a node exceed 512"),
        (NODES, {"num_sms": 66}, "moe.num_sms = 66: between nodes set 4 to 64"),
        (NODES, {"num_sms": 2}, "moe.num_sms = 2: between nodes set 4 to 64"),
    ],
)
def test_each_limit_of_training_is_named(shape: ExpertShape, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        _unbuilt(DeepEpV1Dispatcher, DEEPEP_V1, **changes).validate(shape)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (replace(SHAPE, ep_size=12, num_experts=96), {}, "12 ranks, it needs fewer than 8 or a multiple"),
        (replace(SHAPE, hidden_size=3072), {}, "hidden_size = 3072, low-latency kernels know 2048, 2560, 4096"),
        (replace(SHAPE, top_k=12), {}, "num_experts_per_token = 12 exceeds 11"),
        (replace(SHAPE, num_experts=1856), {}, "num_experts = 1856 exceeds 1848"),
        (SHAPE, {"max_tokens_per_rank": 512}, "moe.max_tokens_per_rank = 512 exceeds 511"),
        (replace(SHAPE, tokens_per_rank=257), {}, "257 tokens a rank exceed moe.max_tokens_per_rank = 256"),
        (replace(SHAPE, ep_size=2), {"max_tokens_per_rank": 257}, "257 times 2 ranks is no multiple of 4"),
        (replace(SHAPE, num_experts=100), {}, "num_experts 100 is no multiple of the 8 ranks"),
    ],
)
def test_each_limit_of_low_latency_is_named(shape: ExpertShape, changes: dict[str, Any], message: str) -> None:
    dispatcher = _unbuilt(DeepEpLowLatencyDispatcher, DEEPEP_V1, **({"max_tokens_per_rank": 256} | changes))
    with pytest.raises(ValueError) as refusal:
        dispatcher.validate(shape)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_supported_shapes_pass() -> None:
    for shape in (SHAPE, NODES, replace(SHAPE, ep_size=4), replace(NODES, hidden_size=7168, num_experts=256)):
        _unbuilt(DeepEpV1Dispatcher, DEEPEP_V1).validate(shape)
    _unbuilt(DeepEpV1Dispatcher, DEEPEP_V1).validate(replace(SHAPE, dtype=torch.float32))
    _unbuilt(DeepEpV1Dispatcher, DEEPEP_LEGACY).validate(replace(SHAPE, ep_size=24, num_experts=96))
    _unbuilt(DeepEpLowLatencyDispatcher, DEEPEP_V1, max_tokens_per_rank=256).validate(SHAPE)
    legacy = _unbuilt(DeepEpLowLatencyDispatcher, DEEPEP_LEGACY, max_tokens_per_rank=256)
    legacy.validate(replace(SHAPE, hidden_size=3072))


def _unbuilt(kind: Any, limits: BufferLimits, **changes: Any) -> Any:
    """A dispatcher to ask for its limits: no ranks."""
    moe = MoeConfig(dispatcher="deepep", **({"exchange_dtype": "bfloat16"} | changes))
    group = replace(ALONE, process_group=object())  # type: ignore[arg-type]
    return kind(deep_ep_v1, moe, group, requested="deepep", limits=limits)


def test_limits_follow_the_library() -> None:
    assert buffer_limits(deep_ep_v1) is DEEPEP_V1

    class Legacy:
        Config, ElasticBuffer = deep_ep_v1.Config, object

    assert buffer_limits(Legacy) is DEEPEP_LEGACY


V1_SIGNATURES = {
    "__init__": "group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
    "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, comm=None",
    "destroy": "",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_dispatch_layout": "topk_idx, num_experts, previous_event=None, async_finish=False, "
    "allocate_on_comm_stream=False",
    "dispatch": "x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None, "
    "num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0, "
    "config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False",
    "combine": "x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False, "
    "allocate_on_comm_stream=False",
    "low_latency_dispatch": "x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
    "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, round_scale=False, "
    "use_ue8m0=False, async_finish=False, return_recv_hook=False",
    "low_latency_combine": "x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False, "
    "return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None",
}
"""Read from DeepEP tag v1.2.1, deep_ep/buffer.py."""


@pytest.mark.parametrize("name", V1_SIGNATURES)
def test_the_double_has_the_signatures_of_the_library(name: str) -> None:
    assert signature(getattr(deep_ep_v1.Buffer, name)) == V1_SIGNATURES[name]
