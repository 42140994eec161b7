"""The ranks of `steps.benchmark_rollout`: torchrun's, or forked here from a process that has loaded all they need."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moe.config import MoeConfig, UpdateConfig
from moe.decoder import ForwardDecoder
from moe.dispatch.monitor import ExchangeFailed
from moe.model import default_device, load_model
from moe.parallel import ParallelLayout, parallelize
from moe.sampler import Sampler
from moe.tokenizer import PromptContent, encode_prompt, load_tokenizer
from steps import gang, paths
from steps.adapters.publications import read_pointer
from steps.adapters.store import NotFound, open_store
from steps.config import RunConfig
from steps.entrypoint import RankContext
from steps.environment import StepEnvironment
from steps.errors import ConfigError, DataError, Interrupted, StepError
from steps.gang import Member
from steps.interruption import Interruption
from steps.policies import fetch_publication
from steps.seeds import sample_seed
from steps.tasks.dataset import prompt_content
from steps.tasks.frozen import FrozenDataset

Turn = dict[str, Any]
"""`dispatcher`, `seconds`, `tokens` and `responses` (token ids) of one rank, or of all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What every rank samples from."""

    folder: Path
    config: RunConfig
    contents: tuple[PromptContent, ...]
    """Prompts of all ranks."""


def run_ranks(
    environment: StepEnvironment,
    run_id: str,
    dispatchers: Sequence[str],
    *,
    prompts: int,
    repeats: int,
    ranks: int,
    finish: Callable[[Sequence[Mapping[str, Any]], int], None],
    explain: Callable[[StepError], None],
) -> int:
    """The exit code; under torchrun that of this rank, else that of all `ranks` forked here.

    `finish` gets the turns of all ranks together and how many ranks there are, on the first rank.
    """

    def rank(member: Member) -> int:
        torch.set_num_threads(1)
        try:
            workload = _load_workload(environment, run_id, prompts * member.size)
            turns = _sample_in_turns(member, workload, dispatchers, repeats)
        except StepError as error:
            if member.rank == 0 or isinstance(error, Interrupted):
                explain(error)
            return error.exit_code
        if member.rank == 0:
            finish(turns, member.size)
        return 0

    def forked() -> None:
        member = gang.member_of_environment()
        assert member is not None
        raise SystemExit(rank(member))

    member = gang.member_of_environment()
    return gang.run_local_ranks(ranks, forked) if member is None else rank(member)


def _load_workload(environment: StepEnvironment, run_id: str, num_prompts: int) -> Workload:
    """The run's latest policy and its first training prompts, again from the start where there are too few."""
    context = RankContext(
        step="benchmark_rollout",
        run_id=paths.validate_run_id(run_id),
        environment=environment,
        store=open_store(environment.store_uri),
        interruption=Interruption(),
    )
    pointer = read_pointer(context.store, paths.latest_key(run_id))
    if pointer is None:
        raise DataError(f"run {run_id} has no policy yet: start it first, or name another run")
    folder = fetch_publication(context, int(pointer["policy_version"]))
    try:
        frozen = FrozenDataset(context.store.get_bytes(paths.dataset_key(run_id, "train")))
    except NotFound:
        raise DataError(f"run {run_id} has no prompts yet: start it first, or name another run") from None
    uids = [frozen.train_uids[number % len(frozen.train_uids)] for number in range(num_prompts)]
    task = context.config.task
    contents = {prompt.uid: prompt_content(task, prompt) for prompt in frozen.select(sorted(set(uids))).train}
    return Workload(folder=folder, config=context.config, contents=tuple(contents[uid] for uid in uids))


def _sample_in_turns(member: Member, workload: Workload, dispatchers: Sequence[str], repeats: int) -> list[Turn]:
    """The turns of all ranks, after one of each dispatcher that is not timed."""
    timeout_s = workload.config.moe.exchange_timeout_s
    with gang.joined(member, timeout_s) as world:
        try:
            samplers: dict[str, tuple[ParallelLayout, Sampler]] = {}
            for name in dispatchers:
                changes: dict[str, Any] = {"dispatcher": name, "expert_parallel_size": 0}
                moe = replace(workload.config.moe, **changes)
                layout = ParallelLayout.create(member.size, moe, fsdp_size=1, ranks_per_node=member.local_size)
                samplers[name] = layout, _build_sampler(workload, moe, layout)
            world.explain_failures_of(samplers[dispatchers[-1]][0].expert_group.monitor)
            turns = []
            for repeat in range(repeats + 1):
                for name, (layout, sampler) in samplers.items():
                    with layout.collective(f"sampling with {name}"):
                        own = _turn(member, workload, name, sampler)
                        together = _together(gang.gather(own))
                    turns += [together] if repeat else []
        except ExchangeFailed as error:
            raise Interrupted(f"rank {member.rank}: {error}") from None
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return turns


def _build_sampler(workload: Workload, moe: MoeConfig, layout: ParallelLayout) -> Sampler:
    """On the model's own forward: only that sends tokens through the dispatcher."""
    model = load_model(workload.folder).to(default_device())
    model.requires_grad_(False)
    parallelize(model, moe, UpdateConfig(), layout)
    tokenizer = load_tokenizer(workload.folder)
    return Sampler(model, (), tokenizer.pad_token_id, tokenizer=tokenizer, decoder=ForwardDecoder(model))


def _turn(member: Member, workload: Workload, dispatcher: str, sampler: Sampler) -> Turn:
    tokenizer, config = load_tokenizer(workload.folder), workload.config
    share = len(workload.contents) // member.size
    contents = workload.contents[member.rank * share : (member.rank + 1) * share]
    encoded = [encode_prompt(tokenizer, content) for content in contents]
    seeds = [sample_seed(config.seed, 0, f"benchmark-{member.rank}", index) for index in range(share)]
    started_s = time.perf_counter()
    responses = [response.response_ids for response in sampler.sample(encoded, seeds, config.rollout.sampling)]
    return {
        "dispatcher": dispatcher,
        "seconds": time.perf_counter() - started_s,
        "tokens": sum(map(len, responses)),
        "responses": responses,
    }


def _together(turns: Sequence[Turn]) -> Turn:
    """One turn of all ranks: as slow as the slowest of them."""
    return {
        "dispatcher": turns[0]["dispatcher"],
        "seconds": max(turn["seconds"] for turn in turns),
        "tokens": sum(turn["tokens"] for turn in turns),
        "responses": [response for turn in turns for response in turn["responses"]],
    }
