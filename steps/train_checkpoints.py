"""Trainer states inside an update, saved in the background while training goes on.

Between two optimizer steps every rank copies its share of the state into the host's memory. A thread then writes the
files and uploads them. Once those of all ranks are there, which several ranks find out at a later boundary, rank 0's
thread adds the index and, last, the manifest: from then on the state exists. One state is on its way at a time: what
falls due meanwhile waits for the first boundary at which that one is stored. Killed anywhere, an update goes on from
the newest state that exists. No thread takes part in a collective.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from moe.checkpoint import StateSnapshot, take_snapshot
from moe.parallel import ParallelLayout
from moe.update import PolicyTrainer
from steps import paths
from steps.adapters.store import NotFound, Store
from steps.entrypoint import RankContext, StepContext
from steps.trainers import (
    UploadedPart,
    agree_on_upload,
    complete_folders,
    delete_folder,
    finish_state,
    gather_parts,
    upload_part,
)

KEPT_STATES = 2
"""Of one update: the newest, and the one before it in case that turns out to be corrupt."""


@dataclass
class _Underway:
    """The state that is being saved; `job` is what this rank's thread does for it now, if anything."""

    step: int
    prefix: str
    snapshot: StateSnapshot
    job: Future[Any] | None = None
    has_all_parts: bool = False


class UpdateCheckpoints:
    """Saves the states of one update. All ranks make the same calls, between the same optimizer steps.

    `train.checkpoint_every` says after how many optimizer steps a state falls due; 0: only on a notice. As a context it
    waits at its end for its thread, not for a state of several ranks to be complete.
    """

    def __init__(self, context: RankContext, trainer: PolicyTrainer, layout: ParallelLayout, iteration: int) -> None:
        self._context, self._trainer, self._layout, self._iteration = context, trainer, layout, iteration
        self._every = context.config.train.checkpoint_every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._underway: _Underway | None = None
        self._due = False
        self._upload_id = agree_on_upload(layout)
        self.stored_step = trainer.batch_step
        """Optimizer steps in the newest state that is known to exist."""
        self.count, self.blocked_s = 0, 0.0
        """States that came to exist (rank 0 knows), and the time that training waited for them."""

    def __enter__(self) -> "UpdateCheckpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        started_s = time.perf_counter()
        self._thread.shutdown(wait=True)
        self.blocked_s += time.perf_counter() - started_s
        if error is None and self._underway is not None and self._underway.job is not None:
            self._underway.job.result()  # raises what the thread could not do

    def between_steps(self) -> bool:
        """Move on what is being saved, begin with what is due; whether any rank was asked to stop."""
        started_s = time.perf_counter()
        interruption, step = self._context.interruption, self._trainer.batch_step
        is_busy = self._underway is not None and self._underway.job is not None and not self._underway.job.done()
        mine = torch.tensor([interruption.requested, interruption.checkpoint_requested(), is_busy], dtype=torch.int)
        stop, asked, busy = self._layout.max(mine, "agreement on saving the state").tolist()
        if stop:
            return True
        if asked:
            self._say("notice of an end: saving the state, training goes on")
        if self._underway is not None and not busy:
            self._advance(self._underway)
        self._due = self._due or bool(asked) or (self._every > 0 and step % self._every == 0)
        if self._due and self._underway is None:
            self._due = False
            self._begin(step, copy=True)
        self.blocked_s += time.perf_counter() - started_s
        return False

    def save_now(self) -> int:
        """Save the state as it is, and return when it exists; the optimizer steps in it.

        What is on its way comes first: should this process be killed meanwhile, at least that one is certain.
        """
        step = self._trainer.batch_step
        self._finish()
        if self.stored_step != step:
            self._begin(step, copy=False)
            self._finish()
        return step

    def _begin(self, step: int, *, copy: bool) -> None:
        prefix = paths.partial_checkpoint_prefix(self._context.run_id, self._iteration, step)
        snapshot = take_snapshot(self._trainer, self._layout.rank, self._layout.ranks, copy=copy)
        self._underway = state = _Underway(step, prefix, snapshot)
        if self._layout.ranks == 1:
            state.job, state.has_all_parts = self._thread.submit(self._upload_and_store, state), True
        else:
            state.job = self._thread.submit(self._upload, state)

    def _finish(self) -> None:
        while self._underway is not None:
            self._advance(self._underway)

    def _advance(self, state: _Underway) -> None:
        """The next stage of `state`, after waiting for this one; an error of the thread is raised here."""
        result: Any = None if state.job is None else state.job.result()
        if state.has_all_parts:
            self._underway, self.stored_step = None, state.step
            return
        parts, state.has_all_parts = gather_parts(result, self._layout), True
        state.job = self._thread.submit(self._store, state, parts) if self._layout.rank == 0 else None

    def _upload(self, state: _Underway) -> UploadedPart:
        return upload_part(self._context.store, state.snapshot, state.prefix, self._upload_id)

    def _upload_and_store(self, state: _Underway) -> None:
        """All at once: nobody else's files are to be waited for."""
        self._store(state, [self._upload(state)])

    def _store(self, state: _Underway, parts: list[UploadedPart]) -> None:
        try:
            finish_state(self._context, state.snapshot, state.prefix, self._upload_id, parts)
        except NotFound:  # another attempt has stored this state, went on and has deleted it since
            return
        self.count += 1
        prune(self._context.store, paths.partial_checkpoints_prefix(self._context.run_id, self._iteration))

    def _say(self, message: str) -> None:
        if isinstance(self._context, StepContext):
            self._context.say(message)


def prune(store: Store, prefix: str) -> None:
    """Delete all but the newest states below `prefix`. Files without a manifest may be another trainer's, underway."""
    for old in complete_folders(store, prefix)[:-KEPT_STATES]:
        delete_folder(store, old)
