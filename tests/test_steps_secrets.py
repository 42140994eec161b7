"""Credentials of the database, the store and the tracking server: in the environment of the steps, and nowhere else."""

import base64
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
from sqlalchemy import MetaData, make_url, select

from steps.adapters.database import open_database
from tests.fixtures_postgres import PostgresServer
from tests.fixtures_s3 import use_server
from tests.fixtures_steps import STAGES, TINY_CONFIG, StepRunner
from tests.s3_servers import S3Server
from workflows.local.warm_client import WarmServer

TRACKING_PASSWORD = "tracking-pass-9c41"
SESSION_TOKEN = "session-token-51fe"


def forms(secret: str) -> set[bytes]:
    """As it may be written down: plain, quoted, in base64 at each of the three alignments."""
    encoded = (base64.b64encode(b" " * shift + secret.encode()) for shift in range(3))
    return {secret.encode(), quote(secret, safe="").encode(), *(text[4:-4] for text in encoded)}


def holders(named: dict[str, bytes], secrets: set[bytes]) -> set[str]:
    return {name for name, data in named.items() if any(secret in data for secret in secrets)}


@contextmanager
def watched_processes(server: WarmServer) -> Iterator[dict[str, bytes]]:
    """Titles and arguments of all processes that the server starts, and of theirs, as others on the node see them."""
    seen: dict[str, bytes] = {}
    done = threading.Event()
    root = psutil.Process(server._process.pid)

    def watch() -> None:
        while not done.wait(0.01):
            for child in root.children(recursive=True):
                for name in ("cmdline", "comm", "status"):
                    try:
                        seen[f"{child.pid}/{name}"] = Path(f"/proc/{child.pid}/{name}").read_bytes()
                    except (FileNotFoundError, ProcessLookupError):
                        continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(url: str) -> dict[str, bytes]:
    database = open_database(url)
    tables = MetaData()
    with database.engine.connect() as connection:
        tables.reflect(connection)
        dumped = {name: repr(connection.execute(select(table)).all()).encode() for name, table in tables.tables.items()}
    database.close()
    return dumped


def test_no_secret_is_written_anywhere(
    warm_server: WarmServer,
    tmp_path: Path,
    postgres_server: PostgresServer,
    postgres_url: str,
    radosgw_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = use_server(radosgw_server, monkeypatch)
    steps = StepRunner(warm_server, tmp_path, f"s3://{bucket}/marked", postgres_url)
    tracking = tmp_path / "mlflow.sqlite"
    logs: dict[str, bytes] = {}
    secrets = set().union(*map(forms, (postgres_server.password, radosgw_server.secret_key, TRACKING_PASSWORD)))
    with watched_processes(warm_server) as processes:
        for iteration, uri in (
            (0, ""),
            (1, f"http://me:{TRACKING_PASSWORD}@127.0.0.1:9"),
            (2, f"sqlite:///{tracking}"),
        ):
            steps.env["MLFLOW_TRACKING_URI"] = uri
            for stage in STAGES if iteration else ("init",):
                result = steps.step(stage, iteration) if iteration else steps.init()
                assert result.code == 0, result.log
                logs[f"{stage} {iteration}"] = result.log.encode()
    stored = {info.key: steps.store.get_bytes(info.key) for info in steps.store.list("")}
    found = {
        "processes": holders(processes, secrets),
        "logs": holders(logs, secrets),
        "files": holders(files_below(tmp_path), secrets),
        "store": holders(stored, secrets),
        "database": holders(rows_of(postgres_url), secrets),
    }
    assert found == {name: set() for name in found}
    assert len(processes) > 10 and tracking.exists() and len(stored) > 20


REFUSED = {
    "database is away": {"MOERL_DATABASE_URL": f"postgresql+psycopg://u:{TRACKING_PASSWORD}@127.0.0.1:1/x"},
    "database of another kind": {"MOERL_DATABASE_URL": f"mysql://u:{TRACKING_PASSWORD}@h/x"},
    "password with odd characters": {"MOERL_DATABASE_URL": f"postgresql://u:p@/{TRACKING_PASSWORD}:1@127.0.0.1:1/x"},
    "password with @": {"MOERL_DATABASE_URL": f"postgresql://u:p@{TRACKING_PASSWORD}@127.0.0.1:1/x"},
    "password as a parameter": {
        "MOERL_DATABASE_URL": f"postgresql+psycopg://127.0.0.1:1/x?user=u&password={TRACKING_PASSWORD}"
    },
    "keys in the store's URI": {"MOERL_STORE": f"s3://key:{TRACKING_PASSWORD}@bucket/prefix"},
    "a store of another kind": {"MOERL_STORE": f"https://key:{TRACKING_PASSWORD}@host/prefix"},
    "wrong keys": {
        "AWS_SECRET_ACCESS_KEY": TRACKING_PASSWORD,
        "AWS_SESSION_TOKEN": SESSION_TOKEN,
        "MOERL_STORE": "s3://nowhere/x",
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_shows_no_secret(case: str, steps: StepRunner, moto_server: S3Server) -> None:
    steps.env |= {"MOERL_SERVICE_DEADLINE_S": "0", **moto_server.environment(), **REFUSED[case]}
    result = steps.init()
    assert result.code in (69, 78), result.log
    assert "Traceback" not in result.log
    secrets = forms(TRACKING_PASSWORD) | forms(SESSION_TOKEN)
    assert holders({"log": result.log.encode()}, secrets) == set()


def test_a_wrong_password_is_not_shown(steps: StepRunner, postgres_url: str) -> None:
    url = make_url(postgres_url).set(password=TRACKING_PASSWORD)
    steps.env |= {
        "MOERL_SERVICE_DEADLINE_S": "0",
        "MOERL_DATABASE_URL": url.render_as_string(hide_password=False),
    }
    result = steps.init()
    assert result.code in (69, 78), result.log
    assert holders({"log": result.log.encode()}, forms(TRACKING_PASSWORD)) == set()


THIEF = """
import gc, os
def score(prompt, response, answer, meta):
    found = [name for name in os.environ if "AWS" in name or "MOERL" in name or "MLFLOW" in name]
    for path in ("/proc/self/environ", f"/proc/{os.getppid()}/environ"):
        try:
            found += [path] if b"MOERL" in open(path, "rb").read() else []
        except OSError:
            pass
    found += [repr(text)[:60] for text in gc.get_objects() if isinstance(text, str) and "://" in text]
    raise RuntimeError(f"found {found}" if found else "nothing")
"""


def test_a_verifier_finds_no_secret(steps: StepRunner, tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "thief.py").write_text(THIEF)
    steps.env["PYTHONPATH"] = os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")])
    steps.env["AWS_SECRET_ACCESS_KEY"] = TRACKING_PASSWORD
    assert steps.init(TINY_CONFIG.replace('"per_position"', '"thief:score"')).code == 0
    for stage in ("plan", "rollout", "reward"):
        result = steps.step(stage)
        assert result.code == 0, result.log
    assert rewards(steps) == {"RuntimeError: nothing"}


def rewards(steps: StepRunner) -> set[str]:
    tables = MetaData()
    with steps.database.engine.connect() as connection:
        tables.reflect(connection)
        return set(connection.execute(select(tables.tables["rewards"].c.detail)).scalars())
