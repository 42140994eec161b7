"""Audit of what was trained: publications, trainer states, verdicts of the gate, and the pointers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from steps import paths
from steps.adapters.buffer import BatchRow
from steps.adapters.publications import read_pointer
from steps.adapters.publications_cache import fetch_folder
from steps.adapters.publications_manifest import MANIFEST_NAME, Manifest, read_manifest
from steps.adapters.runs import IterationRow
from steps.adapters.store import Store
from steps.audit_findings import Findings
from steps.config import GateConfig
from steps.errors import DataError, StepError
from steps.records import Evaluation, Publication
from steps.safetensors_header import RawTensor, mapped, read_header

TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CHUNK_BYTES = 16 << 20


def check_publication(
    found: Findings,
    store: Store,
    row: Publication,
    plan: IterationRow | None,
    batch: BatchRow | None,
    config_hash: str,
    *,
    deep: bool,
) -> None:
    """The publication is what the ledger says, was trained from what the plan says on what the batch says."""
    prefix = paths.publication_prefix(row.run_id, row.policy_version)
    where = store.uri_of(prefix)
    if row.policy_version > 0:
        expected_parent = None if plan is None else plan.policy_version
        found.equal("parent", where, "parent_version", row.parent_version, expected_parent)
    manifest = check_folder(found, "publication", store, prefix, deep=False)
    if manifest is None:
        return
    found.equal("publication", where, "manifest_sha256", row.manifest_sha256, manifest.sha256)
    found.equal("publication", where, "size_bytes", row.size_bytes, manifest.size_bytes)
    expected = {
        "run": row.run_id,
        "policy_version": row.policy_version,
        "parent_version": row.parent_version,
        "batch_manifest_sha256": None if batch is None else batch.manifest_sha256,
        "config_hash": config_hash,
        "weights_sha256": row.weights_sha256,
    }
    for name, value in expected.items():
        found.equal("publication", where, name, manifest.extra.get(name), value)
    if manifest.delta is not None:
        parent = check_folder(found, "publication", store, manifest.delta.parent, deep=False)
        if parent is not None:
            found.equal(
                "publication", where, "manifest_sha256 of the parent", manifest.delta.parent_sha256, parent.sha256
            )
    if deep:
        _check_weights(found, store, prefix, row.weights_sha256)


def check_folder(found: Findings, check: str, store: Store, prefix: str, *, deep: bool) -> Manifest | None:
    """A complete folder: its manifest, and every file of the size that it says (deep: of the checksum)."""
    where = store.uri_of(prefix)
    try:
        manifest = read_manifest(store, prefix)
        sizes = {info.key: info.size_bytes for info in store.list(prefix)}
        for entry in manifest.stored:
            key = manifest.key_of(prefix, entry.path)
            found.equal(check, store.uri_of(key), "size in bytes", sizes.get(key, "missing"), entry.size_bytes)
        if deep:
            with TemporaryDirectory() as temporary:
                for entry in manifest.stored:
                    store.download_file(manifest.key_of(prefix, entry.path), Path(temporary) / "file", entry.sha256)
    except StepError as error:  # a missing or unreadable object is what an audit is to find
        found.require(False, check, where, str(error))
        return None
    return manifest


def _check_weights(found: Findings, store: Store, prefix: str, expected: str) -> None:
    """Every file, as a reader gets it, has its checksum; the tensors have that of the ledger."""
    with TemporaryDirectory() as temporary:
        try:
            folder = fetch_folder(store, prefix, Path(temporary))
            found.equal("weights", store.uri_of(prefix), "sha256 of its tensors", tensors_sha256(folder), expected)
        except StepError as error:
            found.require(False, "weights", store.uri_of(prefix), str(error))


def tensors_sha256(folder: Path) -> str:
    """As `moe.publication.weights_sha256`: each tensor's name, dtype, shape and bytes, in the order of the names."""
    places: dict[str, tuple[Path, RawTensor]] = {}
    for path in folder.glob("*.safetensors"):
        with mapped(path) as data:
            places.update((name, (path, tensor)) for name, tensor in read_header(path.name, data).items())
    digest = hashlib.sha256()
    for name, (path, tensor) in sorted(places.items()):
        dtype = TORCH_DTYPES.get(tensor.dtype, tensor.dtype)
        digest.update(f"{name} torch.{dtype} {tensor.shape}\n".encode())
        with path.open("rb") as file:
            file.seek(tensor.begin)
            for begin in range(tensor.begin, tensor.end, _CHUNK_BYTES):
                digest.update(file.read(min(_CHUNK_BYTES, tensor.end - begin)))
    return digest.hexdigest()


