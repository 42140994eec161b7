"""Experience buffer: insert and lease samples, against the fastest plain insert into the same database.

    python -m benchmarks.buffer [--url URL] [--repeats 5] [--output FILE]

One measurement leases and completes every rollout unit of an iteration (encode, fence, insert, create the reward unit);
the other inserts the same data, encoded beforehand, into a table with the same columns and primary key, one commit a
unit, with the driver alone: executemany on SQLite, the faster of executemany and COPY on PostgreSQL. They alternate.
Without --url it measures SQLite in a temporary folder and a PostgreSQL server that it starts, both with synced commits.
"""

import argparse
import json
import platform
import secrets
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg

from steps.adapters.buffer import commit_groups
from steps.adapters.database import Database, migrate, open_database
from steps.adapters.leases import lease_unit
from steps.adapters.ledger import create_run, plan_iteration
from steps.adapters.sample_rows import pack_int32, sample_values
from steps.adapters.tables import samples
from steps.records import Lease, Sample, Worker, WorkUnit

WORKER = Worker(number=0, pod="pod", step_attempt_id=1)
GROUP_SIZE = 16
PAYLOAD_BYTES = 8192
TOKENS = PAYLOAD_BYTES // 12
"""Prompt ids, response ids and log-probabilities of 4 bytes each."""
COLUMNS = [*(column.name for column in samples.columns), "prompt_ids"]


def make_samples(prompt_uids: Sequence[str]) -> list[Sample]:
    """Samples of 8 KiB that don't compress to nothing."""
    logprobs_T = tuple(-((token * 2654435761) % 2**32) / 2**32 for token in range(TOKENS))
    ids = tuple((token * 40503) % 150_000 for token in range(TOKENS))
    return [
        Sample(
            prompt_uid=uid,
            sample_index=index,
            seed=index,
            prompt_ids=ids,
            response_ids_T=ids,
            response_text="",
            logprobs_T=logprobs_T,
            versions_T=(0,) * TOKENS,
            finish_reason="stop",
            temperature=1.0,
            top_p=1.0,
        )
        for uid in prompt_uids
        for index in range(GROUP_SIZE)
    ]


def measure_buffer(db: Database, run_id: str, units: Sequence[Sequence[str]]) -> float:
    """Samples a second through lease_unit and commit_groups."""
    create_run(db, run_id, "{}", "hash")
    uids = [uid for unit in units for uid in unit]
    plan_iteration(db, run_id, 1, 0, [(uid, i) for i, uid in enumerate(uids)], units, 0, len(uids))
    drawn = [make_samples(unit) for unit in units]
    start_s = time.perf_counter()
    for unit_samples in drawn:
        lease = lease_unit(db, run_id, 1, "rollout", WORKER, 60.0)
        assert lease is not None and commit_groups(db, lease, unit_samples).unit_done
    return len(uids) * GROUP_SIZE / (time.perf_counter() - start_s)


def raw_rows(run_id: str, units: Sequence[Sequence[str]]) -> list[list[tuple[Any, ...]]]:
    rows = []
    for number, uids in enumerate(units):
        unit = WorkUnit(run_id=run_id, iteration=1, kind="rollout", unit=number, prompt_uids=tuple(uids))
        lease = Lease(unit=unit, token="", attempt=1, worker=WORKER)
        values = [
            {**sample_values(lease, sample), "prompt_ids": pack_int32(sample.prompt_ids)}
            for sample in make_samples(uids)
        ]
        rows.append([tuple(row[name] for name in COLUMNS) for row in values])
    return rows


def timed(insert: Callable[[list[tuple[Any, ...]]], None], units: list[list[tuple[Any, ...]]]) -> float:
    start_s = time.perf_counter()
    for rows in units:
        insert(rows)
    return sum(len(rows) for rows in units) / (time.perf_counter() - start_s)


def raw_sqlite(path: str) -> dict[str, Callable[[list[tuple[Any, ...]]], None]]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute(f"CREATE TABLE raw ({', '.join(COLUMNS)}, PRIMARY KEY ({', '.join(COLUMNS[:4])}))")
    statement = f"INSERT INTO raw VALUES ({', '.join('?' * len(COLUMNS))})"

    def executemany(rows: list[tuple[Any, ...]]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(statement, rows)
        connection.execute("COMMIT")

    return {"executemany": executemany}


def raw_postgres(url: str) -> dict[str, Callable[[list[tuple[Any, ...]]], None]]:
    connection = psycopg.connect(url.replace("+psycopg", ""))
    key = ", ".join(COLUMNS[:4])
    connection.execute(
        "CREATE TABLE raw AS SELECT *, logprobs AS prompt_ids FROM samples LIMIT 0;"
        f"ALTER TABLE raw ADD PRIMARY KEY ({key})"
    )
    connection.commit()
    statement = f"INSERT INTO raw VALUES ({', '.join(['%s'] * len(COLUMNS))})"

    def executemany(rows: list[tuple[Any, ...]]) -> None:
        connection.cursor().executemany(statement, rows)
        connection.commit()

    def copy(rows: list[tuple[Any, ...]]) -> None:
        with connection.cursor().copy("COPY raw FROM STDIN") as stream:
            for row in rows:
                stream.write_row(row)
        connection.commit()

    return {"executemany": executemany, "copy": copy}


def compare(url: str, num_units: int, prompts_per_unit: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` alternating measurements, after one that is thrown away."""
    migrate(url)
    db = open_database(url)
    is_sqlite = url.startswith("sqlite")
    raw = raw_sqlite(url.removeprefix("sqlite:///")) if is_sqlite else raw_postgres(url)
    rates: dict[str, list[float]] = {name: [] for name in ["buffer", *raw]}
    units = [[f"prompt-{unit:04d}-{i:02d}" for i in range(prompts_per_unit)] for unit in range(num_units)]
    for _ in range(repeats + 1):
        rates["buffer"].append(measure_buffer(db, f"run-{secrets.token_hex(4)}", units))
        for name, insert in raw.items():
            rates[name].append(timed(insert, raw_rows(f"{name}-{secrets.token_hex(4)}", units)))
    db.close()
    medians = {name: round(statistics.median(values[1:])) for name, values in rates.items()}
    best = max(medians[name] for name in raw)
    return {
        "database": "sqlite" if is_sqlite else "postgresql",
        "samples_per_s": medians,
        "ratio": round(medians["buffer"] / best, 3),
        "target_ratio": 0.5,
    }


@contextmanager
def own_databases(folder: str) -> Iterator[list[str]]:
    from tests.fixtures_postgres import start_postgres

    server = start_postgres(settings=())
    try:
        yield [f"sqlite:///{folder}/buffer.db", server.create_database("buffer")]
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="Buffer insert and lease against a plain insert.")
    parser.add_argument("--url", help="database to measure; it is filled with samples (default: own ones)")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--prompts-per-unit", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    arguments = parser.parse_args()
    sizes = (arguments.units, arguments.prompts_per_unit, arguments.repeats)
    if arguments.url:
        results = [compare(arguments.url, *sizes)]
    else:
        with tempfile.TemporaryDirectory() as folder, own_databases(folder) as urls:
            results = [compare(url, *sizes) for url in urls]
    report = {
        "benchmark": "buffer",
        "payload_bytes": PAYLOAD_BYTES,
        "samples_per_unit": arguments.prompts_per_unit * GROUP_SIZE,
        "units": arguments.units,
        "repeats": arguments.repeats,
        "results": results,
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("sqlalchemy", "psycopg")} | {"sqlite": sqlite3.sqlite_version},
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
