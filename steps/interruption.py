"""Interruption notice -> drain: the platform says stop, the step finishes or abandons what runs, and exits with 75.

SIGTERM is the signal that every platform sends (kubelet, Argo, Karpenter's drain); other notices are further sources of
the same `Interruption`.
"""

import signal
import time
from types import FrameType

from steps.errors import Interrupted

POLL_S = 0.02


class Interruption:
    """Remembers that a stop was asked for, and since when. Handlers only set plain attributes: they are re-entrant."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.requested_at_s: float | None = None

    def install(self) -> None:
        """Catch SIGTERM in this process (main thread only)."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)

    def request(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self.requested_at_s = time.monotonic()

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def budget_spent(self, budget_s: float) -> bool:
        """True once a stop was requested and `budget_s` seconds have passed since."""
        return self.requested_at_s is not None and time.monotonic() - self.requested_at_s >= budget_s

    def check(self) -> None:
        """Raise Interrupted when a stop was requested."""
        if self.requested:
            raise Interrupted(f"interrupted by {self.reason}; run the same command again to continue")

    def wait(self, seconds: float) -> None:
        """Sleep, but raise Interrupted as soon as a stop is requested."""
        deadline = time.monotonic() + seconds
        while True:
            self.check()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return
            time.sleep(min(POLL_S, remaining_s))