def check_chain(found: Findings, publications: Sequence[Publication]) -> None:
    """Every version leads back to version 0 through published ones."""
    by_version = {row.policy_version: row for row in publications}
    for row in publications:
        version: int | None = row.policy_version
        steps = 0
        while version in by_version and version != 0 and steps <= len(by_version):
            version = by_version[version].parent_version
            steps += 1
        found.require(version == 0, "parent", f"policy version {row.policy_version}", "does not lead back to version 0")


def list_states(store: Store, run_id: str) -> list[str]:
    """Prefixes of the trainer states that are there."""
    ending = f"/{MANIFEST_NAME}"
    keys = [info.key for info in store.list(f"{paths.run_prefix(run_id)}/checkpoints")]
    return [key.removesuffix(ending) for key in keys if key.endswith(ending)]


def needed_versions(publications: Sequence[Publication], keep: int) -> set[int]:
    """Versions whose trainer states are never deleted: the first one and the newest `keep`."""
    versions = [row.policy_version for row in publications]
    return {*versions[:1], *versions[-keep:]}


def check_states(
    found: Findings, store: Store, run_id: str, states: Sequence[str], needed: set[int], *, deep: bool
) -> None:
    """Trainer states that later iterations need are there; each one that is there is whole."""
    for version in sorted(needed):
        prefix = paths.checkpoint_prefix(run_id, version)
        found.require(prefix in states, "trainer-state", store.uri_of(prefix), "is missing")
    for prefix in states:
        seen = Findings()
        manifest = check_folder(seen, "trainer-state", store, prefix, deep=deep)
        if manifest is not None:
            seen.equal("trainer-state", store.uri_of(prefix), "run", manifest.extra.get("run"), run_id)
        # A run that goes on deletes old states, their manifests first.
        if not seen.failed or store.head(f"{prefix}/{MANIFEST_NAME}") is not None:
            found.add(seen)


def check_evaluations(found: Findings, evaluations: Sequence[Evaluation], gate: GateConfig) -> None:
    """Each verdict is the gate's on the recorded reward."""
    last: float | None = None
    for row in evaluations:
        passed = row.reward_eval >= gate.min_reward and (last is None or row.reward_eval >= last - gate.max_regression)
        found.equal("evaluation", f"policy version {row.policy_version}", "validated", row.validated, passed)
        if row.validated:
            last = row.reward_eval


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
    """What a pointer says: None when there is none; `error` when it can't be understood."""

    uri: str
    payload: Mapping[str, Any] | None
    error: str = ""


Pointers = Mapping[str, Pointer]
"""By name: latest, validated."""


def read_pointers(store: Store, run_id: str) -> Pointers:
    """Both pointers. Read before the ledger, they can't be ahead of it."""
    keys = {"latest": paths.latest_key(run_id), "validated": paths.validated_key(run_id)}
    return {name: _read_pointer(store, key) for name, key in keys.items()}


def _read_pointer(store: Store, key: str) -> Pointer:
    try:
        return Pointer(uri=store.uri_of(key), payload=read_pointer(store, key))
    except DataError as error:
        return Pointer(uri=store.uri_of(key), payload=None, error=str(error))


def check_pointer(
    found: Findings, pointer: Pointer, target: int | None, publications: Sequence[Publication], *, may_lag: bool
) -> None:
    """The pointer names version `target`; while its iteration is not finished, it may still name an earlier one."""
    if pointer.error or pointer.payload is None:
        reason = pointer.error or "is missing"
        found.require(not pointer.error and (target is None or may_lag), "pointers", pointer.uri, reason)
        return
    version = pointer.payload.get("policy_version")
    row = next((row for row in publications if row.policy_version == version), None)
    if row is None:
        found.require(False, "pointers", pointer.uri, f"names policy version {version}, which is not published")
        return
    found.equal("pointers", pointer.uri, "version", pointer.payload.get("version"), version)
    found.equal("pointers", pointer.uri, "manifest_sha256", pointer.payload.get("manifest_sha256"), row.manifest_sha256)
    if not may_lag:
        found.equal("pointers", pointer.uri, "policy version", version, target)


def check_records(
    found: Findings, batch: BatchRow, phases: Mapping[str, Mapping[str, Any]], values: Sequence[float | None]
) -> None:
    """What flush and train recorded is what the batch holds; `values`: the rewards of its samples."""
    where = f"iteration {batch.iteration}"
    known = [value for value in values if value is not None]
    if "flush" in phases:
        flush = phases["flush"]
        found.equal("flush-record", where, "samples", flush.get("samples"), batch.num_samples)
        found.equal("flush-record", where, "tokens", flush.get("tokens"), batch.num_tokens)
        found.equal("flush-record", where, "rewards_ok", flush.get("rewards_ok"), len(known))
        mean = sum(known) / len(known) if known else None
        found.equal("flush-record", where, "reward_mean", flush.get("reward_mean"), mean)
    if "train" in phases:
        found.equal("train-record", where, "samples", phases["train"].get("samples"), batch.num_samples)
