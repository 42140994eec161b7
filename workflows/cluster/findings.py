"""What `moerl doctor` says about one thing: its state, what was seen, and how to mend it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from workflows.cluster.client import Forbidden, NotFound, NotInstalled

State = Literal["ok", "warn", "fail", "skip"]
"""fail: a run can't work. warn: it can, but not with everything. skip: our rights don't show it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the doctor's report; `mend` is empty where there is nothing to do."""

    check: str
    state: State
    detail: str
    mend: str = ""


def ok(check: str, detail: str) -> Finding:
    return Finding(check=check, state="ok", detail=detail)


def warn(check: str, detail: str, mend: str) -> Finding:
    return Finding(check=check, state="warn", detail=detail, mend=mend)


def fail(check: str, detail: str, mend: str) -> Finding:
    return Finding(check=check, state="fail", detail=detail, mend=mend)


def skip(check: str, detail: str, mend: str = "") -> Finding:
    return Finding(check=check, state="skip", detail=detail, mend=mend)


def findings_of(check: str, look: Callable[[], Iterable[Finding]], mend: str) -> Iterator[Finding]:
    """What `look` finds; what it may not see is skipped, what is not there fails with `mend`.

    A cluster that can't be reached ends the examination: ConnectionLost is the caller's.
    """
    try:
        yield from look()
    except Forbidden as error:
        yield skip(check, f"your rights don't show it: {str(error).split(': ask for')[0]}")
    except (NotFound, NotInstalled) as error:
        yield fail(check, str(error), mend)
