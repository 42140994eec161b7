"""The loop of a worker: lease a unit, keep the lease alive, commit; until nothing is left and nothing outstanding."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from steps.adapters import leases, stragglers
from steps.adapters.database import Database
from steps.entrypoint import StepContext
from steps.errors import Interrupted, StepError
from steps.records import Lease, UnitKind, Worker

IDLE_POLL_S = 0.05
BACKUP_POLL_S = 0.5
OWNERSHIP_POLL_S = 1.0
HEARTBEATS_PER_LEASE = 3


def work_through_units(
    context: StepContext,
    kind: UnitKind,
    *,
    iteration: int,
    worker: int,
    lease_s: float,
    work: Callable[[Lease, threading.Event], bool],
    close: Callable[[], None] | None = None,
    backup_after: float = 0.0,
) -> int:
    """Call `work` for each unit that this worker gets; it returns False when the lease was lost meanwhile.

    The event that `work` gets is set once it is known that the lease was lost: nobody needs the rest of the work.
    `close` is called before each look for a unit; it may end units that nobody shall wait for. `backup_after`: as
    `rollout.backup_after`.

    Returns the number of units committed. While others hold the last units this worker waits: one of them may be lost.
    Raises Interrupted, with the lease returned, when the platform asks to stop, and before a next unit when this place
    is to be left or ends too soon.
    """
    database, committed = context.database, 0
    seconds: list[float] = []
    owner = Worker(number=worker, pod=context.environment.pod, step_attempt_id=context.attempt_id)
    next_backup_s = time.monotonic() + BACKUP_POLL_S
    while True:
        context.interruption.check_begin(statistics.median(seconds) if seconds else 0.0)
        if close is not None:
            close()
        lease = leases.lease_unit(database, context.run_id, iteration, kind, owner, lease_s)
        if lease is None and backup_after and time.monotonic() >= next_backup_s:
            lease = stragglers.lease_backup(database, context.run_id, iteration, owner, lease_s, backup_after)
            next_backup_s = time.monotonic() + BACKUP_POLL_S
        if lease is None:
            if leases.outstanding(database, context.run_id, iteration, kind) == 0:
                return committed
            context.interruption.wait(IDLE_POLL_S)
            continue
        _say_what_is_unusual(context, lease)
        started_s = time.monotonic()
        try:
            with _kept_alive(database, lease, lease_s) as lost:
                committed += work(lease, lost)
        except Interrupted:
            leases.return_lease(database, lease)
            raise
        seconds.append(time.monotonic() - started_s)


def _say_what_is_unusual(context: StepContext, lease: Lease) -> None:
    if lease.is_backup:
        context.say(f"unit {lease.unit.unit}: sampled here, too, since another worker takes long")
    elif lease.attempt > 1:
        context.say(f"unit {lease.unit.unit}: lease {lease.attempt}, an earlier one was lost or returned")


@contextmanager
def _kept_alive(database: Database, lease: Lease, lease_s: float) -> Iterator[threading.Event]:
    """Heartbeat in the background; the event is set when the lease was lost.

    Nothing depends on the event being set in time: the commit is fenced by the token.
    """
    done, lost = threading.Event(), threading.Event()
    period_s = lease_s / HEARTBEATS_PER_LEASE

    def beat() -> None:
        next_beat_s = time.monotonic() + period_s
        while not done.wait(min(period_s, OWNERSHIP_POLL_S)):
            try:
                if time.monotonic() < next_beat_s:
                    is_good = leases.is_owned(database, lease)
                else:
                    is_good = leases.heartbeat(database, lease, lease_s)
                    next_beat_s = time.monotonic() + period_s
            except StepError:
                continue
            if not is_good:
                lost.set()
                return

    thread = threading.Thread(target=beat, name="lease-heartbeat", daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        done.set()
        thread.join()
