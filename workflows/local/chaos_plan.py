"""A chaos plan: which pod of which step is disturbed, when and how. A TOML file, or a pure function of a seed.

[[fault]]
step = "rollout"      # template of a container; `init` and `summary` are the campaign's, with iteration 0
iteration = 2
worker = 0            # rollout and reward only
attempt = 0           # of this pod, counted from 0 over all submissions of the run
kind = "sigkill"
at_progress = 0.5     # when the step has reported this fraction of its work, at its start without this
after_s = 0.4         # seconds after that
"""

import math
import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import Field, TypeAdapter, ValidationError

from steps.errors import ConfigError

Step = Literal["init", "plan", "rollout", "reward", "flush", "train", "publish", "evaluate", "report", "summary"]
Kind = Literal["sigkill", "sigterm", "notice", "delete", "freeze", "database", "cache", "checkpoint"]
"""notice: of `seconds`, then SIGKILL, as a Spot reclaim; freeze: SIGSTOP for `seconds`; database: the SQLite file is
locked for `seconds`; cache, checkpoint: SIGKILL, and before the next attempt the node's cache or the newest trainer
state inside the update is damaged."""

STEPS: tuple[Step, ...] = get_args(Step)
KINDS: tuple[Kind, ...] = get_args(Kind)
FANNED_OUT = ("rollout", "reward")
OF_THE_CAMPAIGN = ("init", "summary")
TIMED = ("notice", "freeze", "database")
LETHAL = frozenset(KINDS) - {"freeze", "database"}
DAMAGES = ("wipe", "flip")
MAX_FAULTS = 2
"""Faults that a random plan gives one step: a template retries four times, and other causes need some of those."""
RANDOM = "random:"
_RANDOM_SECONDS = (0.2, 2.0)
# Seconds within which a random fault strikes: about as long as the step takes in the default campaign.
_TYPICAL_S = {
    "init": 4.0,
    "plan": 0.25,
    "rollout": 1.2,
    "reward": 0.5,
    "flush": 0.3,
    "train": 2.0,
    "publish": 0.3,
    "evaluate": 0.4,
    "report": 0.5,
    "summary": 0.5,
}
_BY_PROGRESS = {"rollout": 0.3, "train": 0.5}
"""Share of a step's random faults that strike at a fraction of its work rather than at a time."""
_LATER_S = 0.3
_RANDOM_KINDS: dict[str, tuple[Kind, ...]] = {
    "rollout": ("sigkill", "sigkill", "sigterm", "notice", "notice", "delete", "freeze", "database"),
    "reward": ("sigkill", "sigkill", "sigterm", "notice", "delete", "freeze", "database"),
    "train": ("sigkill", "sigkill", "sigterm", "notice", "delete", "freeze", "cache", "checkpoint"),
}
_OTHER_KINDS: tuple[Kind, ...] = ("sigkill", "sigkill", "sigterm", "delete", "freeze", "cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One disturbance of one attempt of a pod; `worker` is -1 for a step that doesn't fan out."""

    __pydantic_config__ = {"extra": "forbid", "strict": False}

    step: Step
    iteration: Annotated[int, Field(ge=0)]
    worker: Annotated[int, Field(ge=-1)] = -1
    attempt: Annotated[int, Field(ge=0)] = 0
    kind: Kind
    after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds after the start of the pod's process, or after `at_progress` of its work."""
    at_progress: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of its work that the step has reported."""
    seconds: Annotated[float, Field(ge=0, le=600, allow_inf_nan=False)] = 1.0
    """Of a notice, until SIGKILL; of a freeze; of a database lock."""
    damage: Literal["wipe", "flip"] = "wipe"
    """Of a cache: everything is deleted, or one byte of a cached file is changed."""

    @property
    def target(self) -> tuple[str, int, int, int]:
        return self.step, self.iteration, self.worker, self.attempt


def read_plan(option: str, *, iterations: int, rollout_workers: int, reward_workers: int) -> tuple[Fault, ...]:
    """The faults of `--chaos OPTION`: a TOML file, or random:SEED:RATE. ConfigError names what is wrong, and where."""
    workers = {"rollout": rollout_workers, "reward": reward_workers}
    if option.startswith(RANDOM):
        seed, rate = _random_parameters(option)
        return tuple(random_plan(seed, rate, iterations, workers))
    try:
        text = Path(option).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"--chaos {option!r}: {reason}; give a TOML file or random:SEED:RATE") from None
    faults = parse_plan(text, option)
    for index, fault in enumerate(faults):
        if fault.iteration > iterations:
            raise ConfigError(f"{option}: fault[{index}].iteration = {fault.iteration}: the run has {iterations}")
        if fault.worker >= workers.get(fault.step, 1):
            number = f"fault[{index}].worker = {fault.worker}"
            raise ConfigError(f"{option}: {number}: the run has {workers[fault.step]}, counted from 0")
    return faults


def _random_parameters(option: str) -> tuple[int, float]:
    seed, _, rate = option.removeprefix(RANDOM).partition(":")
    try:
        numbers = int(seed), float(rate)
    except ValueError:
        numbers = 0, math.nan
    if not 0 <= numbers[1] <= 1:
        raise ConfigError(f"--chaos {option!r}: write random:SEED:RATE, as in random:7:0.1 (faults a pod, at most 1)")
    return numbers


def random_plan(seed: int, rate: float, iterations: int, workers: dict[str, int]) -> Iterator[Fault]:
    """Each pod is disturbed with probability `rate`, and so is the attempt that replaces it, at most MAX_FAULTS times.

    Every decision depends on (seed, iteration, step, worker, attempt) alone.
    """
    for iteration in range(iterations + 1):
        for step in STEPS:
            if (iteration == 0) != (step in OF_THE_CAMPAIGN):
                continue
            for worker in range(workers[step]) if step in workers else (-1,):
                for attempt in range(MAX_FAULTS):
                    fault = _random_fault(random.Random(f"{seed}/{iteration}/{step}/{worker}/{attempt}"), step, rate)
                    if fault is None:
                        break
                    yield Fault(step=step, iteration=iteration, worker=worker, attempt=attempt, **fault)
                    if fault["kind"] not in LETHAL:
                        break


def _random_fault(source: random.Random, step: Step, rate: float) -> dict[str, Any] | None:
    if source.random() >= rate:
        return None
    fault: dict[str, Any] = {"kind": source.choice(_RANDOM_KINDS.get(step, _OTHER_KINDS))}
    by_progress = source.random() < _BY_PROGRESS.get(step, 0.0)
    fraction, later_s = source.random(), source.uniform(0.0, _LATER_S)
    if by_progress:
        fault |= {"at_progress": round(fraction, 2), "after_s": round(later_s, 3)}
    else:
        fault["after_s"] = round(fraction * _TYPICAL_S[step], 3)
    seconds = round(source.uniform(*_RANDOM_SECONDS), 2)
    damage = source.choice(DAMAGES)
    if fault["kind"] in TIMED:
        fault["seconds"] = seconds
    if fault["kind"] == "cache":
        fault["damage"] = damage
    return fault


def parse_plan(text: str, source: str) -> tuple[Fault, ...]:
    """The faults of a plan's text; ConfigError, one line, names the first wrong field."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: not TOML: {error}") from None
    unknown = sorted(set(document) - {"fault"})
    if unknown:
        raise ConfigError(f"{source}: {unknown[0]!r}: unknown; a plan is a list of [[fault]] tables")
    try:
        faults = TypeAdapter(tuple[Fault, ...]).validate_python(document.get("fault", []))
    except ValidationError as error:
        raise ConfigError(f"{source}: {_described(error)}") from None
    _check(faults, source)
    for index, (fault, table) in enumerate(zip(faults, document.get("fault", []), strict=True)):
        for name, kinds in (("seconds", TIMED), ("damage", ("cache",))):
            if name in table and fault.kind not in kinds:
                raise ConfigError(f"{source}: fault[{index}].{name}: is for {', '.join(kinds)}, not {fault.kind}")
    return faults


def _described(error: ValidationError) -> str:
    first = error.errors()[0]
    index, *names = first["loc"] or (0,)
    where = "".join(f".{name}" for name in names)
    return f"fault[{index}]{where} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _check(faults: Sequence[Fault], source: str) -> None:
    """What no single field shows."""
    seen: dict[tuple[str, int, int, int], int] = {}
    for index, fault in enumerate(faults):
        problem = _problem(fault)
        if fault.target in seen:
            problem = f"the same attempt as fault[{seen[fault.target]}]; one fault an attempt"
        if problem:
            raise ConfigError(f"{source}: fault[{index}]: {problem}")
        seen[fault.target] = index


def _problem(fault: Fault) -> str:
    if (fault.worker >= 0) != (fault.step in FANNED_OUT):
        wanted = "a worker, counted from 0" if fault.step in FANNED_OUT else "no worker: it is one pod"
        return f"step {fault.step} takes {wanted}"
    if (fault.iteration == 0) != (fault.step in OF_THE_CAMPAIGN):
        wanted = "iteration = 0" if fault.step in OF_THE_CAMPAIGN else "an iteration, counted from 1"
        return f"step {fault.step} takes {wanted}"
    if fault.kind == "checkpoint" and fault.step != "train":
        return "kind checkpoint is for step train"
    return ""


def plan_toml(faults: Sequence[Fault]) -> str:
    """The plan as a file that `read_plan` reads back to the same faults."""
    tables = [asdict(fault) for fault in faults]
    for table in tables:
        if table["worker"] < 0:
            del table["worker"]
        if not table["at_progress"]:
            del table["at_progress"]
        if table["kind"] not in TIMED:
            del table["seconds"]
        if table["kind"] != "cache":
            del table["damage"]
    return tomli_w.dumps({"fault": tables})
