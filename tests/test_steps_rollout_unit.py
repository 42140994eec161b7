"""A rollout unit is sampled batch by batch and stored group by group, with an engine of the test's own."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from moe.config import SamplingConfig
from moe.sampler import SampledResponse, SamplingStopped
from steps import rollout_unit
from steps.adapters.buffer import commit_groups, unit_samples
from steps.adapters.database import Database
from steps.adapters.lease_history import UnitLeaseRow, list_unit_leases
from steps.adapters.leases import return_lease
from steps.adapters.local_store import LocalStore
from steps.adapters.stragglers import lease_backup
from steps.config import RolloutConfig, RunConfig
from steps.entrypoint import StepContext
from steps.environment import StepEnvironment
from steps.errors import Interrupted
from steps.interruption import Interruption
from steps.records import Lease, Prompt
from steps.rollout_unit import RolloutCounts, RolloutUnit, cut
from tests.experience import make_sample, plan, roll_out, take, worker

GROUP_SIZE = 2
UNIT = ["a", "b", "c", "d", "e"]


@dataclass
class ListedEngine:
    """Answers with the row's seed, keeps the batches that it was asked for; `during` is called with their numbers."""

    can_record_routing: ClassVar[bool] = False
    streams_responses: bool = False
    policy_version: int = 0
    during: Callable[[int], None] = lambda number: None
    asked: list[list[str]] = field(default_factory=list)
    give_up_after: int | None = None
    """Responses of a stream that come before SamplingStopped."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, response_ids: Sequence[int]) -> str:
        return str(response_ids)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingConfig,
        *,
        stop: Callable[[], bool],
        on_response: Callable[[int, SampledResponse], None] | None = None,
        **_: Any,
    ) -> list[SampledResponse]:
        self.asked.append([chr(prompt[0]) for prompt in prompts[::GROUP_SIZE]])
        self.during(len(self.asked))
        if stop():
            raise SamplingStopped("told to", 7)
        responses = [SampledResponse([seed % 100, 1], [-0.5, -0.5], "stop") for seed in seeds]
        for row, response in enumerate(responses if on_response is not None else []):
            if row == self.give_up_after:
                raise SamplingStopped("told to", 7)
            on_response(row, response)
        return responses


@pytest.fixture
def context(db: Database, tmp_path: Path) -> StepContext:
    plan(db, [UNIT, ["z"]])
    environment = StepEnvironment(
        store_uri=str(tmp_path),
        database_url="",
        tracking_uri="",
        outputs_dir=tmp_path,
        progress_file=None,
        cache_dir=tmp_path,
        pod="pod",
        node="node",
        capacity_type="local",
        attempt=0,
        workflow="",
    )
    made = StepContext(
        step="rollout",
        run_id="run-1",
        environment=environment,
        store=LocalStore(tmp_path),
        interruption=Interruption(),
        database=db,
        attempt_id=1,
        metrics={},
    )
    made.__dict__["config"] = RunConfig(rollout=RolloutConfig(group_size=GROUP_SIZE, prompts_per_batch=2))
    return made


def unit_of(
    context: StepContext, engine: ListedEngine, lease: Lease, lost: threading.Event | None = None
) -> RolloutUnit:
    prompts = {uid: Prompt(uid=uid, text=uid, answer="") for uid in UNIT}
    return RolloutUnit(context, engine, prompts, lease, lost or threading.Event(), RolloutCounts())  # type: ignore[arg-type]


def history(context: StepContext) -> list[UnitLeaseRow]:
    return list_unit_leases(context.database, "run-1")


def stored(context: StepContext) -> set[str]:
    return {sample.prompt_uid for sample in unit_samples(context.database, "run-1", 1, UNIT)}


def test_a_unit_is_cut_into_the_same_batches_each_time() -> None:
    assert cut("abcde", 2) == [("a", "b"), ("c", "d"), ("e",)]
    assert cut("abcde", 0) == cut("abcde", 9) == [("a", "b", "c", "d", "e")]


def test_each_batch_is_stored_before_the_next_is_sampled(context: StepContext) -> None:
    seen: list[set[str]] = []
    engine = ListedEngine(during=lambda number: seen.append(stored(context)))
    unit = unit_of(context, engine, take(context.database, "rollout"))
    assert unit.sample()
    assert engine.asked == [["a", "b"], ["c", "d"], ["e"]]
    assert seen == [set(), {"a", "b"}, {"a", "b", "c", "d"}]
    assert (unit.counts.samples, unit.counts.tokens, unit.counts.duplicate_samples) == (10, 20, 0)


def test_a_replacement_samples_only_batches_with_missing_groups_as_the_same_batches(context: StepContext) -> None:
    first = take(context.database, "rollout", lease_s=0.0)
    drawn = [sample for sample in roll_out(first) if sample.prompt_uid in ("a", "b", "c")]
    commit_groups(context.database, first, drawn)
    engine = ListedEngine()
    assert unit_of(context, engine, take(context.database, "rollout")).sample()
    assert engine.asked == [["c", "d"], ["e"]], "c is sampled again: a response depends on its batch"
    assert [(row.samples, row.duplicate_samples) for row in history(context)] == [(6, 0), (4, 2)]


def test_a_backup_begins_at_the_other_end(context: StepContext) -> None:
    owner = take(context.database, "rollout", lease_s=3600.0)
    other = take(context.database, "rollout", lease_s=3600.0, by=worker(1, 2))
    commit_groups(context.database, other, [make_sample("z", index) for index in range(2)])
    backup = lease_backup(context.database, "run-1", 1, worker(2, 3), 3600.0, 0.0, 0.0)
    assert backup is not None and backup.unit == owner.unit
    helping = ListedEngine()

    def let_the_backup_work(number: int) -> None:
        if number == 1:
            assert unit_of(context, helping, backup).sample()

    engine = ListedEngine(during=let_the_backup_work)
    unit = unit_of(context, engine, owner)
    assert not unit.sample()
    assert helping.asked == [["e"], ["c", "d"], ["a", "b"]]
    assert engine.asked == [["a", "b"]]
    assert (unit.counts.samples, unit.counts.duplicate_samples) == (0, 4)


def test_no_batch_is_begun_after_a_stop_and_what_is_whole_is_stored(context: StepContext) -> None:
    engine = ListedEngine(during=lambda number: number == 2 and context.interruption.request("SIGTERM"))
    lease = take(context.database, "rollout")
    with pytest.raises(Interrupted, match="interrupted by SIGTERM"):
        unit_of(context, engine, lease).sample()
    assert engine.asked == [["a", "b"], ["c", "d"]]
    assert stored(context) == {"a", "b", "c", "d"}
    assert return_lease(context.database, lease)


def test_a_batch_is_abandoned_once_the_drain_budget_is_spent(context: StepContext) -> None:
    engine = ListedEngine(during=lambda number: number == 2 and context.interruption.request("spot", time_left_s=-1))
    unit = unit_of(context, engine, take(context.database, "rollout"))
    with pytest.raises(Interrupted, match="unit 0 abandoned after the drain budget"):
        unit.sample()
    assert stored(context) == {"a", "b"}
    assert (unit.counts.abandoned_tokens, history(context)[0].abandoned_tokens) == (7, 7)


def test_a_worker_that_lost_its_lease_leaves_the_unit(context: StepContext) -> None:
    lease, lost = take(context.database, "rollout", lease_s=0.0), threading.Event()

    def lose(number: int) -> None:
        take(context.database, "rollout", by=worker(1, 2))
        lost.set()

    unit = unit_of(context, ListedEngine(during=lose), lease, lost)
    assert not unit.sample()
    assert stored(context) == set()
    assert history(context)[0].abandoned_tokens == 7


def test_a_worker_learns_by_its_commit_that_the_lease_is_lost(context: StepContext) -> None:
    lease = take(context.database, "rollout", lease_s=0.0)
    engine = ListedEngine(during=lambda number: take(context.database, "rollout", by=worker(number, 1 + number)))
    assert not unit_of(context, engine, lease).sample()
    assert engine.asked == [["a", "b"]], "the heartbeat's word is not waited for"
    assert history(context)[0].abandoned_tokens == 8


def test_a_stream_is_stored_while_it_comes_and_only_missing_prompts_are_sampled(
    context: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_unit, "COMMIT_EVERY_S", 0.0)
    lease = take(context.database, "rollout")
    engine = ListedEngine(streams_responses=True, give_up_after=3)
    context.interruption.request("SIGTERM")
    unit = unit_of(context, engine, lease)
    object.__setattr__(context.config.rollout, "drain_budget_s", 3600.0)
    with pytest.raises(Interrupted, match="abandoned"):
        unit.sample()
    assert stored(context) == {"a"}
    assert unit.counts.abandoned_tokens == 7 + 2, "what the engine dropped, and one response of b"
    assert return_lease(context.database, lease)
    context.interruption.notices.clear()
    again = ListedEngine(streams_responses=True)
    assert unit_of(context, again, take(context.database, "rollout")).sample()
    assert again.asked == [["b"], ["c", "d"], ["e"]]
    assert [(row.samples, row.duplicate_samples) for row in history(context)] == [(2, 0), (8, 0)]
