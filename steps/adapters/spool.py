"""Tracking events as immutable JSONL objects in the store: the record of what the tracking server should show.

<run>/tracking/<name>.jsonl     events of one step, in the order of their names
<run>/tracking/sent/<name>      the server has them
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from steps.adapters.store import AlreadyExists, Store
from steps.errors import DataError

RunState = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A value at a step; the step of a training run is its policy version."""

    key: str
    value: float
    step: int
    timestamp_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Params:
    """Settings of the run; the first value of a name stays."""

    values: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tags:
    values: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A small text file, e.g. a configuration or a report."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredVersion:
    """A publication in the model registry under `name`; `aliases` (e.g. candidate, champion) move to it."""

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The training run started, was resumed, or ended."""

    state: RunState
    timestamp_ms: int


Event = Metric | Params | Tags | Artifact | RegisteredVersion | RunStatus

_KINDS: dict[str, type[Event]] = {
    "metric": Metric,
    "params": Params,
    "tags": Tags,
    "artifact": Artifact,
    "registered_version": RegisteredVersion,
    "run_status": RunStatus,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class Spool:
    """The spool of one run below `prefix`."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def write(self, name: str, events: Sequence[Event]) -> None:
        """Write the events once: when the step is run again, its first account stays."""
        lines = "".join(f"{_to_line(event)}\n" for event in events)
        try:
            self._store.put_bytes(self._key(name), lines.encode(), if_none_match=True)
        except AlreadyExists:
            return

    def pending(self) -> list[str]:
        """Names that aren't marked as sent, in order."""
        keys = [info.key.removeprefix(f"{self._prefix}/") for info in self._store.list(self._prefix)]
        sent = {key.removeprefix("sent/") for key in keys if key.startswith("sent/")}
        names = [key.removesuffix(".jsonl") for key in keys if key.endswith(".jsonl") and not key.startswith("sent/")]
        return sorted(name for name in names if name not in sent)

    def read(self, name: str) -> list[Event]:
        """Raises DataError naming the line that is malformed."""
        key = self._key(name)
        lines = self._store.get_bytes(key).decode().splitlines()
        return [_from_line(line, f"{self._store.uri_of(key)}:{number}") for number, line in enumerate(lines, 1)]

    def mark_sent(self, name: str, tracking_run_id: str, refused: Iterable[str]) -> None:
        mark = {"tracking_run_id": tracking_run_id, "refused": list(refused)}
        self._store.put_bytes(f"{self._prefix}/sent/{name}", json.dumps(mark).encode())

    def _key(self, name: str) -> str:
        if "/" in name:
            raise ValueError(f"spool name {name!r}: remove '/'")
        return f"{self._prefix}/{name}.jsonl"


def _to_line(event: Event) -> str:
    fields: dict[str, Any] = {"kind": _NAMES[type(event)], **asdict(event)}
    if isinstance(event, Metric) and not math.isfinite(event.value):
        fields["value"] = str(event.value)  # JSON has no NaN or infinity
    return json.dumps(fields, allow_nan=False)


def _from_line(line: str, where: str) -> Event:
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("kind")]
        if kind is Metric:
            fields["value"] = float(fields["value"])
        if kind is RegisteredVersion:
            fields["aliases"] = tuple(fields["aliases"])
        return kind(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{where}: not a tracking event ({error}); delete this object to go on without it") from error
