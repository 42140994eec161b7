"""NCCL EP through a double that moves real data (tests/doubles/nccl_ep.py)."""

import dataclasses
import sys

import pytest
import torch
import torch.distributed as dist

from moe.config import MoeConfig
from moe.dispatch.base import ExpertGroup, ExpertShape
from moe.dispatch.monitor import ExchangeMonitor
from moe.dispatch.nccl_ep import build_nccl_ep, nccl_ep_problems
from tests.dense_reference import KINDS, check_dispatcher, expert_group, random_case
from tests.doubles import nccl_ep as double
from tests.doubles.nccl_ep import modules
from tests.doubles.source_signatures import fields_in_source, method_in_source, method_of, source_of
from tests.ranks import run_ranks

HIDDEN = 32
ATOL = 10 * 2**-8
"""bfloat16 keeps 8 bits: each rounding, of which two layers there and back have about ten, is off by up to 2^-8."""


def moe(**changes) -> MoeConfig:
    return MoeConfig(**{"dispatcher": "nccl_ep", "max_tokens_per_rank": 64, **changes})


def build(group, **changes):
    sys.modules.update(modules())
    return build_nccl_ep(moe(**changes), group)


def check_kinds(rank, world_size):
    for seed, kind in enumerate(KINDS):
        case = random_case(seed, tokens=16, experts=4 * world_size, top_k=3, hidden=HIDDEN, kind=kind)
        check_dispatcher(build, rank, world_size, case, torch.bfloat16, ATOL, weights_dtype=torch.float32, layers=2)


@pytest.mark.parametrize("world_size", [2, 4])
def test_outputs_and_gradients_equal_the_dense_reference(world_size):
    run_ranks(world_size, check_kinds)


def check_handles(rank, world_size):
    """Three layers in flight have three handles; the next step's layers use them again."""
    group = expert_group(rank, world_size)
    dispatcher = build(group)
    hidden_TH = torch.ones(4, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    ids_TK, weights_TK = torch.arange(8).view(4, 2) % 4, torch.ones(4, 2)
    created = []
    real_create = double.Group.create_handle
    double.Group.create_handle = lambda self, *a, **k: created.append(real_create(self, *a, **k)) or created[-1]
    for _ in range(2):
        output_TH = hidden_TH
        for _ in range(3):
            dispatched = dispatcher.dispatch(output_TH, ids_TK, weights_TK, 4)
            output_TH = dispatcher.combine(dispatched.rows_SH, dispatched)
        output_TH.sum().backward()
        del output_TH, dispatched
    assert len(created) == 3
    unused = dispatcher.dispatch(hidden_TH, ids_TK, weights_TK, 4)
    dispatcher.close()
    assert all(handle.group is None for handle in created)
    del unused
    return dispatcher.transport_report()


def test_handles_are_used_again_and_destroyed_before_their_group():
    for report in run_ranks(2, check_handles):
        assert (report.requested, report.observed) == ("nccl_ep", "nccl_ep")
        assert report.details["library_version"] == "0.1.0" and report.details["wire"] == "gin"


def check_refusals(rank, world_size):
    group = expert_group(rank, world_size)
    ids_TK, weights_TK = torch.zeros(65, 1, dtype=torch.int64), torch.ones(65, 1)
    with pytest.raises(ValueError, match="65 tokens of one rank are over moe.max_tokens_per_rank = 64"):
        build(group).dispatch(torch.zeros(65, HIDDEN, dtype=torch.bfloat16), ids_TK, weights_TK, 4)
    with pytest.raises(ValueError, match="moe.dispatcher nccl_ep carries bfloat16 only"):
        build(group).dispatch(torch.zeros(2, HIDDEN), ids_TK[:2], weights_TK[:2], 4)
    unequal = build(group, num_sms=20 + 2 * rank)
    with pytest.raises(ValueError, match=r"moe.num_sms differs between the ranks .*\[20, 22\]"):
        unequal.dispatch(torch.zeros(2, HIDDEN, dtype=torch.bfloat16), ids_TK[:2], weights_TK[:2], 4)
    with pytest.raises(ValueError, match="low-latency kernels have no backward"):
        build(group, low_latency=True)


def test_what_cannot_be_honoured_is_refused():
    run_ranks(2, check_refusals)


def test_a_lone_process_is_refused(monkeypatch):
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ValueError, match="needs torch.distributed"):
        build_nccl_ep(moe(), ExpertGroup(monitor=ExchangeMonitor()))


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(ValueError, match=r"needs the module nccl.ep: pip install 'argo-moe-rl\[nccl-ep\]'"):
        build_nccl_ep(moe(), ExpertGroup(monitor=ExchangeMonitor()))


