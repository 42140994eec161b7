"""Prove that nothing of a run was lost or used twice: recompute every sum from the database and the store, and compare.

For every prompt drawn: sampled (its whole group), scored, trained on in exactly one batch, or dropped with the reason;
open only in an iteration that has not ended. Nothing is written. Exit 0 when all agrees, 65 otherwise.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steps import audit_batches, audit_plan, audit_policies, audit_samples, audit_selection, audit_work, paths
from steps.adapters.audit_queries import Snapshot, snapshot
from steps.adapters.buffer import BatchRow
from steps.adapters.database import Database, open_database
from steps.adapters.runs import IterationRow
from steps.adapters.store import Store, open_store
from steps.adapters.stragglers import DROP_REASON
from steps.arguments import step_parser
from steps.audit_findings import Findings, IterationSums
from steps.audit_table import audit_lines
from steps.config import RunConfig
from steps.environment import read_environment
from steps.errors import DataError, StepError
from steps.tasks.frozen import FrozenDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """The result: `sums` by iteration, and what failed."""

    run_id: str
    sums: Sequence[IterationSums]
    findings: Findings

    @property
    def clean(self) -> bool:
        return not self.findings.failed

    def to_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "clean": self.clean,
            "iterations": [sums.to_json() for sums in self.sums],
            "checks": dict(self.findings.looked_at),
            "findings": [{"check": f.check, "where": f.where, "message": f.message} for f in self.findings.failed],
        }


def audit_run(database: Database, store: Store, run_id: str, *, deep: bool = False) -> Audit:
    """Check a run, also one that is going on. `deep`: also the checksums of all publications and trainer states.

    Raises DataError when there is no such run, ServiceUnavailable when the database or the store can't be read.
    """
    pointers = audit_policies.read_pointers(store, run_id)
    states = audit_policies.list_states(store, run_id)
    with snapshot(database, run_id) as rows:
        auditor = _Auditor(rows, store, run_id, deep)
        sums = auditor.check_iterations()
        auditor.check_policies(pointers, states)
    return Audit(run_id=run_id, sums=sums, findings=auditor.found)


def print_audit(audit: Audit, *, as_json: bool) -> None:
    """To stdout, as a table with one line for each failed check, or as JSON."""
    text = json.dumps(audit.to_json(), indent=2)
    print(text if as_json else "\n".join(audit_lines(audit.run_id, audit.sums, audit.findings)), flush=True)


class _Auditor:
    """One pass over a run; holds what several checks need."""

    def __init__(self, rows: Snapshot, store: Store, run_id: str, deep: bool) -> None:
        self.rows, self.store, self.run_id, self.deep = rows, store, run_id, deep
        self.found = Findings()
        self.config: RunConfig = audit_plan.check_config(self.found, rows, store)
        self.dataset: FrozenDataset | None = audit_plan.check_dataset(self.found, run_id, store)
        self.plans = {row.iteration: row for row in rows.iterations()}
        self.batches: dict[int, BatchRow] = {row.iteration: row for row in rows.batches()}
        self.publications = rows.publications()
        self.metrics = rows.metrics()
        self.finished = {number for number in self.plans if "report" in self.metrics.get(number, {})}
        self.undecided: list[audit_selection.Candidate] = []
        """Scored groups that no batch has taken or dropped so far."""

    def check_iterations(self) -> list[IterationSums]:
        audit_plan.check_cursor(self.found, list(self.plans.values()))
        for orphan in self.rows.orphans():
            self.found.require(False, "orphans", orphan, "belongs to no prompt that was drawn")
        sums = [self._check_iteration(row) for row in self.plans.values()]
        if self.dataset is not None:
            draws = [draw for number in self.plans for draw in self.rows.draws(number)]
            audit_plan.check_epochs(self.found, draws, len(self.dataset.train_uids))
        audit_work.check_attempts(self.found, self.rows.attempts(), self.finished)
        return sums

    def _check_iteration(self, row: IterationRow) -> IterationSums:
        found, config, number = self.found, self.config, row.iteration
        draws, units, leases = self.rows.draws(number), self.rows.units(number), self.rows.leases(number)
        samples = self.rows.samples(number)
        groups = audit_samples.group(samples)
        audit_plan.check_draws(found, row, draws, config, self.dataset)
        rollout_units = {unit.unit: unit.prompt_uids for unit in units if unit.kind == "rollout"}
        audit_plan.check_units(found, row, draws, rollout_units, config.rollout.prompts_per_unit)
        if self.dataset is not None and any(unit.attempts for unit in units):
            audit_plan.check_prompts_file(found, self.run_id, self.store, row, draws, self.dataset)
        audit_work.check_units_done(found, units, must_be=number in self.batches)
        audit_work.check_reward_units(found, units, groups)
        late = {draw.prompt_uid for draw in draws if draw.drop_reason == DROP_REASON}
        audit_work.check_leases(found, units, leases, groups, self.rows.committed_groups(number), late)
        audit_samples.check_groups(found, row, draws, groups, config.rollout.group_size)
        published = {publication.policy_version for publication in self.publications}
        audit_samples.check_samples(found, row, samples, config, published)
        scored = [uid for unit in units if (unit.kind, unit.state) == ("reward", "done") for uid in unit.prompt_uids]
        audit_samples.check_rewards(found, row, groups, scored)
        audit_samples.check_fates(found, draws, number, set(self.batches))
        self.undecided += audit_selection.candidates_of(found, number, draws, groups)
        self._check_batch(row)
        sums = audit_samples.sum_up(number, draws, groups, config.rollout.group_size)
        audit_work.add_leases(sums, leases)
        audit_samples.check_sums(found, sums, config.rollout.group_size)
        return sums

    def _check_batch(self, row: IterationRow) -> None:
        found, number = self.found, row.iteration
        batch = self.batches.get(number)
        has_publication = any(publication.policy_version == number for publication in self.publications)
        used = has_publication or "train" in self.metrics.get(number, {})
        stored = batch is not None and batch.uri is not None
        found.require(stored or not used, "stages", f"iteration {number}", "was trained, and has no finished batch")
        if batch is None:
            return
        found.equal("batch", f"batch {number}", "policy_version", batch.policy_version, row.policy_version)
        audit_selection.check_selection(found, batch, self.undecided, self.config.buffer.max_staleness)
        self.undecided = []
        if stored:
            payloads = self.rows.batch_payloads(number)
            audit_batches.check_batch_files(found, self.store, self.run_id, batch, payloads)
            values = [payload.value for payload in payloads]
            audit_policies.check_records(found, batch, self.metrics.get(number, {}), values)

    def check_policies(self, pointers: audit_policies.Pointers, states: Sequence[str]) -> None:
        found, evaluations = self.found, self.rows.evaluations()
        published = {row.policy_version for row in self.publications}
        evaluated = {row.policy_version for row in evaluations}
        newest_plan = max(self.plans, default=0)
        for number in self.plans:
            where = f"iteration {number}"
            ended = number in self.finished or number == newest_plan
            found.require(ended, "stages", where, "is not finished, and a later one was begun")
            if number in self.finished:
                complete = number in self.batches and number in published and number in evaluated
                found.require(complete, "stages", where, "is finished without a batch, a publication or a verdict")
        for publication in self.publications:
            version = publication.policy_version
            known = version == 0 or version in self.plans
            found.require(known, "stages", f"policy version {version}", "belongs to no planned iteration")
            audit_policies.check_publication(
                found, self.store, publication, self.plans.get(version), self.batches.get(version),
                self.rows.run().config_hash, deep=self.deep,
            )  # fmt: skip
        audit_policies.check_chain(found, self.publications)
        keep = self.config.train.keep_checkpoints
        audit_policies.check_states(
            found, self.store, self.run_id, states, audit_policies.needed_versions(self.publications, keep),
            deep=self.deep,
        )  # fmt: skip
        audit_policies.check_evaluations(found, evaluations, self.config.evaluate.gate)
        passed = [row.policy_version for row in evaluations if row.validated]
        targets = {"latest": max(published, default=None), "validated": max(passed, default=None)}
        for name, pointer in pointers.items():
            target = targets[name]
            may_lag = target is not None and target not in self.finished
            audit_policies.check_pointer(found, pointer, target, self.publications, may_lag=may_lag)


def main() -> None:
    parser = step_parser("audit", __doc__, iteration=False)
    parser.add_argument("--deep", action="store_true", help="also recompute the checksums of every file")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    try:
        paths.validate_run_id(arguments.run)
        environment = read_environment()
        database, store = open_database(environment.database_url), open_store(environment.store_uri)
        audit = audit_run(database, store, arguments.run, deep=arguments.deep)
    except StepError as error:
        print(f"audit: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print_audit(audit, as_json=arguments.json)
    raise SystemExit(0 if audit.clean else DataError.exit_code)


if __name__ == "__main__":
    main()
