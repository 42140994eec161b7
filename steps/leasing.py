"""The loop of a worker: lease a unit, keep the lease alive, commit; until nothing is left and nothing outstanding."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from steps.adapters import leases
from steps.adapters.database import Database
from steps.entrypoint import StepContext
from steps.errors import Interrupted, StepError
from steps.records import Lease, UnitKind

IDLE_POLL_S = 0.05
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
) -> int:
    """Call `work` for each unit that this worker gets; it returns False when the lease was lost meanwhile.

    The event that `work` gets is set once it is known that the lease was lost: nobody needs the rest of the work.
    `close` is called before each look for a unit; it may end units that nobody shall wait for.

    Returns the number of units committed. While others hold the last units this worker waits: one of them may be lost.
    Raises Interrupted, with the lease returned, when the platform asks to stop.
    """
    database, owner, committed = context.database, f"{context.environment.pod}/{worker}", 0
    while True:
        context.interruption.check()
        if close is not None:
            close()
        lease = leases.lease_unit(database, context.run_id, iteration, kind, worker=owner, lease_s=lease_s)
        if lease is None:
            if leases.outstanding(database, context.run_id, iteration, kind) == 0:
                return committed
            context.interruption.wait(IDLE_POLL_S)
            continue
        if lease.attempt > 1:
            context.say(f"unit {lease.unit.unit}: lease {lease.attempt}, an earlier one was lost or returned")
        try:
            with _kept_alive(database, lease, lease_s) as lost:
                committed += work(lease, lost)
        except Interrupted:
            leases.return_lease(database, lease)
            raise


@contextmanager
def _kept_alive(database: Database, lease: Lease, lease_s: float) -> Iterator[threading.Event]:
    """Heartbeat in the background; the event is set when the lease was lost.

    Nothing depends on the event being set in time: the commit is fenced by the token.
    """
    done, lost = threading.Event(), threading.Event()

    def beat() -> None:
        while not done.wait(lease_s / HEARTBEATS_PER_LEASE):
            try:
                if not leases.heartbeat(database, lease, lease_s):
                    lost.set()
                    return
            except StepError:
                continue

    thread = threading.Thread(target=beat, name="lease-heartbeat", daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        done.set()
        thread.join()
