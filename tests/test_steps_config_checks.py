"""Rules between settings of ranks, experts and their exchange, checked without torch and without any library."""

import subprocess
import sys

import pytest

from steps.config_loader import load_config
from steps.errors import ConfigError

DEEPEP = (
    "train.ranks=8",
    "moe.dispatcher=deepep",
    "moe.exchange_dtype=bfloat16",
    "train.update.micro_batch_tokens=4096",
)
VLLM_EP = (
    "rollout.engine=vllm",
    "rollout.server.data_parallel_size=8",
    "rollout.server.expert_parallel=true",
    "rollout.server.all2all_backend=deepep_low_latency",
)


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.ranks=2",),
        ("train.ranks=2", "moe.dispatcher=all_to_all"),
        ("train.ranks=4", "moe.dispatcher=all_to_all", "moe.expert_parallel_size=2", "train.fsdp_size=4"),
        ("train.ranks=4", "moe.dispatcher=all_to_all", "moe.deduplicate=node", "moe.exchange_dtype=bfloat16"),
        DEEPEP,
        (*DEEPEP, "moe.dispatcher=uccl_ep", "train.update.micro_batch_tokens=16384"),
        ("model.family=deepseek_v3", "moe.bias_update_rate=0.001"),
        ("warmup.start=/a/checkpoint", "moe.bias_update_rate=0.001"),
        ("rollout.engine=vllm", "rollout.sampling.top_p=0.9", "rollout.server.max_running_requests=8"),
        VLLM_EP,
    ],
)
def test_settings_that_fit_together_are_read(overrides: tuple[str, ...]) -> None:
    load_config("", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.ranks=3", "moe.dispatcher=all_to_all"],
            "moe.expert_parallel_size = 3 (all of train.ranks): must divide the model's number of experts, 8",
        ),
        ([*DEEPEP, "train.ranks=1"], "carries tokens between ranks"),
        (["train.ranks=4", "moe.expert_parallel_size=2"], 'moe.dispatcher = "local" holds all experts'),
        (["train.ranks=4", "train.fsdp_size=3"], "train.fsdp_size = 3: must divide train.ranks = 4"),
        (["moe.deduplicate=rank"], "moe.deduplicate"),
        (["rollout.server.url=http://a:1"], 'rollout.server is set: rollout.engine = "torch" has no server'),
        (
            ["rollout.engine=sglang", "rollout.sampling.top_p=0.9"],
            "rollout.sampling.top_p = 0.9: SGLang's log-probabilities leave out the restriction",
        ),
        ([*VLLM_EP, "rollout.server.all2all_backend=pplx"], "vLLM replaces it by allgather_reducescatter"),
        ([*VLLM_EP, "rollout.server.expert_parallel=false"], "only with rollout.server.expert_parallel = true"),
        (["moe.exchange_dtype=bfloat16"], "exchanges nothing"),
        ([*DEEPEP, "moe.low_latency=true"], "moe.low_latency = true"),
        ([*DEEPEP, "moe.exchange_dtype=model"], "carries bfloat16 only"),
        ([*DEEPEP, "train.update.micro_batch_tokens=9000"], "train.update.micro_batch_tokens = 9000"),
        (
            [*DEEPEP, "rollout.sampling.max_prompt_tokens=9000", "model.max_position_embeddings=10000"],
            "rollout.sampling.max_prompt_tokens = 9000",
        ),
        (["moe.bias_update_rate=0.001"], "publishes no balancing bias"),
        (["train.ranks=0"], "train.ranks = 0: must be greater than 0"),
        (["moe.dispatcher=deep_ep"], "did you mean deepep?"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("", overrides)
    assert message in str(error.value)


def test_nothing_of_this_loads_torch() -> None:
    code = "import sys; from steps.config_loader import load_config; load_config('', ['train.ranks=2'])"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
