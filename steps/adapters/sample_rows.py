"""A sample as a row of the database, and back.

Token ids are little-endian int32 blobs, log-probabilities little-endian float32 blobs, versions int32 pairs of
(version, number of tokens). A routing is two int32, layers and experts a token, and the int16 expert ids; only the
first two when the ids lie in the store, at `routing_uri`. A mask is a byte a token, 1 where the policy sampled it.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, select

from steps.adapters.tables import prompt_draws, rewards, samples
from steps.records import Lease, Reward, Sample, SampleRouting, ScoredSample, WorkUnit

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
    samples.c.routing,
    samples.c.routing_uri,
    samples.c.mask,
]
REWARD_COLUMNS = [rewards.c.status, rewards.c.value, rewards.c.detail]


def sample_values(lease: Lease, sample: Sample) -> dict[str, Any]:
    """The row of a sample. uint64 seeds are stored as the int64 of the same bits."""
    run_lengths = _run_lengths(sample.versions_T)
    return {
        "run_id": lease.unit.run_id,
        "iteration": lease.unit.iteration,
        "prompt_uid": sample.prompt_uid,
        "sample_index": sample.sample_index,
        "unit": lease.unit.unit,
        "worker": lease.worker.name,
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
        "routing": None if sample.routing is None else _pack_routing(sample.routing),
        "routing_uri": (sample.routing.uri or None) if sample.routing is not None else None,
        "mask": None if sample.mask_T is None else bytes(sample.mask_T),
    }


def check_samples(lease: Lease, new_samples: Sequence[Sample]) -> None:
    """Raise ValueError for what `commit_groups` must not store."""
    if lease.unit.kind != "rollout":
        raise ValueError(f"commit_groups needs a rollout lease, not {lease.unit.kind}")
    expected = set(lease.unit.prompt_uids)
    prompt_ids = {sample.prompt_uid: sample.prompt_ids for sample in new_samples}
    for sample in new_samples:
        length = len(sample.response_ids_T)
        if sample.prompt_uid not in expected:
            raise ValueError(f"prompt {sample.prompt_uid} is not in unit {lease.unit.unit}")
        if sample.prompt_ids != prompt_ids[sample.prompt_uid]:
            raise ValueError(f"prompt {sample.prompt_uid}: its samples have different prompt_ids")
        if length == 0 or length != len(sample.logprobs_T) or length != len(sample.versions_T):
            raise ValueError(
                f"sample {sample.prompt_uid}/{sample.sample_index}: response_ids_T, logprobs_T and versions_T "
                f"need one length of at least 1, not {length}, {len(sample.logprobs_T)}, {len(sample.versions_T)}"
            )
        if sample.mask_T is not None and (len(sample.mask_T) != length or not any(sample.mask_T)):
            raise ValueError(
                f"sample {sample.prompt_uid}/{sample.sample_index}: mask_T needs {length} values, one a token, "
                f"and not all of them false; it has {len(sample.mask_T)}"
            )
        _check_routing(sample)


def _check_routing(sample: Sample) -> None:
    routing = sample.routing
    if routing is None:
        return
    expected_bytes = 2 * (len(sample.prompt_ids) + len(sample.response_ids_T)) * routing.num_layers * routing.top_k
    if len(routing.ids) != (0 if routing.uri else expected_bytes):
        raise ValueError(
            f"sample {sample.prompt_uid}/{sample.sample_index}: routing has {len(routing.ids)} bytes of expert ids, "
            f"expected {expected_bytes}, or none beside a URI"
        )


def check_scores(lease: Lease, scores: Sequence[Reward]) -> None:
    """Raise ValueError for what `complete_reward` must not store."""
    if lease.unit.kind != "reward":
        raise ValueError(f"complete_reward needs a reward lease, not {lease.unit.kind}")
    for score in scores:
        valid = score.value is not None and math.isfinite(score.value) if score.status == "ok" else score.value is None
        if not valid:
            raise ValueError(
                f"reward {score.prompt_uid}/{score.sample_index}: value {score.value} doesn't fit status {score.status}"
            )


def committed_groups(connection: Connection, unit: WorkUnit) -> dict[str, str | None]:
    """Prompts of a rollout unit whose samples are stored, each with the token of the lease that they came by."""
    statement = select(prompt_draws.c.prompt_uid, prompt_draws.c.lease_token).where(
        prompt_draws.c.run_id == unit.run_id,
        prompt_draws.c.iteration == unit.iteration,
        prompt_draws.c.unit == unit.unit,
        prompt_draws.c.prompt_ids.is_not(None),
    )
    return {uid: token for uid, token in connection.execute(statement)}


def decode_sample(row: Sequence[Any]) -> Sample:
    uid, index, seed, prompt_ids, response_ids, response_text, logprobs, versions, finish_reason = row[:9]
    temperature, top_p, routing, routing_uri, mask = row[9 : len(SAMPLE_COLUMNS)]
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
        temperature=temperature,
        top_p=top_p,
        routing=None if routing is None else _unpack_routing(routing, routing_uri or ""),
        mask_T=None if mask is None else tuple(map(bool, mask)),
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


def _pack_routing(routing: SampleRouting) -> bytes:
    return pack_int32((routing.num_layers, routing.top_k)) + routing.ids


def _unpack_routing(data: bytes, uri: str) -> SampleRouting:
    num_layers, top_k = _unpack_int32(data[:8])
    return SampleRouting(num_layers=num_layers, top_k=top_k, ids=data[8:], uri=uri)


def pack_int32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _pack_float32(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _unpack_int32(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}i", data)


def _unpack_float32(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 4}f", data)
