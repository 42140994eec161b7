"""Runs that are under way, disturbed, or that had to drop prompts: the audit says so, and is clean. Its command."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from steps import paths
from steps.adapters import buffer, leases, ledger
from steps.adapters.attempts import AttemptRow
from steps.adapters.buffer import BatchRow
from steps.adapters.publications_manifest import read_manifest
from steps.adapters.runs import PromptDraw
from steps.audit import Audit, audit_run
from steps.audit_findings import Findings
from steps.audit_selection import Candidate, check_selection
from steps.audit_work import check_attempts
from steps.records import Worker
from tests.fixtures_audit import AuditedRun
from tests.fixtures_s3 import use_server
from tests.fixtures_steps import REPOSITORY, RUN, STAGES, TINY_CONFIG, StepRunner, stage_argv
from tests.s3_servers import S3Server
from workflows.cli import run_command_line
from workflows.local.warm_client import WarmServer

FAILING_VERIFIER = '''
def score(prompt, response, answer, meta):
    """Fails on half of the prompts, whatever the response."""
    if int(answer) % 2:
        raise ValueError("no verdict")
    return 1.0 if response == answer else 0.5
'''


def audit(steps: StepRunner, *, deep: bool = False) -> Audit:
    result = audit_run(steps.database, steps.store, RUN, deep=deep)
    assert [str(finding) for finding in result.findings.failed] == []
    return result


def test_a_run_is_clean_after_every_stage_and_while_it_goes_on_and_its_open_prompts_are_counted(
    steps: StepRunner,
) -> None:
    assert steps.init().code == 0
    assert audit(steps).sums == []
    with audited_all_the_time(steps) as failed:
        steps.iterate(1)
        seen = []
        for stage in STAGES:
            assert steps.step(stage, 2).code == 0
            sums = audit(steps).sums[-1]
            seen.append((sums.drawn, sums.sampled, sums.scored, sums.trained, sums.open))
    assert failed == []
    assert seen[:4] == [(8, 0, 0, 0, 8), (8, 8, 0, 0, 8), (8, 8, 8, 0, 8), (8, 8, 8, 8, 0)]
    assert set(seen[4:]) == {seen[3]}


@contextmanager
def audited_all_the_time(steps: StepRunner) -> Iterator[list[str]]:
    """What audits find in another thread, one after the other, complete when the block has ended."""
    ended, failed = threading.Event(), list[str]()

    def watch() -> None:
        while not ended.wait(0.3):
            failed.extend(map(str, audit_run(steps.database, steps.store, RUN, deep=True).findings.failed))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield failed
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_run_whose_steps_were_killed_is_clean_and_the_lost_leases_are_counted(
    steps: StepRunner, number: signal.Signals
) -> None:
    assert steps.init().code == 0
    for stage in STAGES:
        argv = stage_argv(stage)
        steps.run_together([argv], signal_when=(lambda stage=stage: is_at_work(steps, stage), number))
        audit(steps)
        assert steps.run(argv).code == 0
    assert audit(steps, deep=True).sums[0].trained == 8


def is_at_work(steps: StepRunner, stage: str) -> bool:
    """The step's attempt is in the ledger; of a rollout or a reward, a unit is leased as well."""
    if stage in ("rollout", "reward"):
        with steps.database.read() as connection:
            leased = connection.exec_driver_sql(f"SELECT count(*) FROM unit_leases WHERE kind = '{stage}'")
            return bool(leased.scalar_one())
    return any(row.step == stage for row in ledger.list_attempts(steps.database, RUN, 1))


def test_a_late_owners_copy_is_counted_and_never_stored(steps: StepRunner) -> None:
    assert steps.init().code == 0
    assert steps.step("plan").code == 0
    late = leases.lease_unit(steps.database, RUN, 1, "rollout", Worker(number=7, pod="late", step_attempt_id=0), 0.0)
    assert late is not None
    for stage in STAGES[1:]:
        assert steps.step(stage).code == 0, stage
    copies = buffer.unit_samples(steps.database, RUN, 1, late.unit.prompt_uids)
    assert buffer.commit_groups(steps.database, late, copies).duplicates == len(copies) == 8
    (sums,) = audit(steps).sums
    assert (sums.samples, sums.duplicate_samples, sums.lost_leases) == (32, 8, 1)


