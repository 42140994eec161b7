"""Trainer states in the store: build a trainer on a policy version, restore it, save it; alone or as one of ranks."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from moe.checkpoint import Loadable, load_trainer_state, model_files, required_files, save_trainer_state
from moe.checkpoint_index import STATE_FILE
from moe.checkpoint_weights import ModelWeights
from moe.dispatch.failure import is_lost_connection
from moe.dispatch.monitor import ExchangeFailed
from moe.model import default_device, empty_model, materialize
from moe.parallel import ParallelLayout, parallelize
from moe.update import PolicyTrainer
from steps import gang, paths
from steps.adapters.publications import MANIFEST_NAME, fetch_files, finish_folder, upload_files
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


def store_trainer(
    context: RankContext, trainer: PolicyTrainer, prefix: str, layout: ParallelLayout | None = None
) -> None:
    """Write the state under `prefix`: each rank its files, then rank 0 the manifest; the same again is harmless."""
    layout = layout or ParallelLayout.single()
    with TemporaryDirectory() as temporary:
        with layout.collective("saving the state"):
            save_trainer_state(trainer, Path(temporary), layout.rank, layout.ranks)
        own = upload_files(context.store, Path(temporary), prefix)
    with layout.collective("storing the state"):
        entries = [entry for rank_entries in gang.gather(own) for entry in rank_entries]
    if layout.rank == 0:
        extra = {"run": context.run_id, "global_step": trainer.global_step}
        finish_folder(context.store, prefix, entries, extra)


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
    """Delete a folder, its manifest first so that nobody trusts the rest; False when there was none."""
    keys = [info.key for info in store.list(prefix)]
    manifest = f"{prefix}/{MANIFEST_NAME}"
    if manifest in keys:
        store.delete([manifest])
    store.delete(key for key in keys if key != manifest)
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
