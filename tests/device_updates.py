"""Updates of tests/parallel_updates.py on a device that is not the CPU; see tests/doubles/accelerator.py."""

from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from moe.checkpoint import load_trainer_state, save_trainer_state
from moe.config import MoeConfig, UpdateConfig
from moe.model import empty_model, materialize
from moe.parallel import ParallelLayout, parallelize
from moe.update import PolicyTrainer
from moe.update_state import model_pieces
from tests.doubles.accelerator import accelerator
from tests.parallel_updates import Case, Place, finish, in_place, layout_of, pieces_of, trainer_of
from tests.ranks import run_ranks


def largest_differences(world_size: int, cases: Mapping[str, Case]) -> dict[str, float]:
    """By case: how far the trainer's state after the update on the device is from that after it on the CPU.

    In a case with the local dispatcher each rank trains alone.
    """
    gang = in_a_fresh_process(run_ranks, world_size, _compare, cases)
    return {name: max(differences[name] for differences in gang) for name in cases}


def in_a_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns there; it may fork ranks that use the device."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _compare(rank: int, world_size: int, cases: Mapping[str, Case]) -> dict[str, float]:
    with accelerator() as device, patch("moe.parallel.device_of", return_value=device):
        on_device = {name: _state_after(case, world_size, _from_meta_to(device)) for name, case in cases.items()}
    on_cpu = {name: _state_after(case, world_size, in_place) for name, case in cases.items()}
    return {name: _largest_difference(on_device[name], on_cpu[name]) for name in cases}


def _state_after(case: Case, world_size: int, place: Place) -> dict[str, Tensor]:
    layout = ParallelLayout.single() if case.moe.dispatcher == "local" else layout_of(case, world_size)
    trainer = trainer_of(case, layout, case.moe, place=place)
    finish(trainer, case)
    with TemporaryDirectory() as folder:
        save_trainer_state(trainer, Path(folder), layout.rank, layout.ranks)
        if layout.ranks == 1:
            trainer = trainer_of(case, layout, case.moe, seed=5, place=place)
            load_trainer_state(trainer, Path(folder))
            finish(trainer, case)
    return _on_cpu(trainer)


def _on_cpu(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, (_, _, tensor) in pieces_of(trainer).items()}


def _from_meta_to(device: torch.device) -> Place:
    """As `steps.trainers` makes a rank's model: empty, divided, then given memory on the device."""

    def place(whole: PreTrainedModel, moe: MoeConfig, update: UpdateConfig, layout: ParallelLayout) -> PreTrainedModel:
        with TemporaryDirectory() as folder:
            whole.config.save_pretrained(folder)
            model = empty_model(Path(folder))
        for module in model.modules():  # FSDP2 would set the data of the CPU's tensors, which can't become a double's
            module._buffers.update({name: buffer.to(device) for name, buffer in module.named_buffers(recurse=False)})
        parallelize(model, moe, update, layout)
        materialize(model, device)
        _keep_padding(model)
        weights = whole.state_dict()
        for name, piece in model_pieces(model, layout).items():
            sizes = zip(piece.offset, piece.tensor.shape, strict=True)
            piece.tensor.copy_(weights[name][tuple(slice(start, start + size) for start, size in sizes)])
        return model

    return place


def _keep_padding(model: Any) -> None:
    """FSDP2 knows by the address of a weight's memory that it has padded it, and a double has no address."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
            group._reset_sharded_params = True


def _largest_difference(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert state.keys() == expected.keys()
    distances = ((state[name].double() - expected[name].double()).abs() for name in expected)
    return max(float(distance.max()) for distance in distances if distance.numel())
