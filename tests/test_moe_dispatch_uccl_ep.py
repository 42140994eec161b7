import os
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe.config import MoeConfig
from moe.dispatch.base import ExpertGroup, ExpertShape
from moe.dispatch.buffer_limits import UCCL, buffer_limits, is_uccl
from moe.dispatch.deepep_low_latency import DeepEpLowLatencyDispatcher
from moe.dispatch.deepep_v1 import DeepEpV1Dispatcher
from moe.dispatch.monitor import ExchangeMonitor
from moe.dispatch.uccl_ep import build_uccl, check_environment
from tests.buffer_checks import (
    HIDDEN,
    Flavour,
    check_cases,
    check_low_latency,
    check_nodes,
    check_whole_numbers,
    messages,
    signature,
)
from tests.dense_reference import KINDS, random_case
from tests.doubles import deep_ep_v1, uccl_deep_ep
from tests.doubles.deep_ep_v1 import Buffer as DeepEpBuffer
from tests.ranks import run_ranks

torch.set_num_threads(1)
FLAVOUR = Flavour(uccl_deep_ep, UCCL)
GROUP = ExpertGroup(process_group=object(), size=8, ranks_per_node=8, monitor=ExchangeMonitor())  # type: ignore[arg-type]
MOE = MoeConfig(dispatcher="uccl_ep")


@pytest.fixture
def node_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")


def _install(monkeypatch: pytest.MonkeyPatch, wrapper: ModuleType) -> None:
    for name, module in (("uccl", ModuleType("uccl")), ("uccl.ep", ModuleType("uccl.ep")), ("deep_ep", wrapper)):
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("world_size", [2, 4])
def test_outputs_and_gradients_equal_the_dense_reference(world_size: int) -> None:
    cases = [random_case(seed, 24, 8, 3, HIDDEN, kind) for seed, kind in enumerate(KINDS)]
    run_ranks(world_size, check_cases, FLAVOUR, cases, torch.bfloat16, 2)


def test_two_nodes_equal_the_dense_reference() -> None:
    run_ranks(4, check_nodes, FLAVOUR, ("uniform", "skewed", "empty_rank", "masked", "zero_tokens"))


def test_whole_numbers_arrive_exactly() -> None:
    run_ranks(4, check_whole_numbers, FLAVOUR)


def test_low_latency_equals_the_dense_reference() -> None:
    run_ranks(2, check_low_latency, FLAVOUR, ("uniform", "masked", "zero_tokens"))


@pytest.mark.usefixtures("node_of_eight")
def test_the_wrapper_is_built_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, uccl_deep_ep)
    dispatcher = build_uccl(MOE, GROUP)
    assert isinstance(dispatcher, DeepEpV1Dispatcher)
    report = dispatcher.transport_report()
    assert (report.requested, report.observed) == ("uccl_ep", "uccl_ep")
    assert report.details["flavour"] == "UCCL-EP, normal"
    few = build_uccl(replace(MOE, low_latency=True), GROUP)
    assert isinstance(few, DeepEpLowLatencyDispatcher)
    assert few.transport_report().details["flavour"] == "UCCL-EP, low latency"


@pytest.mark.usefixtures("node_of_eight")
def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uccl", None)
    with pytest.raises(ValueError, match=r"pip install .argo-moe-rl\[uccl\]") as refusal:
        build_uccl(MOE, GROUP)
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("node_of_eight")
def test_another_deep_ep_in_its_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, deep_ep_v1)
    with pytest.raises(ValueError, match="found another deep_ep .*deep_ep_v1.py.*install the wrapper"):
        build_uccl(MOE, GROUP)


def test_the_wrapper_is_told_from_deep_ep() -> None:
    assert is_uccl(uccl_deep_ep) and not is_uccl(deep_ep_v1)
    assert buffer_limits(uccl_deep_ep) is UCCL


@pytest.mark.parametrize(
    ("variables", "size", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 8, "reads LOCAL_RANK from the environment"),
        ({}, 8, "reads LOCAL_RANK and LOCAL_WORLD_SIZE from the environment"),
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": "8"}, 8, "LOCAL_RANK = 8 must be below LOCAL_WORLD_SIZE = 8"),
        (
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"},
            12,
            "fewer than LOCAL_WORLD_SIZE = 8 ranks or a multiple, not 12",
        ),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 3, "fewer than LOCAL_WORLD_SIZE = 2 ranks or a multiple, not 3"),
    ],
)
def test_an_environment_that_misplaces_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], size: int, message: str
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        check_environment(replace(GROUP, size=size))


@pytest.mark.usefixtures("node_of_eight")
def test_two_ranks_on_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    check_environment(GROUP)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="refuses two ranks on one GPU: 8 ranks of this node share 4 GPUs"):
        check_environment(GROUP)


SHAPE = ExpertShape(num_experts=64, top_k=8, hidden_size=4096, dtype=torch.bfloat16, ep_size=8, ranks_per_node=8)


