"""A plan as JSON and as tables: each number with the formula or the source that it comes from."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from workflows.capacity import anchors
from workflows.capacity.exchange import crossing, passes, row_bytes, seconds_per_direction
from workflows.capacity.memory import Term, engine_terms, trainer_terms
from workflows.capacity.model import Setting
from workflows.capacity.phases import Phase, balanced_rollout_nodes, cache_tokens, decoding, phases
from workflows.capacity.problems import setting_notes

GIB = 1 << 30
MIB = 1 << 20


def plan_json(setting: Setting, source: str, problems: list[str]) -> dict[str, Any]:
    """Everything that the tables show, in bytes and seconds."""
    found, cross = phases(setting), crossing(setting)
    return {
        "platform": setting.profile.name,
        "accelerator": setting.accelerator.name,
        "model": {
            "source": source,
            "parameters": setting.model.total_parameters,
            "active_parameters": setting.model.active_parameters,
            "expert_parameters": setting.model.expert_parameters,
        },
        "training": {
            "nodes": setting.training_nodes,
            "ranks": setting.ranks,
            "expert_parallel_size": setting.expert_ranks,
            "experts_per_rank": setting.model.num_experts // setting.expert_ranks,
            "replicas_of_experts": setting.ranks // setting.expert_ranks,
            "memory_bytes": {term.name: round(term.size_bytes) for term in trainer_terms(setting)},
            "gpu_memory_bytes": setting.accelerator.memory_bytes,
        },
        "rollout": {
            "nodes": setting.rollout_nodes,
            "engines": setting.config.rollout.workers,
            "gpus_per_engine": setting.engine_gpus,
            "memory_bytes": {term.name: round(term.size_bytes) for term in engine_terms(setting)},
            "cache_tokens_per_engine": round(cache_tokens(setting)),
            "sequences_per_gpu": decoding(setting).sequences_per_gpu,
            "tokens_per_s_per_gpu": decoding(setting).tokens_per_s_per_gpu,
        },
        "exchange": {
            "dispatcher": setting.config.moe.dispatcher,
            "row_bytes": row_bytes(setting),
            "copies_off_node_per_token": cross.off_node,
            "copies_in_node_per_token": cross.in_node,
            "bytes_off_node_per_token_and_layer": 2 * cross.off_node * row_bytes(setting),
            "bytes_off_node_per_token": _bytes_per_token(setting),
        },
        "batch": {
            "samples": setting.samples,
            "tokens": setting.training_tokens,
            "response_tokens_assumed": setting.response_tokens,
            "samples_per_optimizer_step": setting.samples // setting.config.train.update.optimizer_steps_per_epoch,
        },
        "phases": [
            {"name": phase.name.strip(), "seconds": phase.seconds, "formula": phase.formula, "source": phase.source}
            for phase in found
        ],
        "balanced_rollout_nodes": balanced_rollout_nodes(setting, found),
        "published": [{"figure": anchor.figure, "source": anchor.source} for anchor in anchors.CROSS_CHECKS],
        "notes": setting_notes(setting),
        "problems": problems,
    }


def plan_tables(setting: Setting, source: str) -> RenderableType:
    """The same for people."""
    found = phases(setting)
    trainer = _memory_table(f"memory of a training GPU ({setting.accelerator.name})", trainer_terms(setting), setting)
    engine = _memory_table(f"memory of a rollout GPU ({setting.config.rollout.engine})", engine_terms(setting), setting)
    parts: list[RenderableType] = [_facts(setting, source), trainer, engine, _exchange_table(setting)]
    parts += [_phase_table(found), Text(_balance(setting, found))]
    parts += [Text(f"published: {anchor.figure} ({anchor.source})", style="dim") for anchor in anchors.CROSS_CHECKS]
    parts += [Text(f"note: {note}", style="yellow") for note in setting_notes(setting)]
    return Group(*parts)


def _facts(setting: Setting, source: str) -> Table:
    model, config = setting.model, setting.config
    grid = Table.grid(padding=(0, 2))
    billions = f"{model.total_parameters / 1e9:.1f} B parameters, {model.active_parameters / 1e9:.1f} B for a token"
    rows = {
        "model": f"{billions}; {model.num_experts} experts, top-{model.top_k}, {model.num_layers} layers ({source})",
        "training": f"{setting.training_nodes} nodes, {setting.ranks} ranks; expert-parallel groups of "
        f"{setting.expert_ranks} ({model.num_experts // setting.expert_ranks} experts a rank, "
        f"{setting.ranks // setting.expert_ranks} replicas), other weights over {setting.sharding} ranks",
        "rollouts": f"{setting.rollout_nodes} nodes, {config.rollout.workers} engines of {setting.engine_gpus} GPUs, "
        f"{decoding(setting).sequences_per_gpu:.0f} sequences a GPU",
        "iteration": f"{config.rollout.prompts_per_iteration} prompts x {config.rollout.group_size} = "
        f"{setting.samples} samples, {setting.training_tokens / 1e6:.1f} M tokens with "
        f"responses of {setting.response_tokens} (assumed), "
        f"{setting.samples // config.train.update.optimizer_steps_per_epoch} samples an optimizer step",
    }
    for name, text in rows.items():
        grid.add_row(name, text)
    return grid


def _memory_table(title: str, terms: list[Term], setting: Setting) -> Table:
    table = Table(title=title, title_justify="left", show_footer=True)
    total = sum(term.size_bytes for term in terms)
    capacity = setting.accelerator.memory_bytes / GIB
    table.add_column("part", footer="sum")
    table.add_column("GiB", justify="right", footer=f"{total / GIB:.1f}")
    table.add_column("how", footer=f"of {capacity:.0f} GiB")
    for term in terms:
        table.add_row(term.name, f"{term.size_bytes / GIB:.1f}", term.formula)
    return table


def _exchange_table(setting: Setting) -> Table:
    cross, size = crossing(setting), row_bytes(setting)
    table = Table(title="exchange of one training token", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("how")
    table.add_row("row on the wire", f"{size / 1024:.1f} KiB", "hidden size x bytes of a number")
    table.add_row("copies off the node", f"{cross.off_node:.2f}", cross.how)
    table.add_row("bytes off the node, one layer", f"{2 * cross.off_node * size / 1024:.1f} KiB", "dispatch + combine")
    table.add_row(
        "bytes off the node, whole update",
        f"{_bytes_per_token(setting) / MIB:.1f} MiB",
        f"x {setting.model.num_moe_layers} layers x {passes(setting)} passes",
    )
    tokens = setting.config.train.update.micro_batch_tokens
    seconds = seconds_per_direction(setting, tokens) if setting.expert_ranks > 1 else 0.0
    table.add_row(
        "one dispatch of a micro-batch", f"{1e3 * seconds:.2f} ms", f"{tokens} tokens a rank; fit, not measured"
    )
    return table


def _bytes_per_token(setting: Setting) -> float:
    per_layer = 2 * crossing(setting).off_node * row_bytes(setting)
    return per_layer * setting.model.num_moe_layers * passes(setting)


def _phase_table(found: list[Phase]) -> Table:
    table = Table(title="expected seconds of an iteration", title_justify="left")
    table.add_column("phase")
    table.add_column("s", justify="right")
    table.add_column("how")
    table.add_column("source")
    for phase in found:
        table.add_row(phase.name, f"{phase.seconds:.1f}", phase.formula, phase.source)
    return table


def _balance(setting: Setting, found: list[Phase]) -> str:
    nodes = balanced_rollout_nodes(setting, found)
    return (
        f"sampling would take as long as the rest with {nodes:.1f} rollout nodes (there are {setting.rollout_nodes} "
        f"for {setting.training_nodes} training nodes); decoding is limited by {decoding(setting).limited_by}"
    )
