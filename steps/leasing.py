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
    work: Callable[[Lease], bool],
) -> int:
    """Call `work` for each unit that this worker gets; it returns False when the lease was lost meanwhile.

    Returns the number of units committed. While others hold the last units this worker waits: one of them may be lost.
    Raises Interrupted, with the lease returned, when the platform asks to stop.
    """
    database, owner, committed = context.database, f"{context.environment.pod}/{worker}", 0
    while True:
        context.interruption.check()
        lease = leases.lease_unit(database, context.run_id, iteration, kind, worker=owner, lease_s=lease_s)
        if lease is None:
            if leases.outstanding(database, context.run_id, iteration, kind) == 0:
                return committed
            context.interruption.wait(IDLE_POLL_S)
            continue
        if lease.attempt > 1:
            context.say(f"unit {lease.unit.unit}: lease {lease.attempt}, an earlier one was lost or returned")
        try:
            with _kept_alive(database, lease, lease_s):
                committed += work(lease)
        except Interrupted:
            leases.return_lease(database, lease)
            raise


@contextmanager
def _kept_alive(database: Database, lease: Lease, lease_s: float) -> Iterator[None]:
    """Heartbeat in the background. A lost lease or database needs no alarm here: the commit is fenced by the token."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(lease_s / HEARTBEATS_PER_LEASE):
            try:
                if not leases.heartbeat(database, lease, lease_s):
                    return
            except StepError:
                continue

    thread = threading.Thread(target=beat, name="lease-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
