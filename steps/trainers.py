"""Trainer states in the store: build a trainer on a policy version, restore it, save it."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from moe.checkpoint import load_trainer_state, save_trainer_state
from moe.model import attach_dispatcher, default_device, load_model
from moe.update import PolicyTrainer
from steps.adapters.publications import MANIFEST_NAME, Manifest, fetch_folder, upload_folder
from steps.adapters.store import Store
from steps.config import RunConfig
from steps.entrypoint import StepContext
from steps.errors import DataError
from steps.policies import fetch_publication


def build_trainer(context: StepContext, version: int) -> PolicyTrainer:
    """A trainer on the model of one published version; its state is still to be restored.

    It holds the weights in float32, whatever the publication's dtype, on the GPU when there is one.
    """
    config = context.config
    torch.set_num_threads(config.train.update.threads)
    device = default_device()
    model = load_model(fetch_publication(context, version), dtype="float32").to(device)
    attach_dispatcher(model, config.moe)
    reference = None
    if config.train.loss.kl_coefficient > 0:
        reference = load_model(fetch_publication(context, 0), dtype="float32").to(device)
    return new_trainer(config, model, reference)


def new_trainer(
    config: RunConfig, model: torch.nn.Module, reference_model: torch.nn.Module | None = None
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
    )


def restore_trainer(context: StepContext, trainer: PolicyTrainer, prefix: str) -> None:
    """Load the state at `prefix`; DataError when it is incomplete, corrupt or of another model."""
    try:
        load_trainer_state(trainer, fetch_folder(context.store, prefix, context.environment.cache_dir))
    except ValueError as error:
        raise DataError(f"{context.store.uri_of(prefix)}: {error}") from None


def store_trainer(context: StepContext, trainer: PolicyTrainer, prefix: str) -> Manifest:
    """Write the state under `prefix`, its manifest last; the same state again is harmless."""
    with TemporaryDirectory() as folder:
        save_trainer_state(trainer, Path(folder))
        extra = {"run": context.run_id, "global_step": trainer.global_step}
        return upload_folder(context.store, Path(folder), prefix, extra)


def is_stored(context: StepContext, prefix: str) -> bool:
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