def test_prompts_without_usable_rewards_are_dropped_and_counted(
    steps: StepRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_verifier.py").write_text(FAILING_VERIFIER)
    steps.env["PYTHONPATH"] = str(tmp_path)
    config = TINY_CONFIG.replace('verifier = "per_position"', 'verifier = "failing_verifier:score"')
    started = steps.init(config)
    assert started.code == 0, started.log
    steps.iterate(1)
    (sums,) = audit(steps).sums
    assert sums.dropped["no usable reward"] == sums.dropped.total() == 8 - sums.trained > 0
    assert sums.rewards["error"] == 4 * sums.dropped.total()
    report = json.loads(steps.store.get_bytes(paths.run_report_key(RUN, "json")))
    account = report["iterations"][0]["accounting"]
    assert (account["drawn"], account["sampled"], account["trained"], account["dropped"], account["open"]) == (
        8, 8, sums.trained, sums.dropped.total(), 0,
    )  # fmt: skip
    assert (account["samples"], account["tokens"], account["scored"]) == (32, sums.tokens, 32)
    page = steps.store.get_bytes(paths.run_report_key(RUN, "html")).decode()
    assert "Accounting" in page and "no usable reward" in page


def test_prompts_that_came_too_late_are_dropped_and_counted(steps: StepRunner) -> None:
    assert steps.init(TINY_CONFIG.replace("lease_s = 2.0", "backup_after = 0.0")).code == 0
    assert steps.step("plan").code == 0
    held = leases.lease_unit(steps.database, RUN, 1, "rollout", Worker(number=7, pod="slow", step_attempt_id=0), 600.0)
    assert held is not None
    late = steps.run([*stage_argv("rollout"), "--straggler-deadline", "1"])
    assert late.code == 0, late.log
    for stage in STAGES[2:]:
        assert steps.step(stage).code == 0, stage
    (sums,) = audit(steps).sums
    assert sums.dropped["not sampled before the straggler deadline"] == 8 - sums.trained >= len(held.unit.prompt_uids)
    assert sums.sampled == sums.trained


def test_on_postgresql_and_s3_a_run_is_clean_and_a_changed_object_is_found(
    warm_server: WarmServer,
    tmp_path: Path,
    postgres_url: str,
    radosgw_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = StepRunner(warm_server, tmp_path, f"s3://{use_server(radosgw_server, monkeypatch)}/here", postgres_url)
    assert runner.init().code == 0
    runner.iterate(1)
    audit(runner, deep=True)
    key = next(info.key for info in runner.store.list(paths.publication_prefix(RUN, 1)) if "safetensors" in info.key)
    data = runner.store.get_bytes(key)
    runner.store.put_bytes(key, data[:-1] + bytes([data[-1] ^ 1]))
    failed = audit_run(runner.database, runner.store, RUN, deep=True).findings.failed
    (finding,) = failed
    assert finding.check == "weights" and key in finding.message


def test_a_delta_publication_is_checked_with_its_parent(steps: StepRunner) -> None:
    config = TINY_CONFIG.replace("learning_rate = 1e-2", "learning_rate = 1e-10")  # changes only the smallest weights
    assert steps.init(config + "\n[publish]\nfull_every = 4\n").code == 0
    steps.iterate(1)
    assert read_manifest(steps.store, paths.publication_prefix(RUN, 1)).delta is not None
    audit(steps, deep=True)
    prefix = paths.publication_prefix(RUN, 0)
    weights = next(info.key for info in steps.store.list(prefix) if info.key.endswith(".safetensors"))
    steps.store.delete([weights])
    failed = audit_run(steps.database, steps.store, RUN, deep=True).findings.failed
    checks = {(finding.check, finding.where.partition("/publications/")[2][:5]) for finding in failed}
    assert checks == {("publication", "00000"), ("weights", "00000"), ("weights", "00001")}


def candidate(uid: str, iteration: int, version: int, fate: int | str, num_ok: int = 4) -> Candidate:
    consumed = fate if isinstance(fate, int) else None
    draw = PromptDraw(
        prompt_uid=uid, position=0, unit=0, status="consumed" if consumed else "dropped",
        drop_reason=None if consumed else str(fate), consumed_by=consumed,
    )  # fmt: skip
    return Candidate(iteration=iteration, draw=draw, min_version=version, num_ok=num_ok, num_samples=4, num_tokens=16)


def batch_of(groups: int, dropped: int) -> BatchRow:
    return BatchRow(
        run_id=RUN, iteration=3, policy_version=2, num_groups=groups, num_samples=4 * groups, num_tokens=16 * groups,
        num_dropped=dropped, created_at=0.0, uri=None, manifest_sha256=None,
    )  # fmt: skip


def test_a_selection_is_replayed_by_staleness_rewards_and_newer_groups() -> None:
    """max_staleness 1, trained is version 2."""
    right = [
        candidate("a", 2, 0, "stale: version 0 is 2 behind 2, at most 1"),
        candidate("b", 2, 1, "superseded: iteration 3 has a newer group of the prompt"),
        candidate("c", 2, 1, 3),
        candidate("b", 3, 2, 3),
        candidate("d", 3, 3, "stale: version 3 is later than 2, which is trained"),
        candidate("e", 3, 2, "no usable reward: 1 ok of 4", num_ok=1),
        candidate("f", 3, 2, 3, num_ok=2),
    ]
    found = Findings()
    chosen = check_selection(found, batch_of(3, 4), right, 1)
    assert (found.failed, [one.draw.prompt_uid for one in chosen]) == ([], ["c", "b", "f"])
    wrong = [
        candidate("a", 2, 0, 3),
        candidate("b", 2, 1, 3),
        candidate("c", 2, 1, "stale: it is not"),
        candidate("b", 3, 2, "superseded: it is not"),
        candidate("e", 3, 2, 3, num_ok=1),
        candidate("f", 3, 2, "no usable reward: it has", num_ok=2),
    ]
    found = Findings()
    check_selection(found, batch_of(3, 3), wrong, 1)
    assert [finding.where[-1] for finding in found.failed] == ["a", "b", "c", "b", "e", "f"]


def attempt(attempt_id: int, step: str, iteration: int | None, ended: bool, worker: str | None = None) -> AttemptRow:
    values: dict[str, Any] = dict.fromkeys(AttemptRow.__dataclass_fields__, "")
    where = {"attempt_id": attempt_id, "step": step, "iteration": iteration, "worker": worker, "pod": f"p{attempt_id}"}
    ending = {"ended_at": 9.0, "exit_code": 0} if ended else {"ended_at": None, "exit_code": None}
    return AttemptRow(**values | where | ending | {"started_at": 1.0})


def test_an_attempt_without_an_end_needs_an_explanation() -> None:
    attempts = [
        attempt(1, "init_run", None, ended=False),  # nothing came after it in its place
        attempt(2, "rollout", 1, ended=False, worker="0"),  # superseded
        attempt(3, "rollout", 1, ended=True, worker="0"),
        attempt(4, "rollout", 1, ended=False, worker="1"),  # worker 0 did what was left
        attempt(5, "train", 1, ended=False),  # its iteration is finished
        attempt(6, "train", 2, ended=False),  # still running
        attempt(7, "report", None, ended=False),  # the last one of all
    ]
    found = Findings()
    check_attempts(found, attempts, finished={1})
    assert [finding.where for finding in found.failed] == ["init_run in pod p1", "iteration 1, train in pod p5"]


def test_moerl_audit_prints_the_sums_and_each_failed_check(
    finished: AuditedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["audit", str(finished.folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:3] == ["iteration", "drawn", "sampled"]
    tokens = printed[1].split()[8]
    assert printed[1].split() == ["1", "8", "8", "8", "8", "0", "0", "32", tokens, "0", "0", "0"]
    assert printed[-1].startswith(f"{RUN}: clean: ")
    broken = finished.copy(tmp_path / RUN).folder
    (broken / "store" / paths.latest_key(RUN)).unlink()
    assert run_command_line(["audit", str(broken), "--json"]) == 65
    result = json.loads(capsys.readouterr().out)
    (finding,) = result["findings"]
    assert (result["clean"], finding["check"], finding["message"]) == (False, "pointers", "is missing")
    assert finding["where"].endswith(paths.latest_key(RUN))
    assert run_command_line(["audit", str(broken)]) == 65
    assert capsys.readouterr().out.splitlines()[-2].startswith("failed  pointers: ")


def test_moerl_audit_refuses_in_one_line_what_it_can_not_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["audit", "nothing", "--runs-dir", str(tmp_path)]) == 65
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text("{}")
    assert run_command_line(["audit", "empty", "--runs-dir", str(tmp_path)]) == 65
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "no run 'nothing'" in lines[0] and "nothing to audit" in lines[1]


@pytest.mark.parametrize(
    ("run", "code", "words"),
    [(RUN, 0, "clean"), ("another", 65, "run another: not in the database"), ("Bad/id", 64, "run id 'Bad/id'")],
)
def test_a_pod_audits_the_run_of_its_environment(finished: AuditedRun, run: str, code: int, words: str) -> None:
    services = {
        "MOERL_STORE": f"{finished.folder}/store",
        "MOERL_DATABASE_URL": f"sqlite:///{finished.folder}/database.sqlite",
    }
    command = [sys.executable, "-m", "steps.audit", "--run", run]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | services, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert words in (done.stdout.splitlines() or done.stderr.splitlines())[-1]
    assert len(done.stderr.splitlines()) == (code != 0)
