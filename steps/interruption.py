"""Interruption notice -> drain: the platform says stop, the step finishes or abandons what runs, and exits with 75.

SIGTERM is the signal that every platform sends (kubelet, Argo, Karpenter's drain); other notices (`steps.notices`) are
further sources of the same `Interruption`.
"""

import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from steps.errors import Interrupted

POLL_S = 0.02

NoticeKind = Literal["stop", "rebalance", "scheduled"]
"""stop: drain now. rebalance: this place may be taken soon, so leave when the running unit ends; a trainer saves its
state and goes on. scheduled: this place ends at a known time, so begin nothing that can't end before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One thing that the platform said."""

    kind: NoticeKind
    reason: str
    """Who said it: SIGTERM, spot, rebalance, ..."""
    noticed_s: float
    """`time.monotonic()` when it was seen."""
    deadline_s: float | None = None
    """`time.monotonic()` when this place ends; None when nobody said."""
    binding: bool = True
    """False: known before this process began, which shall work nevertheless."""

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.noticed_s

    @property
    def time_left_s(self) -> float | None:
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()


class Interruption:
    """Remembers what was asked for, and since when. Handlers only set plain attributes: they are re-entrant."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self._checkpoints_asked = 0

    def install(self) -> None:
        """Catch SIGTERM in this process (main thread only)."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)

    def request(
        self, reason: str, kind: NoticeKind = "stop", time_left_s: float | None = None, *, binding: bool = True
    ) -> Notice | None:
        """Take a notice in; the new one, or None when this one is known. The first time counts, never a later one."""
        if any((notice.kind, notice.reason) == (kind, reason) for notice in self.notices):
            return None
        now_s = time.monotonic()
        deadline_s = None if time_left_s is None else now_s + time_left_s
        notice = Notice(kind=kind, reason=reason, noticed_s=now_s, deadline_s=deadline_s, binding=binding)
        self.notices.append(notice)
        return notice

    @property
    def _stop(self) -> Notice | None:
        return next((notice for notice in self.notices if notice.kind == "stop"), None)

    @property
    def reason(self) -> str | None:
        """Why to stop now; None while nobody asked."""
        return None if self._stop is None else self._stop.reason

    @property
    def requested(self) -> bool:
        """Stop now."""
        return self._stop is not None

    @property
    def leaving(self) -> bool:
        """Begin no new unit of work: stop was asked for, or is to be expected."""
        return any(notice.kind in ("stop", "rebalance") and notice.binding for notice in self.notices)

    def checkpoint_requested(self) -> bool:
        """True once after a notice that asks for a saved state but not for an end."""
        asked = sum(notice.kind != "stop" for notice in self.notices)
        is_new, self._checkpoints_asked = asked > self._checkpoints_asked, asked
        return is_new

    def time_left_s(self) -> float | None:
        """Seconds until this place ends, by what was noticed; None when no end is known."""
        left = [notice.time_left_s for notice in self.notices if notice.time_left_s is not None]
        return min(left, default=None)

    def can_finish(self, seconds: float) -> bool:
        """False when a noticed end comes before something that takes `seconds` could end."""
        left_s = self.time_left_s()
        return left_s is None or seconds < left_s

    def budget_spent(self, budget_s: float) -> bool:
        """True once a stop was requested and `budget_s` seconds have passed since, or its deadline has come."""
        stop = self._stop
        return stop is not None and (stop.age_s >= budget_s or not self.can_finish(0.0))

    def check(self) -> None:
        """Raise Interrupted when a stop was requested."""
        if self.requested:
            raise Interrupted(f"interrupted by {self.reason}; run the same command again to continue")

    def check_begin(self, seconds: float) -> None:
        """Raise Interrupted when no new unit of work, of about `seconds`, shall be begun here."""
        self.check()
        if self.leaving or not self.can_finish(seconds):
            reasons = ", ".join(notice.reason for notice in self.notices)
            raise Interrupted(f"leaving before the next unit ({reasons}); run the same command again to continue")

    def wait(self, seconds: float) -> None:
        """Sleep, but raise Interrupted as soon as a stop is requested."""
        deadline = time.monotonic() + seconds
        while True:
            self.check()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return
            time.sleep(min(POLL_S, remaining_s))
