"""The events of DeepEP 2 (deep_ep/utils/event.py of 2.1.0), which deliver the results of asynchronous calls.

Until such an event is waited for, the results are poison: NaN, or an id that belongs to no expert.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

POISON_ID = -(2**62)


class EventHandle:
    """`deep_ep._C.EventHandle`: an event of the compute stream, or one that delivers an asynchronous result."""

    def __init__(self, deliver: Callable[[], None] | None = None) -> None:
        self._deliver = deliver

    def current_stream_wait(self) -> None:
        if self._deliver is not None:
            self._deliver()


class EventOverlap:
    """`deep_ep.utils.event.EventOverlap`; `event` is None after a synchronous call, which may not be waited for."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        assert self.event is not None
        self.event.current_stream_wait()
        if release_handle:
            self.event = None


def deliver(results: tuple[Tensor | None, ...], asynchronous: bool) -> tuple[tuple[Any, ...], EventOverlap]:
    """Results as they are after a synchronous call; after an asynchronous one poison, until the event is waited for."""
    if not asynchronous:
        return results, EventOverlap(None)
    promised = tuple(None if real is None else _poison(real) for real in results)

    def fill() -> None:
        for real, promise in zip(results, promised, strict=True):
            if real is not None and promise is not None:
                promise.copy_(real)

    return promised, EventOverlap(EventHandle(fill))


def _poison(real: Tensor) -> Tensor:
    return torch.full_like(real, float("nan") if real.is_floating_point() else POISON_ID)
