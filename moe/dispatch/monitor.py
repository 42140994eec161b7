"""What the exchanges of one process moved and how long they took, and a failed exchange's name for its place."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class ExchangeFailed(Exception):
    """An exchange between ranks could not be finished: who is gone, in which optimizer step, layer and phase.

    The process group is not usable afterwards; the ranks start again from the last checkpoint.
    """


@dataclass(slots=True)
class LayerExchange:
    """Sums over the exchanges of one layer since the last `take`."""

    seconds: float = 0.0
    """Of the host: GPU kernels that still run when a call returns are not in them."""
    sent_bytes: int = 0
    """Hidden states, gradients and metadata that left this rank for others."""
    sent_off_node_bytes: int = 0
    """The part of `sent_bytes` that left the node."""
    received_rows: int = 0
    """Routes computed on this rank, forward passes only."""
    dropped_routes: int = 0
    """Routes beyond an expert's capacity, of passes that are not repeated."""


@dataclass(slots=True)
class ExchangeMonitor:
    """Shared by the dispatcher of a model, which writes, and its trainer, which reads and says where it is."""

    step: int = 0
    """Optimizer step that is being computed, counted from 1; for messages."""
    layer: int = 0
    """Expert layer that is being computed, counted from 0."""
    place: str = ""
    """Where this rank is in an exchange just now: step, layer and phase; empty outside of them."""
    is_repeated: bool = False
    """Whether the pass that runs is done once more: its bytes and seconds count, its dropped routes do not."""
    explain: Callable[[Exception, str], Exception] | None = None
    """Turns a failed collective, and the place where it failed, into an ExchangeFailed that names who is gone."""
    _layers: dict[int, LayerExchange] = field(default_factory=dict)

    @contextmanager
    def exchange(self, phase: str, layer: int) -> Iterator[LayerExchange]:
        """Time one exchange of `layer` ("dispatch", "combine", "dispatch backward", ...), and explain its failure."""
        record = self.record(layer)
        started_s = time.perf_counter()
        self.place = f"optimizer step {self.step}, layer {layer}, {phase}"
        try:
            yield record
        except RuntimeError as error:
            explained = error if self.explain is None else self.explain(error, self.place)
            if explained is error:
                raise
            raise explained from error
        self.place = ""
        record.seconds += time.perf_counter() - started_s

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """What runs inside the block is done once more."""
        before, self.is_repeated = self.is_repeated, True
        try:
            yield
        finally:
            self.is_repeated = before

    def record(self, layer: int) -> LayerExchange:
        """The sums of `layer` since the last `take`, to be added to."""
        return self._layers.setdefault(layer, LayerExchange())

    def take(self) -> dict[int, LayerExchange]:
        """The sums of each layer since the last call."""
        layers, self._layers = self._layers, {}
        return layers
