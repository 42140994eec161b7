"""What both ways through a library's `Buffer` share: its limits, its report, and the buffer's life."""

from collections.abc import Iterator
from typing import Any

from moe.config import MoeConfig
from moe.dispatch.base import ExpertGroup, ExpertShape, TransportReport
from moe.dispatch.buffer_limits import BufferLimits, check, common_problems, require_usable
from moe.dispatch.compact import library_details


class BufferDispatcher:
    """Base of the dispatchers over a library that has `Buffer`.

    `library` is the imported module; `requested` the configured name, for the report. The buffer is made at the first
    dispatch, by all ranks together. Raises ValueError without a process group, and for a library that is too old.
    """

    mode: str
    """Which of the library's kernels."""

    def __init__(
        self, library: Any, moe: MoeConfig, group: ExpertGroup, *, requested: str, limits: BufferLimits
    ) -> None:
        require_usable(library, group, requested)
        self._library = library
        self._moe = moe
        self._group = group
        self._requested = requested
        self._limits = limits
        self._buffer: Any = None

    def validate(self, shape: ExpertShape) -> None:
        """Raise ValueError, one line, for the first limit of these kernels that `shape` breaks."""
        casts = self._moe.exchange_dtype == "bfloat16"
        check(common_problems(shape, self._requested, casts=casts), self._limits)
        check(self._problems(shape), self._limits)

    def _problems(self, shape: ExpertShape) -> Iterator[str]:
        """Limits of these kernels alone."""
        raise NotImplementedError

    def transport_report(self) -> TransportReport:
        """The library that carries the tokens, the file it came from, and its settings."""
        details: dict[str, str | int | float] = {"flavour": f"{self._limits.library}, {self.mode}"}
        details |= library_details(self._library)
        details |= self._settings()
        if self._buffer is not None:
            details |= self._buffer_sizes()
        return TransportReport(requested=self._requested, observed=self._limits.backend, details=details)

    def _settings(self) -> dict[str, int]:
        """Settings of ours that these kernels use, for the report."""
        raise NotImplementedError

    def _buffer_sizes(self) -> dict[str, int]:
        """What the buffer takes, for the report."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the library's buffer; all ranks of the group call it."""
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer = None
