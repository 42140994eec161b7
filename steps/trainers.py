"""Trainer states in the store: build a trainer on a policy version, restore it, save it; alone or as one of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from moe.checkpoint import (
    Loadable,
    StatePart,
    StateSnapshot,
    load_trainer_state,
    model_files,
    required_files,
    take_snapshot,
)
from moe.checkpoint_index import STATE_FILE
from moe.checkpoint_weights import ModelWeights
from moe.dispatch.failure import is_lost_connection
from moe.dispatch.monitor import ExchangeFailed
from moe.initial_state import write_initial_state
from moe.model import default_device, empty_model, materialize
from moe.parallel import ParallelLayout, parallelize
from moe.publication_weights import Read
from moe.update import PolicyTrainer
from steps import gang, paths
from steps.adapters.publications import OtherContent, finish_folder, new_upload_id, upload_files
from steps.adapters.publications_cache import fetch_files
from steps.adapters.publications_manifest import MANIFEST_NAME, FileEntry
from steps.adapters.store import Store
from steps.config import RunConfig
from steps.entrypoint import RankContext
from steps.errors import ConfigError, DataError
from steps.gang import Member, World
from steps.policies import fetch_publication_settings


def build_layout(config: RunConfig, member: Member, world: World | None) -> ParallelLayout:
    """The place of this rank's weights among the ranks of `world`; None: this process is alone."""
    if world is None:
        return ParallelLayout.single()
    try:
        layout = ParallelLayout.create(member.size, config.moe, config.train.fsdp_size, member.local_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise ExchangeFailed(f"forming the groups of ranks: {str(error).splitlines()[0]}") from error
    world.explain_failures_of(layout.expert_group.monitor)
    return layout


def build_trainer(context: RankContext, layout: ParallelLayout, version: int) -> PolicyTrainer:
    """This rank's part of a trainer on the model of one published version; its weights are still to be restored.

    It holds the weights in float32, whatever the publication's dtype, on the GPU when there is one.
    """
    config = context.config
    torch.set_num_threads(config.train.update.threads)
    model = _build_model(context, layout, version)
    reference = None
    if config.train.loss.kl_coefficient > 0:
        reference = _build_model(context, layout, 0)
        restore_trainer(context, ModelWeights(reference), paths.checkpoint_prefix(context.run_id, 0))
    return new_trainer(config, model, reference, layout)


def new_trainer(
    config: RunConfig,
    model: PreTrainedModel,
    reference_model: PreTrainedModel | None = None,
    layout: ParallelLayout | None = None,
) -> PolicyTrainer:
    """A trainer with fresh optimizer state on a float32 model; without a reference it can't run a batch with a KL."""
    return PolicyTrainer(
        model,
        loss=config.train.loss,
        optimizer=config.train.optimizer,
        update=config.train.update,
        moe=config.moe,
        sampling=config.rollout.sampling,
        reference_model=reference_model,
        layout=layout or ParallelLayout.single(),
    )


def restore_trainer(context: RankContext, trainer: Loadable, prefix: str) -> None:
    """Load this rank's part of the state at `prefix` (of it or its weights), fetching no other files than it needs.

    Raises DataError when the state is incomplete, corrupt or of another model.
    """
    try:
        folder = _fetch(context, prefix, [])
        load_trainer_state(trainer, _fetch(context, prefix, required_files(trainer, folder)))
    except ValueError as error:
        raise DataError(f"{context.store.uri_of(prefix)}: {error}") from None


@dataclass(frozen=True)
class UploadedPart:
    """What one rank has written and uploaded of a state."""

    part: StatePart
    entries: list[FileEntry]


def store_trainer(
    context: RankContext, trainer: PolicyTrainer, prefix: str, layout: ParallelLayout | None = None
) -> bool:
    """Write the state under `prefix`: each rank its files, then rank 0 the manifest; the same again is harmless.

    False, on rank 0, as `finish_state`.
    """
    layout = layout or ParallelLayout.single()
    upload_id = agree_on_upload(layout)
    snapshot = take_snapshot(trainer, layout.rank, layout.ranks, copy=False)
    parts = gather_parts(upload_part(context.store, snapshot, prefix, upload_id), layout)
    return layout.rank != 0 or finish_state(context, snapshot, prefix, upload_id, parts)


def store_initial(context: RankContext, trainer: PolicyTrainer, read: Read, prefix: str) -> None:
    """As `store_trainer` for a trainer on the meta device that has done nothing yet; `read` gives its weights."""
    upload_id = new_upload_id()
    with TemporaryDirectory() as temporary:
        write_initial_state(trainer, read, Path(temporary))
        entries = upload_files(context.store, Path(temporary), prefix, upload_id)
    extra = {"run": context.run_id, "global_step": trainer.global_step}
    finish_folder(context.store, prefix, upload_id, entries, extra)


def agree_on_upload(layout: ParallelLayout) -> str:
    """A name under which all ranks upload their files of a state."""
    with layout.collective("naming the upload"):
        return str(gang.broadcast(new_upload_id()))


def upload_part(store: Store, snapshot: StateSnapshot, prefix: str, upload_id: str) -> UploadedPart:
    """Write and upload this rank's files; no collectives, so that a thread may do it."""
    with TemporaryDirectory() as temporary:
        part = snapshot.write(Path(temporary))
        return UploadedPart(part, upload_files(store, Path(temporary), prefix, upload_id))


def gather_parts(own: UploadedPart, layout: ParallelLayout) -> list[UploadedPart]:
    """Those of all ranks, on each."""
    with layout.collective("storing the state"):
        return gang.gather(own)


def finish_state(
    context: RankContext, snapshot: StateSnapshot, prefix: str, upload_id: str, parts: Sequence[UploadedPart]
) -> bool:
    """Rank 0, when all files are there: the index and, last, the manifest; from then on the state exists.

    False when that of another attempt stands there, with other numbers (as on GPUs): it is the one that counts.
    """
    with TemporaryDirectory() as temporary:
        snapshot.write_index(Path(temporary), [uploaded.part for uploaded in parts])
        index = upload_files(context.store, Path(temporary), prefix, upload_id)
    entries = [entry for uploaded in parts for entry in uploaded.entries]
    extra = {"run": context.run_id, "global_step": snapshot.progress["global_step"]}
    try:
        finish_folder(context.store, prefix, upload_id, [*entries, *index], extra)
    except OtherContent as other:
        if other.found.extra != extra:
            raise
        context.say(f"{prefix}: another attempt, whose numbers are a little different, was first; its state counts")
        return False
    return True


def fetch_model_files(context: RankContext, prefix: str) -> Path:
    """A local folder with the state at `prefix` as far as it concerns the model's weights."""
    return _fetch(context, prefix, model_files(_fetch(context, prefix, [])))


def is_stored(context: RankContext, prefix: str) -> bool:
    """Whether a complete folder lies at `prefix`."""
    return context.store.head(f"{prefix}/{MANIFEST_NAME}") is not None


def complete_folders(store: Store, prefix: str) -> list[str]:
    """Prefixes directly below `prefix` whose manifest exists, in order of their names."""
    ending = f"/{MANIFEST_NAME}"
    return [info.key.removesuffix(ending) for info in store.list(prefix) if info.key.endswith(ending)]


def delete_folder(store: Store, prefix: str) -> bool:
    """Delete all below `prefix`, manifests first so that nobody trusts the rest; False when there was nothing."""
    keys = [info.key for info in store.list(prefix)]
    manifests = [key for key in keys if key.endswith(f"/{MANIFEST_NAME}")]
    store.delete(manifests)
    store.delete(key for key in keys if key not in manifests)
    return bool(keys)


def _build_model(context: RankContext, layout: ParallelLayout, version: int) -> PreTrainedModel:
    """This rank's part of the model, its weights not initialised."""
    config = context.config
    model = empty_model(fetch_publication_settings(context, version))
    try:
        parallelize(model, config.moe, config.train.update, layout)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    materialize(model, default_device())
    return model


def _fetch(context: RankContext, prefix: str, names: list[str]) -> Path:
    """A local folder with state.json and these files of the state at `prefix`."""
    return fetch_files(context.store, prefix, context.environment.cache_dir, [STATE_FILE, *names])
