"""Policies as others see them: publish one, load one into an engine, score one on held-out prompts, judge it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.publication import weights_sha256
from steps import paths
from steps.adapters import ledger
from steps.adapters.engines import catalog as engines
from steps.adapters.engines.base import Engine
from steps.adapters.publications import OtherContent, move_pointer, upload_folder
from steps.adapters.publications_cache import fetch_files, fetch_folder
from steps.adapters.publications_delta import Parent, upload_delta
from steps.adapters.publications_manifest import Manifest, read_manifest
from steps.config import GateConfig, RunConfig
from steps.engine_fleet import load_server_engine
from steps.entrypoint import RankContext, StepContext
from steps.records import Evaluation, Prompt, Publication
from steps.tasks.dataset import prompt_content
from steps.tasks.frozen import dataset_from_jsonl
from steps.tasks.sandbox import Scorer


def load_engine(context: StepContext, policy_version: int, *, worker: int = 0, record_routing: bool = False) -> Engine:
    """The configured engine on a verified publication; Interrupted when asked to stop while a server loads it."""
    name = context.config.rollout.engine
    if name not in engines.SERVER_KINDS:
        folder = fetch_publication(context, policy_version)
        return engines.load_engine(name, folder, policy_version, record_routing=record_routing)
    folder = fetch_publication_settings(context, policy_version)
    return load_server_engine(context, folder, policy_version, worker=worker, record_routing=record_routing)


def fetch_publication(context: RankContext, policy_version: int) -> Path:
    """Local folder with the verified files of one version (a read-through cache)."""
    prefix = paths.publication_prefix(context.run_id, policy_version)
    return fetch_folder(context.store, prefix, context.environment.cache_dir)


def fetch_publication_settings(context: RankContext, policy_version: int) -> Path:
    """As `fetch_publication`, but without the weights: configuration and tokenizer."""
    prefix = paths.publication_prefix(context.run_id, policy_version)
    files = read_manifest(context.store, prefix).files
    settings = [entry.path for entry in files if not entry.path.endswith(".safetensors")]
    return fetch_files(context.store, prefix, context.environment.cache_dir, settings)


def publish_folder(
    context: StepContext, folder: Path, *, version: int, parent: int | None, batch_sha256: str | None
) -> Publication:
    """Store a policy in Hugging Face layout (manifest last), record it, then move `latest` forward.

    A second attempt has the same weights and agrees with the first one wherever that was killed; the last bits of the
    probe's log-probabilities may be those of another kind of processor.
    """
    prefix = paths.publication_prefix(context.run_id, version)
    weights = weights_sha256(folder)
    extra = {
        "run": context.run_id,
        "policy_version": version,
        "parent_version": parent,
        "batch_manifest_sha256": batch_sha256,
        "config_hash": context.config_hash,
        "weights_sha256": weights,
    }
    try:
        manifest = _upload(context, folder, prefix, extra, parent)
    except OtherContent as other:
        if other.found.extra != extra:
            raise
        manifest = other.found
    context.metrics.update(size_bytes=manifest.size_bytes, stored_bytes=manifest.stored_bytes)
    publication = Publication(
        run_id=context.run_id,
        policy_version=version,
        parent_version=parent,
        uri=context.store.uri_of(prefix),
        manifest_sha256=manifest.sha256,
        weights_sha256=weights,
        size_bytes=manifest.size_bytes,
    )
    ledger.record_publication(context.database, publication)
    point_to(context, paths.latest_key(context.run_id), publication)
    return publication


def _upload(context: StepContext, folder: Path, prefix: str, extra: dict[str, Any], parent: int | None) -> Manifest:
    """Whole, or as a delta to the parent while its chain is shorter than `publish.full_every`."""
    full_every = context.config.publish.full_every
    if parent is not None and full_every > 1:
        parent_prefix = paths.publication_prefix(context.run_id, parent)
        if read_manifest(context.store, parent_prefix).depth + 1 < full_every:
            local = fetch_publication(context, parent)
            return upload_delta(context.store, folder, prefix, extra, Parent(parent_prefix, local))
    return upload_folder(context.store, folder, prefix, extra)


def point_to(context: StepContext, key: str, publication: Publication) -> None:
    """Move a pointer (`latest`, `validated`) forward to this publication; a newer one is left alone."""
    payload = {
        "policy_version": publication.policy_version,
        "uri": publication.uri,
        "manifest_sha256": publication.manifest_sha256,
    }
    move_pointer(context.store, key, publication.policy_version, payload)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutScore:
    """Greedy score of a policy: the mean over prompts, where a verifier's failure counts as unsolved but is counted."""

    reward_mean: float
    num_prompts: int
    failures: int
    seconds: float


def held_out_prompts(context: StepContext) -> list[Prompt]:
    data = context.store.get_bytes(paths.dataset_key(context.run_id, "heldout"))
    return dataset_from_jsonl(data).heldout[: context.config.evaluate.max_prompts]


def score_held_out(engine: Engine, prompts: Sequence[Prompt], config: RunConfig, scorer: Scorer) -> HeldOutScore:
    """Answer every prompt greedily and verify the answers."""
    started_s = time.perf_counter()
    rows = [engine.encode(prompt_content(config.task, prompt)) for prompt in prompts]
    responses = engine.sample(rows, [0] * len(rows), config.rollout.sampling, greedy=True)
    texts = [engine.decode(response.response_ids) for response in responses]
    outcomes = scorer.score(list(zip(prompts, texts, strict=True)))
    return HeldOutScore(
        reward_mean=sum(value or 0.0 for _, value, _ in outcomes) / len(prompts),
        num_prompts=len(prompts),
        failures=sum(status != "ok" for status, _, _ in outcomes),
        seconds=time.perf_counter() - started_s,
    )


def judge(gate: GateConfig, reward: float, last_validated_reward: float | None) -> tuple[bool, str]:
    """The gate's verdict and its reason."""
    if reward < gate.min_reward:
        return False, f"held-out reward {reward:.4f} is below min_reward {gate.min_reward}"
    if last_validated_reward is not None and reward < last_validated_reward - gate.max_regression:
        return False, f"held-out reward fell from {last_validated_reward:.4f} to {reward:.4f}"
    return True, f"held-out reward {reward:.4f}"


def evaluate_policy(context: StepContext, publication: Publication, scorer: Scorer) -> Evaluation:
    """Score one publication, record the verdict, move `validated` when it passed. A stored verdict stands."""
    verdicts = {row.policy_version: row for row in ledger.list_evaluations(context.database, context.run_id)}
    stored = verdicts.get(publication.policy_version)
    if stored is None:
        engine = load_engine(context, publication.policy_version)
        held_out = score_held_out(engine, held_out_prompts(context), context.config, scorer)
        context.metrics.update(prompts=held_out.num_prompts, failures=held_out.failures, seconds=held_out.seconds)
        passed = [row.reward_eval for _, row in sorted(verdicts.items()) if row.validated]
        validated, reason = judge(context.config.evaluate.gate, held_out.reward_mean, passed[-1] if passed else None)
        stored = ledger.record_evaluation(
            context.database,
            Evaluation(
                run_id=context.run_id,
                policy_version=publication.policy_version,
                reward_eval=held_out.reward_mean,
                num_prompts=held_out.num_prompts,
                validated=validated,
                reason=reason,
            ),
        )
    if stored.validated:
        point_to(context, paths.validated_key(context.run_id), publication)
    return stored
