"""The path of a training step on tensors that are not the CPU's, with a double for the device."""

from dataclasses import replace

from moe.config import LossConfig, MoeConfig, SamplingConfig, UpdateConfig
from tests.device_updates import largest_differences
from tests.parallel_updates import Case

ATOL, ATOL_BFLOAT16 = 2e-6, 8e-3
"""Of float32 weights after two optimizer steps of size 1e-2: attention has other kernels on the CPU."""
SMALL = Case(groups=4, group_size=2, update=UpdateConfig(optimizer_steps_per_epoch=2, micro_batch_tokens=40))
EVERYTHING = replace(
    SMALL,
    loss=LossConfig(kl_coefficient=0.1, entropy_coefficient=0.01, correction="tis"),
    moe=MoeConfig(dispatcher="all_to_all", aux_loss_coefficient=0.1, routing_replay="trainer", capacity_factor=1.0),
    sampling=SamplingConfig(max_new_tokens=6, top_p=0.9),
    update=replace(SMALL.update, recompute="moe"),
)
CASES = {
    "alone, sampler's routing": replace(
        SMALL,
        moe=MoeConfig(routing_replay="sampler"),
        routed_by_sampler=True,
        update=replace(SMALL.update, recompute="experts"),
    ),
    "everything, sharded": replace(EVERYTHING, fsdp_size=2),
    "deduplicated by node": replace(
        SMALL, moe=MoeConfig(dispatcher="all_to_all", deduplicate="node"), ranks_per_node=1
    ),
}
BFLOAT16 = replace(SMALL, fsdp_size=2, update=replace(SMALL.update, recompute="moe", compute_dtype="bfloat16"))
BFLOAT16_CASES = {
    "bfloat16, idle experts": replace(
        BFLOAT16, moe=MoeConfig(dispatcher="all_to_all", deduplicate="rank"), idle_experts=True
    ),
    "bfloat16, sharded experts": replace(BFLOAT16, moe=MoeConfig(dispatcher="all_to_all", expert_parallel_size=1)),
}


def test_an_update_on_another_device_mixes_no_devices_and_gives_the_same_weights() -> None:
    for name, difference in largest_differences(2, CASES | BFLOAT16_CASES).items():
        assert difference < (ATOL_BFLOAT16 if name in BFLOAT16_CASES else ATOL), name
