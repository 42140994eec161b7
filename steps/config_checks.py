"""Rules between settings that are each valid alone."""

import difflib
import re
from collections.abc import Iterator

from steps.config import RunConfig, TaskConfig
from steps.tasks.procedural import problem_count

VERIFIERS = ("exact", "numeric", "math_verify", "regex", "per_position", "reasoning_gym")
_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def cross_field_problems(cfg: RunConfig) -> list[str]:
    """One line, `dotted.path = value: what is wrong and what is allowed`, for each rule that is broken."""
    problems = [*_task_problems(cfg.task), *_verifier_problems(cfg.task), *_size_problems(cfg), *_train_problems(cfg)]
    if cfg.warmup.start == "random":
        problems += cfg.model.problems()
        problems += _length_problems(cfg)
    return problems


def _task_problems(task: TaskConfig) -> Iterator[str]:
    if task.kind == "jsonl" and not task.train_path:
        yield "task.train_path is missing: task.kind = jsonl reads its rows from it"
    if task.kind == "reasoning_gym" and not task.reasoning_gym_task:
        yield "task.reasoning_gym_task is missing: name a reasoning-gym task, for example spell_backward"
    owners = {"train_path": "jsonl", "heldout_path": "jsonl", "reasoning_gym_task": "reasoning_gym"}
    owners["reasoning_gym_options"] = "reasoning_gym"
    for name, kind in owners.items():
        if getattr(task, name) and task.kind != kind:
            yield f"task.{name} is set, but task.kind = {task.kind} ignores it: set task.kind = {kind} or remove it"


def _verifier_problems(task: TaskConfig) -> Iterator[str]:
    if task.verifier not in VERIFIERS and not _ENTRY_POINT.fullmatch(task.verifier):
        near = difflib.get_close_matches(task.verifier, VERIFIERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(VERIFIERS)} and package.module:function"
        yield f'task.verifier = "{task.verifier}": there is no such verifier; {hint}'
    if task.verifier == "reasoning_gym" and task.kind != "reasoning_gym":
        yield f"task.verifier = reasoning_gym: needs task.kind = reasoning_gym, not {task.kind}"


def _size_problems(cfg: RunConfig) -> Iterator[str]:
    task, rollout = cfg.task, cfg.rollout
    if rollout.prompts_per_unit > rollout.prompts_per_iteration:
        yield (
            f"rollout.prompts_per_unit = {rollout.prompts_per_unit}: must be at most "
            f"rollout.prompts_per_iteration = {rollout.prompts_per_iteration}"
        )
    space = problem_count(task)
    if space is not None and task.heldout_size >= space:
        yield f"task.heldout_size = {task.heldout_size}: must be below the {space} prompts that {task.kind} has"
    elif task.kind != "jsonl":
        trained = task.train_size if space is None else min(task.train_size, space - task.heldout_size)
        if trained < rollout.prompts_per_iteration:
            yield (
                f"rollout.prompts_per_iteration = {rollout.prompts_per_iteration}: must be at most the "
                f"{trained} training prompts of the task (task.train_size)"
            )


def _train_problems(cfg: RunConfig) -> Iterator[str]:
    train, prompts = cfg.train, cfg.rollout.prompts_per_iteration
    if train.update.optimizer_steps_per_epoch > prompts:
        yield (
            f"train.update.optimizer_steps_per_epoch = {train.update.optimizer_steps_per_epoch}: must be at most "
            f"rollout.prompts_per_iteration = {prompts}, because a mini-batch holds whole groups"
        )
    if train.update.epochs * train.update.optimizer_steps_per_epoch < 2:
        yield (
            f"train.update.optimizer_steps_per_epoch = {train.update.optimizer_steps_per_epoch}: times "
            f"train.update.epochs = {train.update.epochs} it must be at least 2; with a single optimizer step a batch "
            "the ratio is 1 and the clip never acts"
        )
    if train.loss.icepop_low >= train.loss.icepop_high:
        yield (
            f"train.loss.icepop_low = {train.loss.icepop_low:g}: must be below "
            f"train.loss.icepop_high = {train.loss.icepop_high:g}"
        )
    for path, optimizer in (("train.optimizer", train.optimizer), ("warmup.optimizer", cfg.warmup.optimizer)):
        if max(optimizer.betas) >= 1.0:
            yield f"{path}.betas = {list(optimizer.betas)}: both must be below 1"


def _length_problems(cfg: RunConfig) -> Iterator[str]:
    sampling = cfg.rollout.sampling
    needed = sampling.max_prompt_tokens + sampling.max_new_tokens
    if cfg.model.max_position_embeddings < needed:
        yield (
            f"model.max_position_embeddings = {cfg.model.max_position_embeddings}: must be at least {needed} "
            "(rollout.sampling.max_prompt_tokens + rollout.sampling.max_new_tokens)"
        )
