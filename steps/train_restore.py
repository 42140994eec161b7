"""The state that an update continues from: the newest one that is whole, found by all ranks together.

A state that is incomplete or corrupt is passed over, and said so loudly: on stderr, in the ledger and in the report.
Inside an update the one before it is used, and at last the checkpoint that the update started from. When that one is
corrupt, the update that made it is made again from the checkpoint before it and its own stored batch; the weights must
then be those of its publication. The outcome is stored as this update's state after 0 optimizer steps.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moe.consolidate import consolidate
from moe.model import stored_dtype
from moe.parallel import ParallelLayout
from moe.publication import weights_sha256
from moe.update import PolicyTrainer, UpdateStopped
from steps import gang, paths
from steps.adapters import ledger
from steps.adapters.publications_cache import fetch_folder
from steps.batches import load_batch
from steps.entrypoint import RankContext, StepContext
from steps.errors import DataError, Interrupted
from steps.gang_step import fail_together
from steps.policies import fetch_publication_settings
from steps.seeds import derive_seed
from steps.trainers import (
    complete_folders,
    delete_folder,
    fetch_model_files,
    is_stored,
    restore_trainer,
    store_trainer,
)

LEDGER_PHASE = "train_restore"
"""Where the iteration's metrics say which states were passed over."""


class UpdateFinished(Exception):
    """Another attempt has finished the update meanwhile, and deleted the states that were to be continued from."""


def newest_state(context: StepContext, iteration: int, version: int, rejected: frozenset[str] = frozenset()) -> str:
    """Where the newest state lies that the update of `iteration`, which began at `version`, can continue from.

    Empty when all of them are rejected.
    """
    partials = complete_folders(context.store, paths.partial_checkpoints_prefix(context.run_id, iteration))
    states = [paths.checkpoint_prefix(context.run_id, version), *partials]
    return next((state for state in reversed(states) if state not in rejected), "")


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """How the ranks together find the state that the update of `iteration`, begun at `version`, continues from."""

    context: RankContext
    trainer: PolicyTrainer
    layout: ParallelLayout
    iteration: int
    version: int

    def restore(self, first: str) -> None:
        """Load the state at `first` into the trainer, or else the next older one that every rank can load.

        All ranks call it together and end alike. Raises UpdateFinished, and DataError when there is none.
        """
        prefix, rejected = first, frozenset[str]()
        while (problem := self._load(prefix)) is not None:
            rejected |= {prefix}
            instead = self._instead_of(prefix, rejected, problem)
            if not instead:
                self._make_again(problem)
                prefix = self._made_again
                break
            prefix = instead
        if prefix == self._made_again:
            self._require_published_weights()

    @property
    def _base(self) -> str:
        return paths.checkpoint_prefix(self.context.run_id, self.version)

    @property
    def _made_again(self) -> str:
        return paths.partial_checkpoint_prefix(self.context.run_id, self.iteration, 0)

    def _load(self, prefix: str) -> str | None:
        """What is wrong with the state: the lowest rank's answer. What a rank has filled, a later load replaces."""
        own = None
        try:
            restore_trainer(self.context, self.trainer, prefix)
        except DataError as error:
            own = str(error)
        with self.layout.collective("agreement on the state to continue from"):
            return next((problem for problem in gang.gather(own) if problem is not None), None)

    def _agree(self, value: Any) -> Any:
        """What rank 0 has found out."""
        with self.layout.collective("choosing a state to continue from"):
            return gang.broadcast(value)

    def _instead_of(self, prefix: str, rejected: frozenset[str], problem: str) -> str:
        """The next state to try, empty when there is none; raises UpdateFinished on all ranks."""
        context, found = self.context, None
        finished = paths.checkpoint_prefix(context.run_id, self.iteration)
        if isinstance(context, StepContext) and not is_stored(context, finished):
            found = newest_state(context, self.iteration, self.version, rejected)
            if prefix == self._base or is_stored(context, prefix):  # another attempt may have pruned it
                self._tell(context, problem, found)
            if prefix != self._base:
                delete_folder(context.store, prefix)  # or the same one, saved again, would find its place taken
        instead = self._agree(found)
        if instead is None:
            raise UpdateFinished
        return str(instead)

    def _tell(self, context: StepContext, problem: str, instead: str) -> None:
        then = f"going on from {context.store.uri_of(instead)}" if instead else "making the update before it again"
        print(f"{context.step}: WARNING: {problem}; {then}", file=sys.stderr, flush=True)
        known = ledger.get_iteration_metrics(context.database, context.run_id, self.iteration).get(LEDGER_PHASE, {})
        passed_over = [*known.get("passed_over", []), {"problem": problem, "instead": instead}]
        record = {"passed_over": passed_over}
        ledger.set_iteration_metrics(context.database, context.run_id, self.iteration, LEDGER_PHASE, record)

    def _make_again(self, problem: str) -> None:
        """The update that led to `version`, from the checkpoint before it; stored as a state after 0 steps."""
        context, start = self.context, None
        if self.version > 0 and isinstance(context, StepContext):
            start = ledger.get_iteration(context.database, context.run_id, self.version).policy_version
        start = self._agree(start)
        remedy = f"restore the files of checkpoint {self.version} from a copy, or start a new run"
        if start is None:
            fail_together(context, DataError(f"{problem}; there is no checkpoint before it: {remedy}"))
        before = self._load(paths.checkpoint_prefix(context.run_id, start))
        if before is not None:
            fail_together(context, DataError(f"{problem}; nor can the one before it be used ({before}): {remedy}"))
        folder = paths.batch_prefix(context.run_id, self.version)
        batch = load_batch(fetch_folder(context.store, folder, context.environment.cache_dir))
        try:
            self.trainer.run_batch(
                batch,
                seed=derive_seed("update", context.config.seed, self.version),
                start_step=0,
                on_step=lambda _: None,
                should_stop=lambda: context.interruption.requested,
            )
        except UpdateStopped:
            message = f"stopped while checkpoint {self.version} was made again; run again to begin with that anew"
            fail_together(context, Interrupted(message))
        store_trainer(context, self.trainer, self._made_again, self.layout)

    def _require_published_weights(self) -> None:
        """What was made again must be the publication of `version`; otherwise it is deleted, and DataError raised."""
        context, problem = self.context, None
        if isinstance(context, StepContext):
            expected = ledger.get_publication(context.database, context.run_id, self.version).weights_sha256
            found = _weights_of(context, self._made_again, self.version)
            if found != expected:
                delete_folder(context.store, self._made_again)
                problem = (
                    f"checkpoint {self.version} was made again and has other weights ({found[:12]}) than its "
                    f"publication ({expected[:12]}): other software or hardware; restore its files from a copy, or "
                    "start a new run"
                )
        problem = self._agree(problem)
        if problem is not None:
            fail_together(context, DataError(problem))


def _weights_of(context: RankContext, prefix: str, version: int) -> str:
    """What `publish` would name the weights of the state at `prefix`; one layer is in memory at a time."""
    settings = fetch_publication_settings(context, version)
    with TemporaryDirectory() as temporary:
        try:
            consolidate(fetch_model_files(context, prefix), settings, Path(temporary), stored_dtype(settings))
        except ValueError as error:
            raise DataError(f"{context.store.uri_of(prefix)}: {error}") from None
        return weights_sha256(Path(temporary))
