"""Samples of several turns through the steps: trained on where the policy sampled, and known to the audit."""

import sqlite3
from pathlib import Path

from steps.audit import audit_run
from tests.fixtures_steps import RUN, StepRunner


def test_a_mask_goes_from_the_samples_into_the_batch_and_the_audit_knows(steps: StepRunner, tmp_path: Path) -> None:
    steps.init()
    for stage in ("plan", "rollout"):
        assert steps.step(stage).code == 0
    with sqlite3.connect(tmp_path / "moerl.sqlite") as connection:
        rows = connection.execute("SELECT rowid, num_tokens FROM samples WHERE num_tokens > 1").fetchall()
        assert rows
        for rowid, count in rows[::2]:
            mask = bytes([0] * (count - 1) + [1])
            connection.execute("UPDATE samples SET mask = ? WHERE rowid = ?", (mask, rowid))
    for stage in ("reward", "flush", "train", "publish", "evaluate", "report"):
        result = steps.step(stage)
        assert result.code == 0, result.log
    assert audit_run(steps.database, steps.store, RUN).clean
    with sqlite3.connect(tmp_path / "moerl.sqlite") as connection:
        connection.execute("UPDATE samples SET mask = NULL")
    assert {finding.check for finding in audit_run(steps.database, steps.store, RUN).findings.failed} == {"batch-rows"}
