"""The double of DeepEP v1 fails where the library would fail, hang, or hand over garbage."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.buffer_checks import LOW_LATENCY_HIDDEN, messages
from tests.doubles import deep_ep_v1, deep_ep_v1_types
from tests.doubles.deep_ep_v1 import Buffer, Config
from tests.ranks import run_ranks

torch.set_num_threads(1)
TOKENS, EXPERTS, TOP_K, HIDDEN = 6, 4, 2, 32


def _buffer(rank: int, **changes: Any) -> Buffer:
    configs = Buffer.get_dispatch_config(2), Buffer.get_combine_config(2)
    nvl_bytes = max(config.get_nvl_buffer_size_hint(HIDDEN * 2, 2) for config in configs)
    return Buffer(dist.group.WORLD, **({"num_nvl_bytes": nvl_bytes, "explicitly_destroy": True} | changes))


def _tokens() -> tuple[Tensor, Tensor, Tensor]:
    ids_TK = torch.tensor([[0, 3], [1, 2], [3, -1], [-1, -1], [2, 0], [0, 1]])
    return torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16), ids_TK, torch.ones(TOKENS, TOP_K)


def _layout(buffer: Buffer, ids_TK: Tensor, **options: Any) -> dict[str, Any]:
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
    *counts, _ = buffer.get_dispatch_layout(ids_TK, EXPERTS, **options)
    return dict(zip(names, counts, strict=True))


def _arguments(rank: int, world_size: int) -> dict[str, str]:
    buffer = _buffer(rank)
    x, ids_TK, weights_TK = _tokens()
    layout = _layout(buffer, ids_TK)
    routes: dict[str, Any] = dict(topk_idx=ids_TK, topk_weights=weights_TK)
    received, _, received_weights, _, handle, _ = buffer.dispatch(x, **layout, **routes)
    mixed = layout | {"is_token_in_rank": _layout(buffer, ids_TK.flip(0).contiguous() % 2)["is_token_in_rank"]}
    call = layout | routes
    small = _buffer(rank, num_nvl_bytes=128)
    closed = _buffer(rank)
    closed.destroy()
    few_sms = Config(4, 6, 256, 6, 128)
    return messages(
        {
            "float32 rows": lambda: buffer.dispatch(x.float(), **layout, **routes),
            "rows of no 16 bytes": lambda: buffer.dispatch(x[:, :4].contiguous(), **layout, **routes),
            "strided rows": lambda: buffer.dispatch(x[:, ::2], **layout, **routes),
            "int32 ids": lambda: buffer.get_dispatch_layout(ids_TK.int(), EXPERTS),
            "strided ids": lambda: buffer.get_dispatch_layout(ids_TK.t(), EXPERTS),
            "an expert that is not there": lambda: buffer.get_dispatch_layout(ids_TK + 4, EXPERTS),
            "float64 weights": lambda: buffer.dispatch(x, **layout, topk_idx=ids_TK, topk_weights=weights_TK.double()),
            "ids without weights": lambda: buffer.dispatch(x, **layout, topk_idx=ids_TK),
            "no layout": lambda: buffer.dispatch(x, **routes),
            "a layout of other tokens": lambda: buffer.dispatch(x, **mixed, **routes),
            "a buffer that is too small": lambda: small.dispatch(x, **layout, **routes),
            "a destroyed buffer": lambda: closed.dispatch(x, **layout, **routes),
            "other SMs than the handle's": lambda: buffer.combine(received, handle, config=few_sms),
            "other rows than the handle's": lambda: buffer.combine(received[1:], handle),
            "routes beside a handle": lambda: buffer.dispatch(x, handle=handle, **routes),
            "fewer tokens than the handle's": lambda: buffer.dispatch(x[1:], handle=handle),
            "bfloat16 weights": lambda: buffer.combine(received, handle, topk_weights=received_weights.bfloat16()),
            "a torn handle": lambda: buffer.combine(received, handle[:4]),
            "the comm stream without an event": lambda: buffer.dispatch(x, **call, allocate_on_comm_stream=True),
            "a wait for no event": lambda: buffer.combine(received, handle)[2].current_stream_wait(),
            "an odd number of SMs": lambda: Buffer.set_num_sms(3),
            "destroy of a buffer with a destructor": lambda: _buffer(rank, explicitly_destroy=False).destroy(),
            "low latency without its mode": lambda: buffer.low_latency_dispatch(x, ids_TK, 8, EXPERTS, use_fp8=False),
        }
    )  # fmt: skip


def test_wrong_arguments_fail() -> None:
    outcome = run_ranks(2, _arguments)[0]
    expected = {
        "float32 rows": "Unsupported type",
        "rows of no 16 bytes": "% sizeof(int4) == 0",
        "strided rows": "x.is_contiguous()",
        "int32 ids": "expected scalar type torch.int64 of topk_idx",
        "strided ids": "topk_idx.is_contiguous()",
        "an expert that is not there": "topk_idx < num_experts",
        "float64 weights": "topk_weights->scalar_type() == torch::kFloat32",
        "ids without weights": "topk_idx.has_value() == topk_weights.has_value()",
        "no layout": "AssertionError",
        "a layout of other tokens": "the layout is of other tokens",
        "a buffer that is too small": "<= num_nvl_bytes",
        "a destroyed buffer": "the buffer is destroyed",
        "other SMs than the handle's": "channel_prefix_matrix.size(1) == num_channels",
        "other rows than the handle's": "src_idx.size(0) == num_tokens",
        "routes beside a handle": "AssertionError",
        "fewer tokens than the handle's": "is_token_in_rank.size(0) == x.size(0)",
        "bfloat16 weights": "topk_weights->scalar_type() == torch::kFloat32",
        "a torn handle": "handle",
        "the comm stream without an event": "previous_event.has_value() and async",
        "a wait for no event": "AssertionError",
        "an odd number of SMs": "The SM count must be even",
        "destroy of a buffer with a destructor": "`explicitly_destroy` flag must be set",
        "low latency without its mode": "low_latency_mode",
    }
    assert outcome.keys() == expected.keys()
    assert {name: text for name, text in outcome.items() if expected[name] not in text or text == "nothing"} == {}


def _forgotten_wait(rank: int, world_size: int) -> list[Any]:
    buffer = _buffer(rank)
    x, ids_TK, weights_TK = _tokens()
    layout = _layout(buffer, ids_TK, previous_event=buffer.capture(), async_finish=True)
    garbage = layout["num_tokens_per_rank"].tolist()
    received, ids_RK, weights_RK, _, handle, done = buffer.dispatch(
        x, **layout, topk_idx=ids_TK, topk_weights=weights_TK, previous_event=buffer.capture(), async_finish=True
    )
    before = bool(received.isnan().all() and weights_RK.isnan().all() and (ids_RK < -1).all())
    outcome = messages({"combine": lambda: buffer.combine(received * 2, handle)})
    done.current_stream_wait()
    waited = bool(received.isfinite().all() and weights_RK.isfinite().all() and (ids_RK >= -1).all())
    return [garbage, before, outcome["combine"], waited, layout["num_tokens_per_rank"].tolist()]


def test_results_are_garbage_until_their_event_is_waited_for() -> None:
    garbage, before, combine, waited, counts = run_ranks(2, _forgotten_wait)[0]
    assert before and waited
    assert min(garbage) < 0 <= min(counts)
    assert "was it read before the event of its exchange was waited for?" in combine


def _unequal(rank: int, world_size: int) -> dict[str, str]:
    buffer = _buffer(rank)
    x, ids_TK, weights_TK = _tokens()
    layout = _layout(buffer, ids_TK)
    routes: dict[str, Any] = dict(topk_idx=ids_TK, topk_weights=weights_TK)
    received, *_, handle, _ = buffer.dispatch(x, **layout, **routes)
    few = _low_latency_buffer()
    rows, ids = torch.ones(2, LOW_LATENCY_HIDDEN, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    attempts: dict[str, Any] = {
        "buffer sizes": lambda: _buffer(rank, num_nvl_bytes=1 << (20 + rank)),
        "SMs": lambda: buffer.dispatch(x, **layout, **routes, config=Config(20 + 2 * rank, 6, 64, 6, 128)),
        "calls": (lambda: buffer.combine(received, handle))
        if rank
        else (lambda: buffer.dispatch(x, **layout, **routes)),
        "hidden sizes": lambda: buffer.dispatch(x[:, : HIDDEN // (1 + rank)].contiguous(), **layout, **routes),
        "max tokens": lambda: few.low_latency_dispatch(rows, ids, 4 + 4 * rank, EXPERTS, use_fp8=False),
    }
    return messages(attempts)


def test_ranks_that_disagree_fail_on_every_rank() -> None:
    for outcome in run_ranks(2, _unequal):
        for name, text in outcome.items():
            assert "the kernels would hang" in text, (name, text)


def _low_latency_buffer(**changes: Any) -> Buffer:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(8, LOW_LATENCY_HIDDEN, 2, EXPERTS)
    settings = {"num_rdma_bytes": num_bytes, "low_latency_mode": True, "num_qps_per_rank": EXPERTS // 2}
    return Buffer(dist.group.WORLD, **(settings | changes))


def _low_latency(rank: int, world_size: int) -> dict[str, str]:
    rows, ids_TK = torch.ones(2, LOW_LATENCY_HIDDEN, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    weights_TK = torch.ones(2, 1)
    buffer = _low_latency_buffer()

    def call(buffer: Buffer, rows: Tensor = rows, tokens: int = 8, **options: Any) -> Any:
        return buffer.low_latency_dispatch(rows, ids_TK, tokens, EXPERTS, **({"use_fp8": False} | options))

    slots, counts, oldest, _, _ = call(buffer)
    free = slots[:, int(counts.max()) :]
    call(buffer)
    _, _, handle, _, _ = call(buffer)
    outputs = torch.zeros_like(slots)
    wide_TK, many = torch.zeros(2, 12, dtype=torch.int64), rows.repeat(5, 1)
    assert free.isnan().all(), "slots without a token hold garbage"
    return messages(
        {
            "a third result": lambda: buffer.low_latency_combine(outputs, ids_TK, weights_TK, oldest),
            "hidden size": lambda: call(buffer, rows[:, :1024].contiguous()),
            "rows": lambda: call(buffer, rows.float()),
            "more tokens": lambda: buffer.low_latency_dispatch(many, ids_TK.repeat(5, 1), 8, EXPERTS, use_fp8=False),
            "a buffer that is too small": lambda: call(buffer, tokens=16),
            "queues": lambda: call(_low_latency_buffer(num_qps_per_rank=1)),
            "top k": lambda: buffer.low_latency_dispatch(rows, wide_TK, 8, EXPERTS, use_fp8=False),
            "tokens": lambda: call(buffer, tokens=3),
            "weights": lambda: buffer.low_latency_combine(outputs, ids_TK, weights_TK.bfloat16(), handle),
            "shape": lambda: buffer.low_latency_combine(outputs[:, 1:].contiguous(), ids_TK, weights_TK, handle),
        }
    )


def test_misuse_of_low_latency_fails() -> None:
    outcome = run_ranks(2, _low_latency)[0]
    expected = {
        "a third result": "a result of the last two calls",
        "hidden size": "Unsupported hidden",
        "rows": "x.scalar_type() == kBFloat16",
        "more tokens": "x.size(0) <= num_max_dispatch_tokens_per_rank",
        "a buffer that is too small": "layout.total_bytes",
        "queues": "num_rc_per_pe >= num_local_experts",
        "top k": "num_topk <= kNumMaxTopK",
        "tokens": "multiple of 4",
        "weights": "topk_weights.scalar_type()",
        "shape": "x.size(0) == num_experts",
    }
    assert {name: text for name, text in outcome.items() if expected[name] not in text} == {}


def test_buffer_sizes_are_those_of_the_library() -> None:
    """Worked by hand from csrc/config.hpp for Config(20, 6, 256, 6, 128), hidden 7168, and LowLatencyLayout."""
    config = Config(20, 6, 256, 6, 128)
    row = 7168 * 2 + 8 + 128 * (8 + 4) + 128 * 4
    assert config.get_nvl_buffer_size_hint(7168 * 2, 8) == 10 * 8 * (5 * 4 + 256 * row) + 64 == 335709824
    assert config.get_rdma_buffer_size_hint(7168 * 2, 8) == 0
    assert config.get_rdma_buffer_size_hint(7168 * 2, 16) == 10 * 2 * (18 * 2 * 4 + 132 * (row + 16) * 2) + 64
    message = 56 * 4 + 7168 * 2
    layout = 2 * (256 * 128 * message * 2 + 256 * 4)
    assert deep_ep_v1_types.low_latency_bytes(128, 7168, 256) == layout
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == layout + 128


@pytest.mark.parametrize("ranks", [3, 5, 12])
def test_group_sizes_without_a_configuration_fail(ranks: int) -> None:
    for get_config in (deep_ep_v1.Buffer.get_dispatch_config, deep_ep_v1.Buffer.get_combine_config):
        with pytest.raises(AssertionError, match=f"Unsupported number of EP ranks: {ranks}"):
            get_config(ranks)
