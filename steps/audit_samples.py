"""Audit of the experience: whole groups, samples as planned, rewards for all, and what came of each prompt."""

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from steps.adapters.audit_queries import SampleFacts
from steps.adapters.runs import IterationRow, PromptDraw
from steps.audit_findings import Findings, IterationSums
from steps.config import RunConfig
from steps.seeds import sample_seed

Groups = Mapping[str, Sequence[SampleFacts]]
"""The samples of each prompt of an iteration, by index."""


def group(samples: Iterable[SampleFacts]) -> dict[str, list[SampleFacts]]:
    """By prompt, in the order of their index."""
    groups: dict[str, list[SampleFacts]] = defaultdict(list)
    for sample in samples:
        groups[sample.prompt_uid].append(sample)
    return groups


def check_groups(found: Findings, row: IterationRow, draws: Sequence[PromptDraw], groups: Groups, size: int) -> None:
    """A prompt has all samples of its group or none; one that was trained on has them all."""
    for draw in draws:
        where = f"iteration {row.iteration}, prompt {draw.prompt_uid}"
        indices = [sample.sample_index for sample in groups.get(draw.prompt_uid, ())]
        if draw.status == "consumed" or indices:
            found.equal("groups", where, "sample indices", indices, list(range(size)))
        for sample in groups.get(draw.prompt_uid, ()):
            found.equal("groups", f"{where}, sample {sample.sample_index}", "unit", sample.unit, draw.unit)


def check_samples(
    found: Findings, row: IterationRow, samples: Iterable[SampleFacts], config: RunConfig, published: set[int]
) -> None:
    """Seeds, sampling parameters, lengths and policy versions of every sample are those of the plan."""
    sampling = config.rollout.sampling
    for sample in samples:
        where = f"iteration {row.iteration}, sample {sample.prompt_uid}/{sample.sample_index}"
        expected = sample_seed(config.seed, row.iteration, sample.prompt_uid, sample.sample_index)
        found.equal("seeds", where, "seed", sample.seed % 2**64, expected)
        found.equal("sampling", where, "temperature", sample.temperature, sampling.temperature)
        found.equal("sampling", where, "top_p", sample.top_p, sampling.top_p)
        _check_lengths(found, where, sample, sampling.max_new_tokens)
        _check_versions(found, where, sample, row.policy_version, published)


def _check_lengths(found: Findings, where: str, sample: SampleFacts, max_new_tokens: int) -> None:
    within = 0 < sample.num_tokens <= max_new_tokens
    found.require(within, "lengths", where, f"{sample.num_tokens} tokens, expected 1 to {max_new_tokens}")
    found.equal("lengths", where, "tokens in response_ids", sample.response_bytes / 4, sample.num_tokens)
    found.equal("lengths", where, "tokens in logprobs", sample.logprob_bytes / 4, sample.num_tokens)
    found.require(bool(sample.prompt_bytes), "lengths", where, "its prompt has no token ids")


def _check_versions(found: Findings, where: str, sample: SampleFacts, policy_version: int, published: set[int]) -> None:
    pairs = struct.unpack(f"<{len(sample.versions) // 4}i", sample.versions[: len(sample.versions) // 4 * 4])
    versions, counts = pairs[::2], pairs[1::2]
    found.equal("versions", where, "tokens with a policy version", sum(counts), sample.num_tokens)
    found.equal("versions", where, "min_version", sample.min_version, min(versions, default=None))
    for version in versions:
        known = version in published and version <= policy_version
        found.require(known, "versions", where, f"version {version} is not one to sample from at {policy_version}")


def check_rewards(found: Findings, row: IterationRow, groups: Groups, unit_uids: Iterable[str]) -> None:
    """Each sample of the prompts whose reward unit is done has a reward or the reason why there is none."""
    for uid in unit_uids:
        for sample in groups.get(uid, ()):
            where = f"iteration {row.iteration}, sample {uid}/{sample.sample_index}"
            if found.require(sample.status is not None, "rewards", where, "has no reward, and its unit is done"):
                fits = (sample.status == "ok") == (sample.value is not None)
                found.require(fits, "rewards", where, f"value {sample.value} does not fit status {sample.status}")


def check_fates(found: Findings, draws: Sequence[PromptDraw], iteration: int, batches: set[int]) -> None:
    """A prompt of an iteration whose batch is selected was trained on, in one batch, or dropped with the reason."""
    for draw in draws:
        where = f"iteration {iteration}, prompt {draw.prompt_uid}"
        if draw.status == "consumed":
            known = draw.consumed_by in batches and (draw.consumed_by or 0) >= iteration
            found.require(known, "fates", where, f"is consumed by batch {draw.consumed_by}, which there is not")
        elif draw.status == "dropped":
            found.require(bool(draw.drop_reason), "fates", where, "is dropped without a reason")
        else:
            found.require(iteration not in batches, "fates", where, "is still open after its batch was selected")


def sum_up(iteration: int, draws: Sequence[PromptDraw], groups: Groups, size: int) -> IterationSums:
    """Recomputed from the rows."""
    sums = IterationSums(iteration=iteration, drawn=len(draws))
    for draw in draws:
        samples = groups.get(draw.prompt_uid, ())
        sums.sampled += len(samples) == size
        sums.scored += len(samples) == size and all(sample.status is not None for sample in samples)
        sums.trained += draw.status == "consumed"
        sums.open += draw.status == "drawn"
        if draw.status == "dropped":
            sums.dropped[(draw.drop_reason or "no reason").split(":")[0]] += 1
    for sample in (sample for samples in groups.values() for sample in samples):
        sums.samples += 1
        sums.tokens += sample.num_tokens
        if sample.status is not None:
            sums.rewards[sample.status] += 1
    return sums


def check_sums(found: Findings, sums: IterationSums, group_size: int) -> None:
    """Every prompt is in one place, and no stage has more than the one before gave it."""
    where = f"iteration {sums.iteration}"
    dropped = sums.dropped.total()
    found.equal("sums", where, "trained + dropped + open", sums.trained + dropped + sums.open, sums.drawn)
    found.equal("sums", where, "samples", sums.samples, sums.sampled * group_size)
    ordered = sums.trained <= sums.scored <= sums.sampled <= sums.drawn
    found.require(
        ordered, "sums", where, "more prompts trained than scored, scored than sampled, or sampled than drawn"
    )
