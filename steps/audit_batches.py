"""Audit of the batches' files: what was trained on is, byte for byte, what the database says was consumed."""

import struct
from collections.abc import Mapping, Sequence

from steps import paths
from steps.adapters.audit_queries import SamplePayload
from steps.adapters.buffer import BatchRow
from steps.adapters.publications_manifest import read_manifest
from steps.adapters.store import NotFound, Store, sha256_of_bytes
from steps.audit_findings import Findings
from steps.errors import StepError
from steps.safetensors_header import read_header

BATCH_FILE = "batch.safetensors"
_ROUTING_HEADER_BYTES = 8
_FIELDS = {
    "prompt_ids": "prompt token ids",
    "prompt_lens_N": "prompt lengths",
    "response_ids": "response token ids",
    "response_lens_N": "response lengths",
    "logprobs": "log-probabilities",
    "versions": "policy versions",
    "rewards_N": "rewards",
    "reward_ok_N": "rewards' statuses",
    "group_N": "groups",
    "prompt_routing_PLK": "prompt routing",
    "response_routing_RLK": "response routing",
    "sampled": "marks of sampled tokens",
}


def check_batch_files(
    found: Findings, store: Store, run_id: str, batch: BatchRow, payloads: Sequence[SamplePayload]
) -> None:
    """The manifest is the ledger's, the file is the manifest's, its rows are the database's; none twice."""
    prefix = paths.batch_prefix(run_id, batch.iteration)
    where = store.uri_of(prefix)
    try:
        manifest = read_manifest(store, prefix)
        found.equal("batch-files", where, "manifest_sha256", batch.manifest_sha256, manifest.sha256)
        expected = {"run": run_id, "iteration": batch.iteration, "policy_version": batch.policy_version}
        found.equal("batch-files", where, "what its manifest says", manifest.extra, expected)
        entries = {entry.path: entry for entry in manifest.files}
        if not found.equal("batch-files", where, "its files", sorted(entries), [BATCH_FILE]):
            return
        data = store.get_bytes(manifest.key_of(prefix, BATCH_FILE))
        if found.equal(
            "batch-files", where, f"sha256 of {BATCH_FILE}", sha256_of_bytes(data), entries[BATCH_FILE].sha256
        ):
            _check_rows(found, where, data, expected_tensors(store, run_id, payloads))
    except StepError as error:  # a missing or unreadable object is what an audit is to find
        found.require(False, "batch-files", where, str(error))


def _check_rows(found: Findings, where: str, data: bytes, expected: Mapping[str, bytes]) -> None:
    tensors = read_header(BATCH_FILE, data)
    found.equal("batch-rows", where, "its tensors", sorted(tensors), sorted(expected))
    for name in sorted(tensors.keys() & expected.keys()):
        same = data[tensors[name].begin : tensors[name].end] == expected[name]
        found.require(same, "batch-rows", where, f"{_FIELDS[name]} are not those of the samples it consumed")


def expected_tensors(store: Store, run_id: str, payloads: Sequence[SamplePayload]) -> dict[str, bytes]:
    """What `moe.batch.TrainingBatch` makes of these samples, as little-endian bytes."""
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(one.prompt_uid, len(numbers)) for one in payloads]
    tensors = {
        "prompt_ids": b"".join(one.prompt_ids for one in payloads),
        "prompt_lens_N": _int32([len(one.prompt_ids) // 4 for one in payloads]),
        "response_ids": b"".join(one.response_ids for one in payloads),
        "response_lens_N": _int32([len(one.response_ids) // 4 for one in payloads]),
        "logprobs": b"".join(one.logprobs for one in payloads),
        "versions": b"".join(_expand(one.versions) for one in payloads),
        "rewards_N": struct.pack(f"<{len(payloads)}f", *(one.value or 0.0 for one in payloads)),
        "reward_ok_N": bytes(one.value is not None for one in payloads),
        "group_N": _int32(groups),
    }
    if any(one.mask is not None for one in payloads):
        masks = [bytes([1]) * (len(one.response_ids) // 4) if one.mask is None else one.mask for one in payloads]
        tensors["sampled"] = b"".join(masks)
    return tensors | _routing(store, run_id, payloads)


def _routing(store: Store, run_id: str, payloads: Sequence[SamplePayload]) -> dict[str, bytes]:
    """The experts of each token, -1 where they are not known; nothing when no sample has them."""
    first = next((one.routing for one in payloads if one.routing is not None), None)
    if first is None:
        return {}
    num_layers, top_k = struct.unpack("<2i", first[:_ROUTING_HEADER_BYTES])
    token_bytes = 2 * num_layers * top_k
    prompts, responses = [], []
    for one in payloads:
        prompt_bytes = len(one.prompt_ids) // 4 * token_bytes
        unknown = b"\xff" * (prompt_bytes + len(one.response_ids) // 4 * token_bytes)
        ids = unknown if one.routing is None else _routing_ids(store, run_id, one, one.routing)
        prompts.append(ids[:prompt_bytes])
        responses.append(ids[prompt_bytes:])
    return {"prompt_routing_PLK": b"".join(prompts), "response_routing_RLK": b"".join(responses)}


def _routing_ids(store: Store, run_id: str, one: SamplePayload, routing: bytes) -> bytes:
    if not one.routing_uri:
        return routing[_ROUTING_HEADER_BYTES:]
    sha256 = one.routing_uri.rpartition("/")[2].removesuffix(".bin")
    data = store.get_bytes(paths.routing_key(run_id, sha256))
    if sha256_of_bytes(data) != sha256:
        raise NotFound(f"{one.routing_uri}: its content is not what its name says")
    return data


def _expand(run_lengths: bytes) -> bytes:
    """int32 (version, count) pairs as one int32 a token."""
    pairs = struct.unpack(f"<{len(run_lengths) // 4}i", run_lengths)
    return b"".join(struct.pack("<i", version) * count for version, count in zip(pairs[::2], pairs[1::2], strict=True))


def _int32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)