@pytest.mark.parametrize(
    ("shape", "low_latency", "message"),
    [
        (
            replace(SHAPE, ep_size=128, num_experts=128),
            False,
            "128 ranks, it has kernels for 2, 4, 8, 16, 24, 32, 64 only",
        ),
        (replace(SHAPE, ep_size=48, num_experts=96), False, "48 ranks, it has kernels for"),
        (replace(SHAPE, ep_size=16, ranks_per_node=4), False, "a group of several nodes needs 8"),
        (
            replace(SHAPE, ep_size=16, hidden_size=10240),
            False,
            "makes rows of 20568 bytes between nodes, more than 20480",
        ),
        (replace(SHAPE, dtype=torch.float32), False, "uccl_ep carries bfloat16 only"),
        (replace(SHAPE, top_k=17), True, "num_experts_per_token = 17 exceeds 16"),
        (replace(SHAPE, hidden_size=3072), True, "hidden_size = 3072, low-latency kernels know"),
        (replace(SHAPE, ep_size=72, num_experts=72), True, "72 ranks exceed 64"),
        (replace(SHAPE, num_experts=1032), True, "num_experts = 1032 exceeds 1024"),
    ],
)
def test_its_own_limits_are_named(shape: ExpertShape, low_latency: bool, message: str) -> None:
    moe = replace(MOE, max_tokens_per_rank=128)
    kind = DeepEpLowLatencyDispatcher if low_latency else DeepEpV1Dispatcher
    dispatcher = kind(uccl_deep_ep, moe, GROUP, requested="uccl_ep", limits=UCCL)
    dispatcher.validate(SHAPE)
    with pytest.raises(ValueError) as refusal:
        dispatcher.validate(shape)
    assert str(refusal.value).startswith("UCCL-EP cannot run this model: ") and message in str(refusal.value)


def test_low_latency_over_128_tokens_is_refused() -> None:
    dispatcher = DeepEpLowLatencyDispatcher(uccl_deep_ep, MOE, GROUP, requested="uccl_ep", limits=UCCL)
    with pytest.raises(ValueError, match="moe.max_tokens_per_rank = 8192 exceeds 128"):
        dispatcher.validate(SHAPE)


def _misuse(rank: int, world_size: int) -> dict[str, str]:
    group, size = dist.group.WORLD, 1 << 22
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="8")
    duplicate = messages({"two ranks on one GPU": lambda: uccl_deep_ep.Buffer(group, size)})
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    spread = messages({"one node for two": lambda: uccl_deep_ep.Buffer(group, size, is_intranode=True)})
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="8")
    buffer, deep_ep_buffer = uccl_deep_ep.Buffer(group, size), DeepEpBuffer(group, size)
    x, ids_TK, weights_TK = torch.ones(4, 32).bfloat16(), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    handles = []
    for other in (buffer, deep_ep_buffer):
        per_rank, per_node, per_expert, in_rank, _ = other.get_dispatch_layout(ids_TK, 2)
        *_, handle, _ = other.dispatch(x, None, per_rank, per_node, in_rank, per_expert, ids_TK, weights_TK)
        handles.append(handle)
    empty: Any = torch.empty(0)
    return (
        duplicate
        | spread
        | {"handle": str([type(entry).__name__ for entry in handles[0]])}
        | messages(
            {
                "a handle of DeepEP": lambda: buffer.dispatch(x, handle=handles[1]),
                "a handle for DeepEP": lambda: deep_ep_buffer.dispatch(x, handle=handles[0]),
                "overlap": lambda: buffer.low_latency_combine(empty, empty, empty, (), overlap=True),
            }
        )
    )


def test_misuse_fails() -> None:
    outcome = run_ranks(2, _misuse)[0]
    assert "Duplicate physical GPU rank mapping" in outcome["two ranks on one GPU"]
    assert "Detected multi-node group topology" in outcome["one node for two"]
    assert outcome["handle"] == str(["Tensor", "Tensor", "Tensor", "int", "Tensor", "Tensor", "Tensor"])
    assert "handle" in outcome["a handle of DeepEP"] and "handle" in outcome["a handle for DeepEP"]
    assert "NotImplementedError" in outcome["overlap"]


SIGNATURES = {
    "__init__": "group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
    "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, is_intranode=None",
    "low_latency_combine": "x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False, "
    "return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None, overlap=False, packed_recv_count=None, "
    "comp_signal=None, block_m=64, threshold=0, num_sms=0, src_signals=None, src_signal_expect_value=0",
}
"""Read from UCCL da914a20, ep/bench/buffer.py: the calls that differ from DeepEP's."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_double_has_the_signatures_of_the_library(name: str) -> None:
    assert signature(getattr(uccl_deep_ep.Buffer, name)) == SIGNATURES[name]


@pytest.mark.parametrize(
    "name", ["destroy", "capture", "get_dispatch_layout", "dispatch", "combine", "low_latency_dispatch"]
)
def test_the_double_shares_the_other_calls_with_deep_ep(name: str) -> None:
    assert signature(getattr(uccl_deep_ep.Buffer, name)) == signature(getattr(DeepEpBuffer, name))
