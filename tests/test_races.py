"""Two processes do the same work at the same time, hundreds of times: there is one outcome.

On a directory with SQLite, and on S3 with PostgreSQL. Whole steps race in tests/test_races_steps.py.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steps.adapters import ledger
from steps.adapters.buffer import (
    batch_samples,
    commit_groups,
    complete_reward,
    finish_batch,
    select_batch,
    unit_samples,
)
from steps.adapters.database import Database, migrate
from steps.adapters.leases import lease_unit, return_lease
from steps.adapters.publications import move_pointer, read_pointer, upload_folder
from steps.adapters.publications_cache import fetch_folder
from steps.adapters.publications_delta import Parent, upload_delta
from steps.adapters.publications_manifest import read_manifest
from steps.adapters.spool import RunStatus, Spool
from steps.adapters.store import Store
from steps.records import Evaluation, Lease, Publication
from tests.experience import complete_next_reward, complete_next_rollout, make_reward, plan, roll_out, take, worker
from tests.fixtures_s3 import use_server
from tests.races import Services, race, winners

RUN = "run-1"
KINDS = ("directory and SQLite", "S3 and PostgreSQL")
UNIT = ["a", "b"]


@pytest.fixture(params=KINDS)
def services(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Services]:
    if request.param == KINDS[0]:
        url = f"sqlite:///{tmp_path}/moerl.db"
        migrate(url)
        yield Services(f"{tmp_path}/store", url, rounds=20)
    else:
        bucket = use_server(request.getfixturevalue("radosgw_server"), monkeypatch)
        yield Services(f"s3://{bucket}/races", request.getfixturevalue("postgres_url"), rounds=12)


@pytest.fixture
def db(services: Services) -> Iterator[Database]:
    database = services.open()[1]
    ledger.create_run(database, RUN, "{}", "hash")
    yield database
    database.close()


@pytest.fixture
def store(services: Services) -> Store:
    return services.open()[0]


def test_two_workers_never_get_one_unit(services: Services, db: Database) -> None:
    for number in range(services.rounds):
        plan(db, [[f"{number}-a"], [f"{number}-b"], [f"{number}-c"]], iteration=number + 1)

    def lease(me: int, round_: int, _: Store, database: Database) -> list[int]:
        mine = []
        while (taken := lease_unit(database, RUN, round_ + 1, "rollout", worker(me), 60.0)) is not None:
            mine.append(taken.unit.unit)
        return mine

    for answers in race(services, lease, contestants=3):
        assert sorted(unit for mine in answers for unit in mine) == [0, 1, 2]


def contested_leases(db: Database, rounds: int) -> list[tuple[Lease, Lease]]:
    """Of each iteration the lease of a worker that was given up, and that of the worker in its place."""
    pairs = []
    for number in range(rounds):
        plan(db, [UNIT], iteration=number + 1)
        late = take(db, "rollout", iteration=number + 1, lease_s=0.0)
        pairs.append((late, take(db, "rollout", iteration=number + 1, by=worker(1, 2))))
    return pairs


def test_a_late_owner_and_the_new_one_store_each_sample_once(services: Services, db: Database) -> None:
    pairs = contested_leases(db, services.rounds)

    def commit(me: int, round_: int, _: Store, database: Database) -> tuple[int, bool]:
        lease = pairs[round_][me]
        outcome = commit_groups(database, lease, roll_out(lease, [0] * (me + 1)))
        return outcome.committed, outcome.lost

    for round_, answers in enumerate(race(services, commit)):
        assert answers == [(0, True), (4, False)]
        stored = unit_samples(db, RUN, round_ + 1, UNIT)
        assert [len(sample.response_ids_T) for sample in stored] == [2] * 4
    counted = {row.token: row.samples for row in ledger.list_unit_leases(db, RUN)}
    assert [(counted[late.token], counted[new.token]) for late, new in pairs] == [(0, 4)] * services.rounds


def test_a_commit_and_the_loss_of_its_lease_are_one_after_the_other(services: Services, db: Database) -> None:
    """A worker commits while its successor takes its unit: either all of it counts, or the successor has the unit."""
    firsts = []
    for number in range(services.rounds):
        plan(db, [UNIT], iteration=number + 1)
        firsts.append(take(db, "rollout", iteration=number + 1, by=worker(0, 1)))

    def commit_or_take(me: int, round_: int, _: Store, database: Database) -> tuple[int, bool]:
        if me == 0:
            return commit_groups(database, firsts[round_], roll_out(firsts[round_])).committed, False
        return 0, lease_unit(database, RUN, round_ + 1, "rollout", worker(0, 2), 60.0) is not None

    for round_, ((committed, _), (_, taken)) in enumerate(race(services, commit_or_take)):
        assert (committed, taken) in ((4, False), (0, True))
        assert len(unit_samples(db, RUN, round_ + 1, UNIT)) == committed


def test_two_scores_of_one_unit_leave_one_workers_rewards(services: Services, db: Database) -> None:
    pairs = []
    for number in range(services.rounds):
        plan(db, [UNIT], iteration=number + 1)
        complete_next_rollout(db, iteration=number + 1)
        late = take(db, "reward", iteration=number + 1, lease_s=0.0)
        pairs.append((late, take(db, "reward", iteration=number + 1, by=worker(1, 2))))

    def score(me: int, round_: int, _: Store, database: Database) -> bool:
        scores = [make_reward(uid, index, value=float(me)) for uid in UNIT for index in range(2)]
        return complete_reward(database, pairs[round_][me], scores)

    for round_, answers in enumerate(race(services, score)):
        assert answers == [False, True]
        select_batch(db, RUN, round_ + 1, 0, max_staleness=9)
        assert {item.reward.value for item in batch_samples(db, RUN, round_ + 1)} == {1.0}


def test_a_unit_given_back_while_another_worker_looks_is_had_by_one(services: Services, db: Database) -> None:
    held = []
    for number in range(services.rounds):
        plan(db, [UNIT], iteration=number + 1)
        held.append(take(db, "rollout", iteration=number + 1))

    def give_or_take(me: int, round_: int, _: Store, database: Database) -> bool:
        if me == 0:
            return return_lease(database, held[round_])
        return lease_unit(database, RUN, round_ + 1, "rollout", worker(me), 60.0) is not None

    for round_, (given, *takers) in enumerate(race(services, give_or_take, contestants=3)):
        assert given
        left = lease_unit(db, RUN, round_ + 1, "rollout", worker(9), 60.0)
        assert sum(takers) + (left is not None) == 1


def test_two_plans_with_other_prompts_are_one_plan(services: Services, db: Database) -> None:
    def make(me: int, round_: int, _: Store, database: Database) -> Any:
        return plan(database, [[f"{me}-{round_}-{unit}"] for unit in range(3)], iteration=round_ + 1, policy_version=me)

    for round_, answers in enumerate(race(services, make)):
        assert answers[0] == answers[1]
        uids = [draw.prompt_uid for draw in ledger.list_draws(db, RUN, round_ + 1)]
        assert uids == [f"{answers[0].policy_version}-{round_}-{unit}" for unit in range(3)]


def test_two_flushes_select_and_record_one_batch(services: Services, db: Database) -> None:
    for number in range(services.rounds):
        plan(db, [UNIT], iteration=number + 1)
        complete_next_rollout(db, iteration=number + 1)
        complete_next_reward(db, iteration=number + 1)

    def flush(me: int, round_: int, _: Store, database: Database) -> Any:
        selected = select_batch(database, RUN, round_ + 1, 0, max_staleness=9)
        finish_batch(database, RUN, round_ + 1, "file:///batch", f"{me}" * 64)
        return selected.num_samples, selected.created_at

    for round_, answers in enumerate(race(services, flush)):
        (winner,) = winners(answers)
        assert answers[1 - winner].kind == "DataError" and "a batch never changes" in answers[1 - winner].message
        assert ledger.list_draws(db, RUN, round_ + 1)[0].consumed_by == round_ + 1
        assert len(batch_samples(db, RUN, round_ + 1)) == 4


def a_folder(folder: Path, content: bytes) -> Path:
    (folder / "sub").mkdir(parents=True)
    for name in ("config.json", "model.bin", "sub/tokens"):
        (folder / name).write_bytes(content + name.encode())
    return folder


@pytest.mark.parametrize("kind", ["same", "other"])
def test_two_uploads_to_one_prefix_never_mix(services: Services, store: Store, tmp_path: Path, kind: str) -> None:
    """`other`: two trainers or publishers whose numbers differ in the last bits, as on GPUs."""
    folders = [a_folder(tmp_path / str(me), b"0" if kind == "same" else b"%d" % me) for me in range(2)]

    def upload(me: int, round_: int, mine: Store, _: Database) -> Any:
        return upload_folder(mine, folders[me], f"runs/r/publications/{round_:05d}", {"by": "anyone"})

    for round_, answers in enumerate(race(services, upload)):
        prefix = f"runs/r/publications/{round_:05d}"
        standing = read_manifest(store, prefix)
        won = winners(answers)
        if kind == "same":
            assert won == [0, 1] and answers[0] == answers[1] == standing
        else:
            (winner,) = won
            assert answers[winner] == standing and answers[1 - winner].kind == "OtherContent"
        copy = fetch_folder(store, prefix, tmp_path / "cache")
        source = folders[won[0]]
        assert all((copy / entry.path).read_bytes() == (source / entry.path).read_bytes() for entry in standing.files)


def test_two_uploads_leave_no_file_of_the_loser(services: Services, store: Store, tmp_path: Path) -> None:
    """Not of one that came too late to be tidied up, either: it does that itself."""
    folders = [a_folder(tmp_path / str(me), b"%d" % me) for me in range(2)]

    def upload(me: int, round_: int, mine: Store, _: Database) -> Any:
        return upload_folder(mine, folders[me], f"runs/r/checkpoints/{round_:05d}", {})

    for round_ in range(len(race(services, upload))):
        prefix = f"runs/r/checkpoints/{round_:05d}"
        manifest = read_manifest(store, prefix)
        named = {f"{prefix}/manifest.json", *(manifest.key_of(prefix, entry.path) for entry in manifest.files)}
        assert {info.key for info in store.list(prefix)} == named


def test_a_delta_and_a_whole_upload_of_one_policy_are_one_publication(
    services: Services, store: Store, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    weights_E = torch.arange(4096, dtype=torch.float32)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        save_file({"w": weights_E}, tmp_path / name / "model.safetensors")
        weights_E[7] = 0.5
    upload_folder(store, tmp_path / "old", "runs/r/publications/old", {})
    parent = Parent("runs/r/publications/old", fetch_folder(store, "runs/r/publications/old", tmp_path / "cache"))

    def upload(me: int, round_: int, mine: Store, _: Database) -> Any:
        prefix = f"runs/r/publications/{round_:05d}"
        if me == 0:
            return upload_folder(mine, tmp_path / "new", prefix, {})
        return upload_delta(mine, tmp_path / "new", prefix, {}, parent)

    for round_, answers in enumerate(race(services, upload)):
        assert answers[0] == answers[1] == read_manifest(store, f"runs/r/publications/{round_:05d}")
        copy = fetch_folder(store, f"runs/r/publications/{round_:05d}", tmp_path / f"cache-{round_}")
        assert (copy / "model.safetensors").read_bytes() == (tmp_path / "new" / "model.safetensors").read_bytes()


def test_a_pointer_moved_by_several_never_goes_back(services: Services, store: Store) -> None:
    def move_or_watch(me: int, round_: int, mine: Store, _: Database) -> list[int]:
        if me < 2:
            for version in range(3 * round_ + me, 3 * round_ + 3):
                move_pointer(mine, "runs/r/latest.json", version, {"by": me})
            return []
        seen = (read_pointer(mine, "runs/r/latest.json") for _ in range(10))
        return [pointer["version"] for pointer in seen if pointer]

    seen: list[int] = []
    for _, _, watched in race(services, move_or_watch, contestants=3):
        seen += watched
    assert seen == sorted(seen)
    assert read_pointer(store, "runs/r/latest.json")["version"] == 3 * services.rounds - 1  # type: ignore[index]


def publication(version: int, weights: str) -> Publication:
    return Publication(
        run_id=RUN,
        policy_version=version,
        parent_version=None,
        uri="file:///p",
        manifest_sha256=weights,
        weights_sha256=weights,
        size_bytes=1,
    )


def test_two_publishers_of_other_weights_record_one_publication(services: Services, db: Database) -> None:
    def record(me: int, round_: int, _: Store, database: Database) -> Publication:
        return ledger.record_publication(database, publication(round_, f"{me}" * 64))

    for round_, answers in enumerate(race(services, record)):
        (winner,) = winners(answers)
        assert "a publication never changes" in answers[1 - winner].message
        assert ledger.get_publication(db, RUN, round_) == answers[winner]


def test_two_evaluations_with_other_scores_leave_one_verdict(services: Services, db: Database) -> None:
    for number in range(services.rounds):
        ledger.record_publication(db, publication(number, "0" * 64))

    def evaluate(me: int, round_: int, _: Store, database: Database) -> Evaluation:
        verdict = Evaluation(
            run_id=RUN, policy_version=round_, reward_eval=0.5 * me, num_prompts=4, validated=me == 1, reason=f"by {me}"
        )
        return ledger.record_evaluation(database, verdict)

    answered = race(services, evaluate)
    assert all(answers[0] == answers[1] for answers in answered)
    assert ledger.list_evaluations(db, RUN) == [answers[0] for answers in answered]


def test_two_starts_of_a_run_with_other_configurations_make_one_run(services: Services, db: Database) -> None:
    def create(me: int, round_: int, _: Store, database: Database) -> Any:
        return ledger.create_run(database, f"race-{round_}", json.dumps({"by": me}), f"hash-{me}")

    for round_, answers in enumerate(race(services, create)):
        (winner,) = winners(answers)
        assert answers[1 - winner].kind == "ConfigError"
        assert ledger.get_run(db, f"race-{round_}") == answers[winner]


def test_metrics_recorded_twice_are_those_of_one(services: Services, db: Database) -> None:
    def record(me: int, round_: int, _: Store, database: Database) -> int:
        ledger.set_iteration_metrics(database, RUN, round_ + 1, "train", {"by": me, "again": me})
        return ledger.begin_attempt(
            database,
            run_id=RUN,
            iteration=round_ + 1,
            step="train",
            worker=None,
            pod=f"pod-{me}",
            node="",
            capacity_type="",
            provenance_json="{}",
        )

    attempts = [attempt for answers in race(services, record) for attempt in answers]
    assert len(set(attempts)) == 2 * services.rounds == len(ledger.list_attempts(db, RUN))
    for number in range(services.rounds):
        metrics = ledger.get_iteration_metrics(db, RUN, number + 1)["train"]
        assert metrics["by"] == metrics["again"]


def test_events_written_twice_to_the_spool_are_those_of_one(services: Services, store: Store) -> None:
    def write(me: int, round_: int, mine: Store, _: Database) -> None:
        Spool(mine, "runs/r/tracking").write(f"{round_:05d}", [RunStatus(state="RUNNING", timestamp_ms=me)] * 3)

    race(services, write)
    spool = Spool(store, "runs/r/tracking")
    for number in range(services.rounds):
        assert len(events := spool.read(f"{number:05d}")) == 3 and len({*map(str, events)}) == 1


def test_processes_that_fill_a_cache_together_each_get_the_whole_folder(
    services: Services, store: Store, tmp_path: Path
) -> None:
    folder = a_folder(tmp_path / "folder", b"0")
    for number in range(services.rounds):
        upload_folder(store, folder, f"runs/r/publications/{number:05d}", {"number": number})

    def fetch(me: int, round_: int, mine: Store, _: Database) -> Counter[str]:
        copy = fetch_folder(mine, f"runs/r/publications/{round_:05d}", tmp_path / "cache")
        return Counter({path: len((copy / path).read_bytes()) for path in ("config.json", "model.bin", "sub/tokens")})

    for answers in race(services, fetch, contestants=3):
        assert answers == [Counter({"config.json": 12, "model.bin": 10, "sub/tokens": 11})] * 3
