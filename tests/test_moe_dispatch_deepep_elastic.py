"""DeepEP's ElasticBuffer and EPBuffer through doubles that move real data (tests/doubles/deep_ep_elastic.py)."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from moe.config import MoeConfig
from moe.dispatch.base import ExpertGroup, ExpertShape
from moe.dispatch.deepep_elastic import DeepEpElasticDispatcher, elastic_problems
from moe.dispatch.monitor import ExchangeMonitor
from tests.dense_reference import KINDS, check_dispatcher, expert_group, random_case
from tests.doubles.deep_ep_elastic import ElasticBuffer, EPBuffer, library
from tests.doubles.source_signatures import method_in_source, method_of, source_of
from tests.ranks import run_ranks

BUFFERS = [ElasticBuffer, EPBuffer]
HIDDEN = 256
ATOL = 10 * 2**-8
"""bfloat16 keeps 8 bits: each rounding, of which two layers there and back have about ten, is off by up to 2^-8."""


def moe(**changes) -> MoeConfig:
    return MoeConfig(**{"dispatcher": "deepep", "max_tokens_per_rank": 64, **changes})


def dispatcher(buffer_class, group: ExpertGroup, **changes) -> DeepEpElasticDispatcher:
    return DeepEpElasticDispatcher(library(buffer_class), moe(**changes), group, requested="deepep")


def check_kinds(rank, world_size, buffer_class):
    for seed, kind in enumerate(KINDS):
        case = random_case(seed, tokens=16, experts=4 * world_size, top_k=3, hidden=HIDDEN, kind=kind)
        check_dispatcher(
            lambda group: dispatcher(buffer_class, group),
            rank,
            world_size,
            case,
            torch.bfloat16,
            ATOL,
            weights_dtype=torch.float32,
            layers=2,
        )


@pytest.mark.parametrize("buffer_class, world_size", [(ElasticBuffer, 2), (ElasticBuffer, 4), (EPBuffer, 3)])
def test_outputs_and_gradients_equal_the_dense_reference(buffer_class, world_size):
    run_ranks(world_size, check_kinds, buffer_class)


def check_rounding_for_the_wire(rank, world_size):
    case = random_case(1, tokens=12, experts=8, top_k=2, hidden=HIDDEN, kind="uniform")

    def build(group):
        return dispatcher(ElasticBuffer, group, exchange_dtype="bfloat16")

    check_dispatcher(build, rank, world_size, case, torch.float32, ATOL)
    with pytest.raises(ValueError, match="carries bfloat16 only, the hidden states are float32"):
        check_dispatcher(lambda group: dispatcher(ElasticBuffer, group), rank, world_size, case, torch.float32, ATOL)


def test_a_float32_model_is_rounded_on_the_wire_only_when_asked_for():
    run_ranks(2, check_rounding_for_the_wire)


def check_recomputation(rank, world_size, buffer_class):
    """Checkpointing feeds the first pass's nodes with the second pass's tensors: both must have the same order."""
    ours = dispatcher(buffer_class, expert_group(rank, world_size))
    case = random_case(2, tokens=24, experts=8, top_k=3, hidden=HIDDEN, kind="uniform")
    rows = case.rows_of(rank, world_size)

    def block(hidden_TH, weights_TK):
        dispatched = ours.dispatch(hidden_TH, case.ids_TK[rows], weights_TK, 8)
        return ours.combine(torch.tanh(dispatched.rows_SH), dispatched)

    gradients = []
    for recompute in (False, True):
        hidden_TH = case.hidden_TH[rows].bfloat16().requires_grad_()
        weights_TK = case.weights_TK[rows].float().requires_grad_()
        if recompute:
            output_TH = checkpoint(block, hidden_TH, weights_TK, use_reentrant=False, early_stop=False)
        else:
            output_TH = block(hidden_TH, weights_TK)
        gradients.append(torch.autograd.grad(output_TH, (hidden_TH, weights_TK), case.grad_TH[rows].bfloat16()))
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize("buffer_class", BUFFERS)
def test_a_recomputed_pass_has_the_gradients_of_one_that_was_kept(buffer_class):
    run_ranks(2, check_recomputation, buffer_class)


def count_bytes(rank, world_size):
    case = random_case(3, tokens=20, experts=8, top_k=3, hidden=HIDDEN, kind="masked")
    monitor = check_dispatcher(
        lambda group: dispatcher(ElasticBuffer, group), rank, world_size, case, torch.bfloat16, ATOL, ranks_per_node=2
    )
    return monitor.take()[0]


def test_bytes_are_counted_once_a_rank_and_once_a_node():
    world_size, case = 4, random_case(3, tokens=20, experts=8, top_k=3, hidden=HIDDEN, kind="masked")
    for rank, record in enumerate(run_ranks(world_size, count_bytes)):
        ids = case.ids_TK[case.rows_of(rank, world_size)].tolist()
        ranks = sum(len({e // 2 for e in row if e >= 0} - {rank}) for row in ids)
        nodes = sum(len({e // 4 for e in row if e >= 0} - {rank // 2}) for row in ids)
        row_bytes = 4 * 2 * HIDDEN + 2 * 3 * 8  # four exchanges, two of them with three ids and weights
        assert (record.sent_bytes, record.sent_off_node_bytes) == (ranks * row_bytes, nodes * row_bytes)
        routes = sum(e // 2 == rank for row in case.owned_by(world_size).ids_TK.tolist() for e in row)
        assert record.received_rows == routes


def check_refusals(rank, world_size):
    group = expert_group(rank, world_size)
    hidden_TH = torch.zeros(65, HIDDEN, dtype=torch.bfloat16)
    ids_TK, weights_TK = torch.zeros(65, 1, dtype=torch.int64), torch.ones(65, 1)
    with pytest.raises(ValueError, match="65 tokens of one rank are over moe.max_tokens_per_rank = 64"):
        dispatcher(ElasticBuffer, group).dispatch(hidden_TH, ids_TK, weights_TK, 4)
    unequal = dispatcher(ElasticBuffer, group, max_tokens_per_rank=64 + rank)
    with pytest.raises(ValueError, match=r"moe.max_tokens_per_rank differs between the ranks .*\[64, 65\]"):
        unequal.dispatch(hidden_TH[:2], ids_TK[:2], weights_TK[:2], 4)


def test_too_many_tokens_and_unequal_constants_are_refused():
    run_ranks(2, check_refusals)


def test_a_lone_process_is_refused():
    group = ExpertGroup(monitor=ExchangeMonitor())
    with pytest.raises(ValueError, match="needs torch.distributed"):
        dispatcher(ElasticBuffer, group)


def check_report(rank, world_size):
    ours = dispatcher(EPBuffer, expert_group(rank, world_size))
    ours.dispatch(
        torch.zeros(2, HIDDEN, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 4
    )
    report = ours.transport_report()
    ours.close()
    return report


def test_the_report_names_library_flavour_and_wire():
    for report in run_ranks(2, check_report):
        assert report.requested == report.observed == "deepep"
        assert report.details["library_version"] == "2.5.0" and report.details["flavour"] == "EPBuffer"
        assert report.details["wire"] == "gin" and report.details["nvlink_ranks"] == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": torch.float32}, "carries bfloat16 only"),
        ({"hidden_size": 128}, "hidden_size 128 is no multiple of 256"),
        ({"top_k": 33}, "num_experts_per_token 33 is over 32"),
        ({"num_experts": 66}, "num_experts 66 is no multiple of the 4 ranks"),
        ({"num_experts": 2052}, "num_experts 2052 is over 2048"),
        ({"num_experts": 1028}, "257 experts of a rank are over 256"),
        ({"num_experts": 4, "top_k": 8}, "num_experts_per_token 8 exceeds num_experts 4"),
        ({"tokens_per_rank": 65}, "65 tokens of one rank are over moe.max_tokens_per_rank = 64"),
        ({"ep_size": 64, "ranks_per_node": 24, "num_experts": 128}, "64 ranks do not fill nodes of 24"),
        ({"ep_size": 264, "ranks_per_node": 8, "num_experts": 264}, "33 nodes are over 32"),
        ({"ep_size": 72, "ranks_per_node": 72, "num_experts": 72}, "72 ranks of one NVLink domain are over 64"),
        ({"ep_size": 16, "ranks_per_node": 8, "num_experts": 16 * 121}, "8 ranks of a node and 121 experts of a rank"),
    ],
)
def test_every_limit_is_named_without_the_library(change, message):
    good = {"num_experts": 64, "top_k": 8, "hidden_size": 2048, "dtype": torch.bfloat16, "ep_size": 4}
    fits = ExpertShape(**{"ranks_per_node": 8, "tokens_per_rank": 64, **good})
    assert not list(elastic_problems(fits, moe()))
    problems = list(elastic_problems(ExpertShape(**{**vars(fits), **change}), moe()))
    assert any(message in problem for problem in problems), problems


def test_more_sms_than_the_kernels_between_nodes_have_channels_for_are_refused():
    shape = ExpertShape(num_experts=64, top_k=8, hidden_size=2048, dtype=torch.bfloat16, ep_size=16, ranks_per_node=8)
    (problem,) = elastic_problems(shape, moe(num_sms=162))
    assert problem == "deepep: moe.num_sms = 162 is over 160 (buffer.hpp): lower it"


def inputs(tokens: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * tokens).view(tokens, 2) % 4
    return {
        "x": torch.ones(tokens, HIDDEN, dtype=torch.bfloat16),
        "topk_idx": ids,
        "topk_weights": torch.ones(tokens, 2),
    }


def open_buffer(buffer_class, **options):
    group = dist.group.WORLD
    dist.all_reduce(torch.zeros(1), group=group)
    options = {"num_max_tokens_per_rank": 8, "hidden": HIDDEN, "num_topk": 2, "explicitly_destroy": True, **options}
    return buffer_class(group, **options)


def check_misuse(rank, world_size, buffer_class):
    """Every one of these mistakes is found, on every rank."""
    with pytest.raises(AssertionError, match="the NCCL communicator is null"):
        buffer_class(dist.new_group([0, 1]), num_max_tokens_per_rank=8, hidden=HIDDEN)
    with pytest.raises(AssertionError, match="constants differ"):
        open_buffer(buffer_class, num_max_tokens_per_rank=8 + rank)
    small = open_buffer(buffer_class, num_bytes=0)
    good = {"num_experts": 4, "num_sms": 20}
    with pytest.raises(AssertionError, match="the buffer holds 0 bytes"):
        small.dispatch(**inputs(), **good)
    buffer = open_buffer(buffer_class)
    with pytest.raises(ZeroDivisionError):
        buffer.dispatch(**inputs(), num_experts=4)
    for name, wrong, message in [
        ("x", torch.ones(4, HIDDEN), "rows are torch.float32"),
        ("x", torch.ones(4, 128, dtype=torch.bfloat16), "Invalid hidden"),
        ("x", torch.ones(HIDDEN, 4, dtype=torch.bfloat16).t(), ""),
        ("topk_idx", inputs()["topk_idx"].int(), "topk_idx is torch.int32"),
        ("topk_idx", torch.zeros(4, 2, dtype=torch.int64), "an expert twice"),
        ("topk_weights", torch.ones(4, 2, dtype=torch.float64), ""),
        ("num_max_tokens_per_rank", 3, "more tokens than num_max_tokens_per_rank"),
        ("previous_event", buffer.capture(), "previous_event needs allocate_on_comm_stream"),
    ]:
        with pytest.raises(AssertionError, match=message):
            buffer.dispatch(**{**inputs(), **good, name: wrong})
    with pytest.raises(AssertionError, match="constants differ"):
        buffer.dispatch(**inputs(), **good, num_max_tokens_per_rank=8 - rank)
    rows, _, _, handle, event = buffer.dispatch(**inputs(), **good, async_with_compute_stream=True)
    assert bool(rows.isnan().all())  # nobody has waited
    event.current_stream_wait()
    assert torch.equal(rows, torch.ones_like(rows))
    with pytest.raises(AssertionError):
        buffer.dispatch(**inputs(), **good)[-1].current_stream_wait()  # a synchronous call has no event
    with pytest.raises(AssertionError, match="num_experts is None"):
        buffer.dispatch(inputs()["x"], handle=handle)
    with pytest.raises(AssertionError, match="Cannot do CPU sync"):
        buffer.dispatch(inputs()["x"], handle=handle, num_sms=20, do_cpu_sync=True)
    with pytest.raises(AssertionError, match="as many as were received"):
        buffer.combine(torch.ones(len(rows) + 1, HIDDEN, dtype=torch.bfloat16), handle)
    with pytest.raises(AssertionError, match="another buffer's"):
        open_buffer(buffer_class).combine(rows, handle)
    with pytest.raises(AssertionError, match="is in"):
        buffer.combine(rows, handle) if rank else buffer.dispatch(inputs()["x"], handle=handle, num_sms=20)
    with pytest.raises(AssertionError):
        open_buffer(buffer_class, explicitly_destroy=False).destroy()
    buffer.destroy()
    with pytest.raises(AssertionError, match="the buffer is destroyed"):
        buffer.dispatch(**inputs(), **good)


@pytest.mark.parametrize("buffer_class", BUFFERS)
def test_misuse_fails_in_the_double(buffer_class):
    run_ranks(2, check_misuse, buffer_class)


def check_handle_copies(rank, world_size):
    buffer, ids = open_buffer(EPBuffer), inputs()["topk_idx"]
    with pytest.raises(AssertionError, match="`do_handle_copy` must be False"):
        buffer.dispatch(**inputs(), num_experts=4, num_sms=20, do_handle_copy=True)
    rows, _, _, handle, _ = buffer.dispatch(**{**inputs(), "topk_idx": ids}, num_experts=4, num_sms=20)
    ids += 1
    with pytest.raises(AssertionError, match="`topk_idx` must not be modified"):
        buffer.combine(rows, handle)


def test_ids_changed_under_a_handle_fail_in_the_double_of_2_5():
    run_ranks(2, check_handle_copies)


@pytest.mark.parametrize("buffer_class, file", [(ElasticBuffer, "elastic.py"), (EPBuffer, "ep.py")])
def test_the_double_has_the_signatures_of_the_installed_library(buffer_class, file):
    path = source_of("deep_ep", "buffers", file)
    if path is None:
        pytest.skip(f"no deep_ep with {buffer_class.__name__} is installed")
    for method in ("__init__", "dispatch", "combine"):
        assert method_of(getattr(buffer_class, method)) == method_in_source(path, buffer_class.__name__, method)
