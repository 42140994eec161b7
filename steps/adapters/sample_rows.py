"""A sample as a row of the database, and back.

Token ids are little-endian int32 blobs, log-probabilities little-endian float32 blobs, versions int32 pairs of
(version, number of tokens).
"""

import struct
from collections.abc import Sequence
from typing import Any

from steps.adapters.tables import prompt_draws, rewards, samples
from steps.records import Lease, Reward, Sample, ScoredSample

SAMPLE_COLUMNS = [
    samples.c.prompt_uid,
    samples.c.sample_index,
    samples.c.seed,
    prompt_draws.c.prompt_ids,
    samples.c.response_ids,
    samples.c.response_text,
    samples.c.logprobs,
    samples.c.versions,
    samples.c.finish_reason,
    samples.c.temperature,
    samples.c.top_p,
]
REWARD_COLUMNS = [rewards.c.status, rewards.c.value, rewards.c.detail]


def sample_values(lease: Lease, sample: Sample) -> dict[str, Any]:
    """The row of a sample, but for its worker. uint64 seeds are stored as the int64 of the same bits."""
    run_lengths = _run_lengths(sample.versions_T)
    return {
        "run_id": lease.unit.run_id,
        "iteration": lease.unit.iteration,
        "prompt_uid": sample.prompt_uid,
        "sample_index": sample.sample_index,
        "unit": lease.unit.unit,
        "min_version": min(run_lengths[::2]),
        "num_tokens": len(sample.response_ids_T),
        "seed": sample.seed - 2**64 if sample.seed >= 2**63 else sample.seed,
        "temperature": sample.temperature,
        "top_p": sample.top_p,
        "finish_reason": sample.finish_reason,
        "response_text": sample.response_text,
        "versions": pack_int32(run_lengths),
        "response_ids": pack_int32(sample.response_ids_T),
        "logprobs": _pack_float32(sample.logprobs_T),
    }


def decode_sample(row: Sequence[Any]) -> Sample:
    uid, index, seed, prompt_ids, response_ids, response_text, logprobs, versions, finish_reason, *sampling = row[:11]
    return Sample(
        prompt_uid=uid,
        sample_index=index,
        seed=seed % 2**64,
        prompt_ids=_unpack_int32(prompt_ids),
        response_ids_T=_unpack_int32(response_ids),
        response_text=response_text,
        logprobs_T=_unpack_float32(logprobs),
        versions_T=_from_run_lengths(_unpack_int32(versions)),
        finish_reason=finish_reason,
        temperature=sampling[0],
        top_p=sampling[1],
    )


def decode_scored_sample(row: Sequence[Any]) -> ScoredSample:
    sample = decode_sample(row)
    status, value, detail = row[len(SAMPLE_COLUMNS) :]
    reward = Reward(
        prompt_uid=sample.prompt_uid, sample_index=sample.sample_index, status=status, value=value, detail=detail
    )
    return ScoredSample(sample=sample, reward=reward)


def sample_key(row: Sequence[Any]) -> tuple[str, int]:
    """Sorted here, not in SQL: databases collate text differently."""
    return row[0], row[1]


def _run_lengths(versions_T: Sequence[int]) -> list[int]:
    """[version, count, version, count, ...]: most responses come from one version."""
    first = versions_T[0]
    if versions_T.count(first) == len(versions_T):
        return [first, len(versions_T)]
    pairs: list[int] = []
    for version in versions_T:
        if pairs and pairs[-2] == version:
            pairs[-1] += 1
        else:
            pairs += [version, 1]
    return pairs


def _from_run_lengths(pairs: Sequence[int]) -> tuple[int, ...]:
    versions_T: tuple[int, ...] = ()
    for version, count in zip(pairs[::2], pairs[1::2], strict=True):
        versions_T += (version,) * count
    return versions_T


def pack_int32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _pack_float32(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _unpack_int32(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}i", data)


def _unpack_float32(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 4}f", data)