@pytest.mark.parametrize("name", ["OverflowPolicy", "Group"])
def test_an_older_or_unbuilt_library_is_refused(monkeypatch, name):
    for path, module in modules().items():
        monkeypatch.setitem(sys.modules, path, module)
    delattr(sys.modules["nccl.ep"], name)
    with pytest.raises(ValueError, match="is not that of nccl-extensions >= 0.1"):
        build_nccl_ep(moe(), ExpertGroup(monitor=ExchangeMonitor()))


def test_a_failing_import_says_what_it_stumbled_over(monkeypatch, tmp_path):
    (tmp_path / "nccl" / "ep").mkdir(parents=True)
    (tmp_path / "nccl" / "ep" / "__init__.py").write_text("raise ImportError('libnccl_ep.so: wrong CUDA\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"importing nccl.ep failed \(libnccl_ep.so: wrong CUDA\): it needs"):
        build_nccl_ep(moe(), ExpertGroup(monitor=ExchangeMonitor()))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": torch.float32}, "carries bfloat16 only"),
        ({"hidden_size": 2044}, "hidden_size 2044 is no multiple of 8"),
        ({"num_experts": 66}, "num_experts 66 is no multiple of the 4 ranks"),
        ({"num_experts": 4100}, "1025 experts of a rank are over 1024"),
        ({"ep_size": 2, "num_experts": 6}, "6 experts of a node's 2 ranks are no multiple of 4"),
        ({"tokens_per_rank": 65}, "65 tokens of one rank are over moe.max_tokens_per_rank = 64"),
        ({"ep_size": 72, "num_experts": 72}, "72 ranks are over 64"),
        ({"ep_size": 18, "ranks_per_node": 2, "num_experts": 36}, "9 nodes are over 8"),
        ({"ep_size": 16, "ranks_per_node": 16}, "16 ranks of one node are over 8"),
    ],
)
def test_every_limit_is_named_without_the_library(change, message):
    good = {"num_experts": 64, "top_k": 8, "hidden_size": 2048, "dtype": torch.bfloat16, "ep_size": 4}
    fits = ExpertShape(**{"ranks_per_node": 8, "tokens_per_rank": 64, **good})
    assert not list(nccl_ep_problems(fits, moe()))
    problems = list(nccl_ep_problems(ExpertShape(**{**vars(fits), **change}), moe()))
    assert any(message in problem for problem in problems), problems


def test_more_tokens_than_the_kernels_are_compiled_for_are_refused():
    shape = ExpertShape(num_experts=64, top_k=8, hidden_size=2048, dtype=torch.bfloat16, ep_size=4, ranks_per_node=8)
    (problem,) = nccl_ep_problems(shape, moe(max_tokens_per_rank=8200))
    assert problem == "nccl_ep: moe.max_tokens_per_rank = 8200 is over 8192: lower it"


def tensors(**named):
    return {name: double.Tensor(tensor) for name, tensor in named.items()}


GROUP = {
    "algorithm": double.Algorithm.HIGH_THROUGHPUT,
    "num_experts": 4,
    "max_dispatch_tokens_per_rank": 8,
    "max_token_bytes": 2 * HIDDEN,
    "max_num_sms": 20,
}


def check_misuse_of_groups(rank, world_size):
    """Every one of these mistakes is found, on every rank."""
    comm = double.get_nccl_comm_from_group(dist.group.WORLD)
    for name, value in [
        ("algorithm", double.Algorithm.LOW_LATENCY),
        ("max_token_bytes", 40),
        ("max_dispatch_tokens_per_rank", 8 + rank),
        ("max_dispatch_tokens_per_rank", 9000),
        ("max_num_sms", 0),
        ("overflow_policy", double.OverflowPolicy.DROP),
        ("num_experts", 6),
    ]:
        with pytest.raises(AssertionError):
            double.Group.create(comm, double.GroupConfig(**{**GROUP, name: value}))


