"""Models: transformers' own Mixture-of-Experts classes, with our experts function and dispatcher attached."""

import json
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from moe.config import ModelConfig, MoeConfig
from moe.dispatch.base import ExpertGroup, ExpertShape
from moe.dispatch.catalog import build_dispatcher
from moe.dispatch.monitor import ExchangeMonitor
from moe.experts import EXPERTS_IMPLEMENTATION, expert_modules, get_dispatcher, set_dispatcher
from moe.families import FAMILIES, attention_of, experts_per_token, refuse_unsupported
from moe.pretrained import reading, require_safetensors

logging.disable_progress_bar()  # logs are read as lines, a bar garbles them


def default_device() -> torch.device:
    """Where models train and sample: the GPU when there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build_model(cfg: ModelConfig, vocab_size: int, seed: int) -> PreTrainedModel:
    """A freshly initialised model; equal arguments give bit-identical weights, and the global generator is untouched.

    Its weights are float32 and on the CPU: `cfg.dtype` is that of its publications. Token ids 0, 1 and 2 are pad, bos
    and eos, as `moe.tokenizer.build_char_tokenizer` numbers them. Raises ValueError naming the field when the attention
    or expert sizes do not fit together.
    """
    for problem in cfg.problems():
        raise ValueError(problem)
    family, attention = FAMILIES[cfg.family], attention_of(cfg.family)
    config = family.configure(cfg, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family.model_class._from_config(config, dtype=torch.float32, attn_implementation=attention)
    attach_dispatcher(model, MoeConfig())
    return _as_model(model)


def load_model(folder: Path, dtype: str | None = None) -> PreTrainedModel:
    """The model of a Hugging Face folder, in `dtype` ("float32", "bfloat16") or, by default, the dtype it was saved in.

    Only safetensors are read, and no code of the folder runs. Raises ValueError of one line when the folder has no
    config.json or no safetensors, when a file is corrupt or a weight missing or misshapen, and when the model is of an
    unknown or unsupported type or has no fused experts.
    """
    config = _read_config(folder)
    require_safetensors(folder)
    with reading("model", folder):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            attn_implementation=attention_of(config.model_type),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    # transformers would go on with random numbers in their place.
    if unread := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise ValueError(missing_weight(folder, unread[0]))
    model._weight_conversions = None  # publish it as its family is published, not as this folder happens to be cut
    attach_dispatcher(model, MoeConfig())
    return _as_model(model)


def missing_weight(folder: Path, name: str) -> str:
    """What to say of a folder without one of the model's weights."""
    return (
        f"model folder {folder}: weight {name} is missing or not of the shape that config.json says; give a complete "
        "Hugging Face checkpoint folder"
    )


def empty_model(folder: Path) -> PreTrainedModel:
    """The model that the config.json of `folder` describes, without its weights: no weight file is needed or read.

    Parameters are float32 on the meta device; buffers are real, on the CPU, with their initial values. Once this rank's
    part is cut out, `materialize` it and load a trainer's state. Raises ValueError of one line as `load_model` does.
    """
    config = _read_config(folder)
    with reading("model", folder):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention_of(config.model_type),
                trust_remote_code=False,
            )
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    _initialise_buffers(model)
    return _as_model(model.eval())


def materialize(model: nn.Module, device: torch.device) -> None:
    """Move `model` to `device`; parameters on the meta device get storage there, with no values yet.

    Parameters that were one (tied weights) stay one, also as the DTensors of FSDP2.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append((module, name))
    move: Any = model._apply
    move(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    for (module, name), *others in places.values():
        for other, other_name in others:
            other.register_parameter(other_name, module.get_parameter(name))


def place_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter, which is not trained then, or of a buffer."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if attribute in module._parameters:
        module._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[attribute] = tensor


@torch.no_grad()
def _initialise_buffers(model: Any) -> None:
    """Real buffers in place of those on the meta device, filled by the model's own initialisation (rotary, biases)."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if buffers:
            model._init_weights(module)


def _read_config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {folder} has no config.json: give a Hugging Face checkpoint folder")
    with reading("config.json", folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    refuse_unsupported(config.model_type)
    if getattr(config, "quantization_config", None):
        raise ValueError(f"model folder {folder}: its weights are quantized; give a checkpoint in bfloat16 or float32")
    return config


def stored_dtype(folder: Path) -> str:
    """Name of the dtype that a folder's config.json gives its weights ("bfloat16"); float32 when it gives none.

    Raises ValueError when config.json is missing or not JSON.
    """
    with reading("config.json", folder):
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(name)


def attach_dispatcher(
    model: PreTrainedModel,
    moe: MoeConfig,
    group: ExpertGroup | None = None,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Send the tokens of every expert layer of `model` through the dispatcher that `moe` names, among `group`.

    Without a group this process is alone and holds all experts, whatever dispatcher `moe` names. `compute_dtype` is
    that of the hidden states when it is not the weights'. The dispatcher that was attached before is closed. The name
    of the implementation lives on the config object: models must not share one. Raises ValueError when the model has no
    fused experts or its shape breaks a limit of the dispatcher.
    """
    experts = expert_modules(model)
    if not experts:
        raise ValueError(f"model class {type(model).__name__} has no fused experts: choose a Mixture-of-Experts model")
    if group is None:
        group, moe = ExpertGroup(monitor=ExchangeMonitor()), replace(moe, dispatcher="local")
    dispatcher = build_dispatcher(moe, group)
    dispatcher.validate(_expert_shape(model, experts[0].num_experts, moe, group, compute_dtype or model.dtype))
    if (previous := get_dispatcher(experts[0])) is not None:
        previous.close()
    for layer, module in enumerate(experts):
        set_dispatcher(module, dispatcher, group.monitor, layer)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)


def _expert_shape(
    model: PreTrainedModel, num_experts: int, moe: MoeConfig, group: ExpertGroup, dtype: torch.dtype
) -> ExpertShape:
    config = model.config.get_text_config()
    return ExpertShape(
        num_experts=num_experts,
        top_k=experts_per_token(config),
        hidden_size=config.hidden_size,
        dtype=torch.bfloat16 if moe.exchange_dtype == "bfloat16" else dtype,
        ep_size=group.size,
        ranks_per_node=group.ranks_per_node,
        tokens_per_rank=moe.max_tokens_per_rank,
    )


def transport_report(model: PreTrainedModel) -> dict[str, Any]:
    """How the tokens of `model` reach its experts: what was requested, what was observed, and details; JSON values."""
    dispatcher = get_dispatcher(expert_modules(model)[0])
    if dispatcher is None:
        raise ValueError(f"model class {type(model).__name__} has no dispatcher: attach one first")
    return asdict(dispatcher.transport_report())


def _as_model(model: Any) -> PreTrainedModel:
    """transformers is untyped; this states the type once."""
    return model
