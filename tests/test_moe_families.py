import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe.batch import TrainingBatch
from moe.config import LossConfig, ModelConfig, MoeConfig, OptimizerConfig, SamplingConfig, UpdateConfig
from moe.families import FAMILIES, attention_of, experts_per_token, refuse_unsupported
from moe.model import build_model, load_model
from moe.parallel import ParallelLayout, parallelize
from moe.publication import save_publication
from moe.router_load import router_modules
from moe.routing import RouterControl
from moe.sampler import Sampler
from moe.tokenizer import build_char_tokenizer
from moe.update import PolicyTrainer
from tests.ranks import run_ranks

VOCAB, EOS = 13, 2
SAMPLING = SamplingConfig(max_new_tokens=5)
IDS = torch.randint(3, VOCAB, (4, 7), generator=torch.Generator().manual_seed(0))


def model(family: str) -> PreTrainedModel:
    groups: dict[str, Any] = {"num_expert_groups": 4, "num_groups_per_token": 2} if family == "deepseek_v3" else {}
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 16}
    return build_model(ModelConfig(family=family, initializer_range=0.2, **(shape | groups)), VOCAB, seed=0)


def sampled(own: PreTrainedModel) -> TrainingBatch:
    prompts = [[1, *range(3, 5 + group)] for group in range(4) for _ in range(4)]
    rows = Sampler(own, (EOS,), 0).sample(prompts, range(len(prompts)), SAMPLING)
    return TrainingBatch.from_rows(
        prompts=prompts,
        responses=[row.response_ids for row in rows],
        logprobs=[row.logprobs for row in rows],
        versions=[[0] * len(row.response_ids) for row in rows],
        rewards=[float(row.response_ids.count(5) + index % 3) for index, row in enumerate(rows)],
        groups=[index // 4 for index in range(len(prompts))],
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_publishes_reloads_and_samples(family: str, tmp_path: Path) -> None:
    own = model(family)
    batch = sampled(own)
    before = {name: parameter.clone() for name, parameter in own.named_parameters()}
    trainer = PolicyTrainer(
        own,
        loss=LossConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        update=UpdateConfig(optimizer_steps_per_epoch=2),
        moe=MoeConfig(aux_loss_coefficient=0.01),
        sampling=SAMPLING,
    )
    metrics = trainer.run_batch(batch, 7, 0, lambda step: None, lambda: False).values
    assert metrics["rollout_corr/k3_kl"] < 1e-6
    assert metrics["actor/grad_norm"] > 0
    assert not [name for name, parameter in own.named_parameters() if torch.equal(parameter, before[name])]
    save_publication(own, build_char_tokenizer("abcdefghij"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == family
    again = load_model(tmp_path)
    for name, tensor in own.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    prompts = [[1, 5, 6], [1, 7]]
    assert Sampler(again, (EOS,), 0).sample(prompts, [3, 4], SAMPLING) == Sampler(own, (EOS,), 0).sample(
        prompts, [3, 4], SAMPLING
    )


def _gradients(own: PreTrainedModel, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = own(input_ids=ids, use_cache=False).logits
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


def _differences(rank: int, ranks: int) -> dict[str, float]:
    """Worst difference of the logits and, relative to its largest element, of any gradient; by family."""
    moe = MoeConfig(dispatcher="all_to_all")
    layout = ParallelLayout.create(ranks, moe, 1, ranks)
    worst = {}
    for family in FAMILIES:
        whole_logits, whole = _gradients(model(family), IDS)
        for recompute in ("none", "moe"):
            own = model(family)
            parallelize(own, moe, UpdateConfig(recompute=recompute), layout)
            half = IDS.chunk(ranks)[rank]
            logits, gradients = _gradients(own, half)
            differences = [float((logits - whole_logits.chunk(ranks)[rank]).abs().max())]
            assert gradients.keys() == whole.keys()
            for name, gradient in gradients.items():
                expected = whole[name]
                if ".experts." in name:
                    expected = expected.chunk(ranks)[rank]
                else:
                    dist.all_reduce(gradient)
                differences.append(float((gradient - expected).abs().max() / whole[name].abs().max()))
            worst[f"{family} recompute {recompute}"] = max(differences)
    return worst


def test_every_family_on_two_ranks_is_the_family_on_one() -> None:
    for worst in run_ranks(2, _differences):
        assert len(worst) == 2 * len(FAMILIES)
        assert {name: value for name, value in worst.items() if value > 2e-5} == {}


def test_every_family_has_its_routers_and_attention() -> None:
    for family in FAMILIES:
        control = RouterControl.of(model(family))
        assert (control.num_layers, control.top_k, control.num_experts) == (2, 2, 8)
    assert attention_of("gpt_oss") == "eager"
    assert attention_of("qwen3_moe") == "sdpa"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_expert_groups": 2}, "family qwen3_moe has no expert groups"),
        ({"family": "deepseek_v3", "num_groups_per_token": 2}, "num_groups_per_token = 2: must be at most"),
        ({"family": "deepseek_v3", "num_expert_groups": 3}, "the groups must be equal"),
        ({"family": "deepseek_v3", "num_expert_groups": 8}, "of at least 2 experts"),
        (
            {"family": "deepseek_v3", "num_expert_groups": 4, "num_experts_per_token": 3},
            "leaves 2 experts to choose from",
        ),
    ],
)
def test_expert_groups_that_do_not_fit_are_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(ModelConfig(**fields), VOCAB, seed=0)


@pytest.mark.parametrize("family", ["dbrx", "doge", "jetmoe", "llama4", "longcat_flash", "step3p7"])
def test_a_family_without_fused_experts_is_refused_by_name(family: str) -> None:
    source = Path(importlib.import_module(f"transformers.models.{family}.modeling_{family}").__file__ or "")
    assert "use_experts_implementation" not in source.read_text(), "supported by transformers now: no longer refuse it"
    with pytest.raises(ValueError, match=f"model family {family} is not supported: its experts do not follow"):
        refuse_unsupported(family)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "granitemoehybrid", "nemotron_h", "minimax", "lfm2_moe"])
def test_a_family_with_recurrent_layers_is_refused_by_name(family: str) -> None:
    with pytest.raises(
        ValueError, match=f"model family {family} is not supported: some of its layers keep a recurrent"
    ):
        refuse_unsupported(family)


def test_a_config_that_does_not_say_how_many_experts_a_token_has_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="model family aria_text is not supported: num_experts_per_tok"):
        experts_per_token(AutoConfig.for_model("aria_text"))


def test_a_router_whose_weights_lie_elsewhere_is_controlled_all_the_same() -> None:
    sizes = {"vocab_size": 16, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 16}
    config = AutoConfig.for_model("afmoe", num_hidden_layers=2, num_dense_layers=1, **sizes, **experts)
    own: Any = AutoModelForCausalLM.from_config(config)
    assert not hasattr(router_modules(own)[0], "weight")
    parallelize(own, MoeConfig(), UpdateConfig(), ParallelLayout.single())
    assert (RouterControl.of(own).num_experts, RouterControl.of(own).top_k) == (4, 2)


def test_a_folder_of_a_refused_family_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v32"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        ValueError, match="model family deepseek_v32 is not supported: its sparse attention keeps an index"
    ):
        load_model(tmp_path)
