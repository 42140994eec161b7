"""What the faults of a run did, from its `chaos.jsonl`: one record a fault, in the order in which they struck."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steps.adapters.store import explained_os_errors
from steps.errors import DataError
from workflows.local.chaos_plan import LETHAL


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRecord:
    """One fault that struck. Times are UTC seconds since the epoch; `worker` is -1 for a step that doesn't fan out.

    Without `ended_at_s` the executor has not seen the pod's end: it was killed itself.
    """

    fault: int
    """Index in the plan."""
    kind: str
    step: str
    iteration: int
    worker: int
    attempt: int
    pod: str
    started_at_s: float
    struck_at_s: float
    killed_at_s: float | None
    """SIGKILL at the end of a notice."""
    released_at_s: float | None
    ended_at_s: float | None
    exit_code: int | None
    damaged: str

    @property
    def ended_the_pod(self) -> bool:
        """Whether the attempt had to be repeated. A step that is about to end when it is asked to ends with 0, which
        counts unless its pod was deleted."""
        return self.kind == "delete" or (self.kind in LETHAL and self.exit_code != 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosLog:
    records: tuple[FaultRecord, ...]
    missed: tuple[int, ...]
    """Faults (indices in the plan) whose pod had ended before their moment."""


def read_log(path: Path) -> ChaosLog:
    """Empty while no fault has come up; raise DataError when the log is damaged before its last line."""
    with explained_os_errors(f"can't read {path}"):
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    events: dict[int, dict[str, Any]] = {}
    missed = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line break was cut off by a kill
        try:
            event = json.loads(line)
            if event["event"] == "missed":
                missed.append(int(event["fault"]))
            else:
                events.setdefault(event["fault"], {})[event["event"]] = event
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}, line {number} can't be understood ({error}): remove the line") from None
    try:
        records = tuple(_record(fault, of_fault) for fault, of_fault in events.items())
    except KeyError as error:
        raise DataError(f"{path} can't be understood: no {error} in the events of a fault") from None
    return ChaosLog(records=records, missed=tuple(missed))


def _record(fault: int, events: Mapping[str, Any]) -> FaultRecord:
    struck = events["struck"]

    def time_of(event: str) -> float | None:
        return events[event]["at_s"] if event in events else None

    return FaultRecord(
        fault=fault,
        kind=struck["kind"],
        step=struck["step"],
        iteration=struck["iteration"],
        worker=struck["worker"],
        attempt=struck["attempt"],
        pod=struck["pod"],
        started_at_s=struck["started_at_s"],
        struck_at_s=struck["at_s"],
        killed_at_s=time_of("killed"),
        released_at_s=time_of("released"),
        ended_at_s=time_of("ended"),
        exit_code=events["ended"]["code"] if "ended" in events else None,
        damaged=events["damaged"]["what"] if "damaged" in events else "",
    )