def check_misuse_of_handles(rank, world_size):
    """Every one of these mistakes is found, on every rank."""
    comm = double.get_nccl_comm_from_group(dist.group.WORLD)
    group = double.Group.create(comm, double.GroupConfig(**GROUP))
    ids, count = torch.arange(8).view(4, 2) % 4, torch.zeros(1, dtype=torch.int32)
    info = double.LayoutInfo(**tensors(recv_total_counter=count))
    with pytest.raises(AssertionError, match="eager mode needs the count"):
        group.create_handle(double.Layout.FLAT, double.Tensor(ids), stream=0).destroy()
    group.live_handles = 0
    handle = group.create_handle(double.Layout.FLAT, double.Tensor(ids), layout_info=info, stream=0)
    received, rows = int(count), torch.ones(4, HIDDEN, dtype=torch.bfloat16)
    there = rows.new_zeros(received, HIDDEN)
    routes = {"topk_weights": torch.zeros(received, 2), "topk_idx": torch.zeros(received, 2, dtype=torch.int64)}
    local = double.LayoutInfo(recv_topk_idx_kind=double.ExpertIdKind.LOCAL)

    def dispatch(sent, arrived, direction=double.PassDir.FWD, layout_info=local):
        config = double.DispatchConfig(pass_direction=direction)
        sent, arrived = double.DispatchInputs(**tensors(**sent)), double.DispatchOutputs(**tensors(**arrived))
        handle.dispatch(sent, arrived, layout_info=layout_info, config=config, stream=0)

    sent, arrived = {"tokens": rows, "topk_weights": torch.ones(4, 2)}, {"tokens": there, **routes}
    wrong_calls = [
        ({"tokens": rows}, {"tokens": there}),  # a forward pass without weights
        ({**sent, "topk_weights": torch.ones(4, 2, dtype=torch.float64)}, arrived),
        ({**sent, "tokens": rows[:3]}, arrived),
        ({**sent, "tokens": rows.double()}, arrived),
        (sent, {**arrived, "tokens": there[: received - 1]}),
        ({"tokens": rows}, {"tokens": there}, double.PassDir.BWD),  # a backward pass before the forward one
        (sent, arrived, double.PassDir.FWD, None),  # the numbering of the ids left to the library
    ]
    for call in wrong_calls:
        with pytest.raises(AssertionError):
            dispatch(*call)
    with pytest.raises(AssertionError, match="contiguous"):
        double.Tensor(rows.t())
    backward = double.CombineConfig(pass_direction=double.PassDir.BWD)
    inputs, outputs = double.CombineInputs(**tensors(tokens=there)), double.CombineOutputs(**tensors(tokens=rows))
    handle.dispatched = False
    with pytest.raises(AssertionError, match="before its dispatch"):
        handle.combine(inputs, outputs, stream=0)
    dispatch(sent, arrived)
    with pytest.raises(AssertionError):
        handle.combine(inputs, outputs, config=backward, stream=0)  # without the weights' gradient
    with pytest.raises(AssertionError, match="is in"):
        handle.combine(inputs, outputs, stream=0) if rank else dispatch(sent, arrived)
    with pytest.raises(AssertionError, match="handles outlive"):
        group.destroy()
    handle.destroy()
    with pytest.raises(double.NcclInvalid):
        handle.combine(inputs, outputs, stream=0)


@pytest.mark.parametrize("check", [check_misuse_of_groups, check_misuse_of_handles])
def test_misuse_fails_in_the_double(check):
    run_ranks(2, check)


def test_the_double_has_the_fields_and_signatures_of_the_installed_library():
    folder = source_of("nccl", "ep", "group.py")
    if folder is None:
        pytest.skip("no nccl.ep is installed")
    parts = [f"{call}{part}" for call in ("Dispatch", "Combine") for part in ("Inputs", "Outputs", "Config")]
    for file, names in [("group.py", ["GroupConfig"]), ("handle.py", [*parts, "LayoutInfo", "HandleConfig"])]:
        for name in names:
            ours = [field.name for field in dataclasses.fields(getattr(double, name))]
            assert ours == fields_in_source(folder.with_name(file), name)
    for file, name, methods in [
        ("group.py", "Group", ["create", "create_handle", "destroy"]),
        ("handle.py", "Handle", ["update", "dispatch", "combine", "complete", "destroy"]),
        ("tensor.py", "Tensor", ["__init__"]),
    ]:
        for method in methods:
            theirs = method_in_source(folder.with_name(file), name, method)
            assert method_of(getattr(getattr(double, name), method)) == [p for p in theirs if p[0] != "cls"]
