"""The audit: a run that nobody touched is clean, and whatever is tampered with is found, by its check and its name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load, save

from moe.batch import TrainingBatch
from moe.publication import weights_sha256
from steps import paths
from steps.adapters.publications import upload_folder
from steps.adapters.publications_manifest import read_manifest
from steps.audit_findings import Findings
from steps.audit_policies import tensors_sha256
from steps.audit_samples import check_sums
from tests.fixtures_audit import AuditedRun, batch, checkpoint, cut, flip_last_byte, publication
from tests.fixtures_steps import RUN

FIRST = f"run_id = '{RUN}' AND iteration = 1"
ONE_UID = f"(SELECT min(prompt_uid) FROM samples WHERE {FIRST})"
ONE_PROMPT = f"{FIRST} AND prompt_uid = {ONE_UID}"
VERSION_9 = "CAST(x'09000000' || substr(versions, 5) AS BLOB)"
UNIT = f"{FIRST} AND unit = 1"
ONE_SAMPLE = f"{ONE_PROMPT} AND sample_index = 2"
EVERY_CHECK = {
    "attempts", "batch", "batch-files", "batch-rows", "config", "cursor", "draws", "epochs", "evaluation", "fates",
    "flush-record", "groups", "leases", "lengths", "parent", "pointers", "prompts-file", "publication", "rewards",
    "sampling", "seeds", "selection", "stages", "sums", "train-record", "trainer-state", "units", "units-done",
    "versions",
}  # fmt: skip


@pytest.fixture
def run(finished: AuditedRun, tmp_path: Path) -> AuditedRun:
    return finished.copy(tmp_path / RUN)


def update(table: str, change: str, where: str) -> Callable[[AuditedRun], None]:
    return lambda run: run.sql(f"UPDATE {table} SET {change} WHERE {where}")


def delete(table: str, where: str) -> Callable[[AuditedRun], None]:
    return lambda run: run.sql(f"DELETE FROM {table} WHERE {where}")


def damage(prefix: str, name: str, how: Callable[[Path], None]) -> Callable[[AuditedRun], None]:
    return lambda run: how(next(run.objects(prefix, name)))


def remove(key: str) -> Callable[[AuditedRun], None]:
    return lambda run: run.file(key).unlink()


def edit_json(key: str, **changes: object) -> Callable[[AuditedRun], None]:
    return lambda run: run.edit_json(key, **changes)


def duplicate_sample(run: AuditedRun) -> None:
    columns = ", ".join(
        "4" if name == "sample_index" else name
        for name in json.loads(run.value("SELECT json_group_array(name) FROM pragma_table_info('samples')"))
    )
    run.sql(f"INSERT INTO samples SELECT {columns} FROM samples WHERE {ONE_SAMPLE}")


def train_on_rows_twice(run: AuditedRun) -> None:
    """A consistent forgery: the batch's file holds its samples twice, and manifest and ledger say that it is right."""
    prefix = batch(1)
    manifest = read_manifest(run.store, prefix)
    (stored,) = run.objects(prefix, "*")
    one = TrainingBatch.from_bytes(stored.read_bytes())
    twice = load(save({name: tensor.repeat(2) for name, tensor in one.to_tensors().items()}))
    folder = run.folder / "forged"
    folder.mkdir()
    (folder / "batch.safetensors").write_bytes(TrainingBatch.from_tensors(twice).to_bytes())
    run.file(f"{prefix}/manifest.json").unlink()
    forged = upload_folder(run.store, folder, prefix, manifest.extra)
    run.sql(f"UPDATE batches SET manifest_sha256 = '{forged.sha256}' WHERE {FIRST}")


def draw_a_prompt_again(run: AuditedRun) -> None:
    """The first prompt of iteration 1 once more in iteration 2, in the place of another."""
    uid = run.value(f"SELECT prompt_uid FROM prompt_draws WHERE {FIRST} AND position = 0")
    run.sql(f"UPDATE prompt_draws SET prompt_uid = '{uid}' WHERE iteration = 2 AND position = 8")


def garble(key: str, text: str) -> Callable[[AuditedRun], None]:
    def change(run: AuditedRun) -> None:
        path = run.file(key)
        path.write_text(path.read_text().replace('"', "'", 1) if not text else text)

    return change


def reorder_prompts(run: AuditedRun) -> None:
    path = run.file(paths.iteration_prompts_key(RUN, 1))
    header, first, second, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([header, second, first, *rest]))


# What is done to the run: (the check that must find it, a word of the line, the change).
TAMPERING: dict[str, tuple[str, str, Callable[[AuditedRun], None]]] = {
    "a sample is gone": ("groups", "prompt", delete("samples", ONE_SAMPLE)),
    "a reward's sample is gone": ("orphans", "reward", delete("samples", ONE_SAMPLE)),
    "a sample is there twice": ("groups", "[0, 1, 2, 3, 4]", duplicate_sample),
    "a sample is in the wrong unit": ("groups", "unit", update("samples", "unit = unit + 1", ONE_SAMPLE)),
    "a sample's prompt was not drawn": ("orphans", "sample", delete("prompt_draws", ONE_PROMPT)),
    "a reward is another": ("batch-rows", "rewards", update("rewards", "value = 0.123", ONE_SAMPLE)),
    "the mean of the rewards is another": ("flush-record", "mean", update("rewards", "value = 0.123", ONE_SAMPLE)),
    "a reward is gone": ("rewards", "/2", delete("rewards", ONE_SAMPLE)),
    "a failed reward has become a score": (
        "batch-rows", "statuses", update("rewards", "status = 'timeout', value = NULL", ONE_SAMPLE)),
    "a token is another": (
        "batch-rows", "response", update("samples", "response_ids = zeroblob(length(response_ids))", ONE_SAMPLE)),
    "a log-probability is another": (
        "batch-rows", "log-prob", update("samples", "logprobs = zeroblob(length(logprobs))", ONE_SAMPLE)),
    "a prompt's tokens are others": (
        "batch-rows", "prompt", update("prompt_draws", "prompt_ids = zeroblob(length(prompt_ids))", ONE_PROMPT)),
    "a seed is another": ("seeds", "/2", update("samples", "seed = seed + 1", ONE_SAMPLE)),
    "a temperature is another": ("sampling", "temperature", update("samples", "temperature = 0.5", ONE_SAMPLE)),
    "tokens are miscounted": ("lengths", "/2", update("samples", "num_tokens = num_tokens + 1", ONE_SAMPLE)),
    "a version is made younger": ("versions", "min_version", update("samples", "min_version = 1", ONE_SAMPLE)),
    "a version does not exist": ("versions", "version 9", update("samples", f"versions = {VERSION_9}", ONE_SAMPLE)),
    "two prompts have changed places": (
        "draws", "position 0", update("prompt_draws", "position = 1 - position", f"{FIRST} AND position < 2")),
    "a prompt is drawn again": ("epochs", "epoch 0", draw_a_prompt_again),
    "the cursor has skipped prompts": ("cursor", "cursor_start", update("iterations", "cursor_end = 9", FIRST)),
    "a unit holds another prompt": (
        "units", "unit 0", update("work_units", "prompt_uids_json = '[\"x\"]'", f"{FIRST} AND unit = 0")),
    "a unit is not done": (
        "units-done", "rollout unit 1", update("work_units", "state = 'pending'", f"{FIRST} AND unit = 1")),
    "a trained prompt is called dropped": (
        "selection", "None", update("prompt_draws", "status = 'dropped', consumed_by = NULL, drop_reason = 'stale: 1'",
                                    ONE_PROMPT)),
    "a trained prompt is called open": (
        "fates", "open", update("prompt_draws", "status = 'drawn', consumed_by = NULL", ONE_PROMPT)),
    "a prompt is claimed by another batch": ("selection", "consumed_by", update("prompt_draws", "consumed_by = 2",
                                                                               ONE_PROMPT)),
    "a prompt is dropped as if late": (
        "selection", "has 4 samples", update(
            "prompt_draws", "status = 'dropped', consumed_by = NULL, "
            "drop_reason = 'not sampled before the straggler deadline'", ONE_PROMPT)),
    "a batch's counts are others": ("batch", "num_tokens", update("batches", "num_tokens = num_tokens + 1", FIRST)),
    "a batch's file is changed": ("batch-files", "sha256", damage(batch(1), "*", flip_last_byte)),
    "a batch's file is gone": ("batch-files", "batches/00001", damage(batch(1), "*", Path.unlink)),
    "a batch's manifest is gone": ("batch-files", "manifest", remove(f"{batch(2)}/manifest.json")),
    "samples are trained on twice": ("batch-rows", "response", train_on_rows_twice),
    "the trainer has seen fewer samples": (
        "train-record", "samples", update("iteration_metrics", "metrics_json = json_set(metrics_json, '$.samples', 31)",
                                          f"{FIRST} AND phase = 'train'")),
    "an iteration was never reported": ("stages", "iteration 1", delete("iteration_metrics",
                                                                       f"{FIRST} AND phase = 'report'")),
    "a finished iteration has no batch": ("stages", "iteration 1", delete("batches", FIRST)),
    "a publication is cut short": ("publication", "size", damage(publication(1), "*.safetensors", cut)),
    "a publication's manifest is gone": ("publication", "manifest", remove(f"{publication(2)}/manifest.json")),
    "the ledger names other weights": (
        "publication", "weights_sha256", update("publications", "weights_sha256 = 'x'", "policy_version = 1")),
    "the ledger names another batch": (
        "publication", "batch_manifest_sha256", update("batches", "manifest_sha256 = 'x'", FIRST)),
    "a parent is another": ("parent", "parent_version", update("publications", "parent_version = 0",
                                                               "policy_version = 2")),
    "a parent is missing": ("parent", "policy version 2", delete("publications", "policy_version = 1")),
    "a trainer state is gone": ("trainer-state", "missing", remove(f"{checkpoint(2)}/manifest.json")),
    "a trainer state is cut short": ("trainer-state", "size", damage(checkpoint(2), "model-*", cut)),
    "a verdict is another": ("evaluation", "policy version 1", update("evaluations", "validated = NOT validated",
                                                                      "policy_version = 1")),
    "latest has gone back": ("pointers", "latest", lambda run: point_to_version_1(run, "latest")),
    "latest is gone": ("pointers", "missing", remove(paths.latest_key(RUN))),
    "latest names another manifest": ("pointers", "manifest_sha256", edit_json(paths.latest_key(RUN),
                                                                             manifest_sha256="x")),
    "latest is ahead": ("pointers", "version 3", edit_json(paths.latest_key(RUN), policy_version=3, version=3)),
    "validated is garbage": ("pointers", "not a pointer", garble(paths.validated_key(RUN), "{")),
    "a lease claims more": ("leases", "samples", update("unit_leases", "samples = samples + 1", UNIT)),
    "a lease is forgotten": ("leases", "its leases", delete("unit_leases", UNIT)),
    "all leases are forgotten": ("leases", "its leases", delete("unit_leases", FIRST)),
    "nobody has completed a unit": ("leases", "completed", update("unit_leases", "outcome = 'lost'", UNIT)),
    "an attempt never ended": ("attempts", "evaluate", update("step_attempts", "ended_at = NULL, exit_code = NULL",
                                                              "step = 'evaluate' AND iteration = 1")),
    "the stored configuration is another": ("config", "config.json", garble(paths.config_key(RUN), "{}")),
    "the ledger's configuration is another": (
        "config", "config_hash", update("runs", "config_json = json_set(config_json, '$.seed', 5)", "1")),
    "the data set is changed": ("data-set", "train.jsonl", garble(paths.dataset_key(RUN, "train"), "")),
    "workers read other prompts": ("prompts-file", "00001.jsonl", reorder_prompts),
}  # fmt: skip


def point_to_version_1(run: AuditedRun, name: str) -> None:
    sha256 = run.value("SELECT manifest_sha256 FROM publications WHERE policy_version = 1")
    run.edit_json(f"runs/{RUN}/{name}.json", policy_version=1, version=1, manifest_sha256=sha256)


def test_a_run_that_nobody_touched_is_clean_and_every_check_has_looked(finished: AuditedRun) -> None:
    audit = finished.audit(deep=True)
    assert [str(finding) for finding in audit.findings.failed] == []
    assert audit.findings.looked_at.keys() >= EVERY_CHECK | {"weights"}
    for sums in audit.sums:
        assert (sums.drawn, sums.sampled, sums.scored, sums.trained, sums.open) == (8, 8, 8, 8, 0)
        assert (sums.samples, sums.rewards["ok"], sums.dropped.total(), sums.duplicate_samples) == (32, 32, 0, 0)


@pytest.mark.parametrize("case", TAMPERING)
def test_tampering_is_found_by_its_check(run: AuditedRun, case: str) -> None:
    check, word, change = TAMPERING[case]
    change(run)
    lines = [str(finding) for finding in run.audit().findings.failed]
    assert any(line.startswith(f"{check}: ") and word in line for line in lines), lines
    assert not any("\n" in line for line in lines)


def test_every_check_is_tampered_with() -> None:
    assert {check for check, _, _ in TAMPERING.values()} >= EVERY_CHECK - {"sums"}


def test_a_changed_byte_of_the_weights_is_found_by_their_checksum(run: AuditedRun) -> None:
    flip_last_byte(next(run.objects(publication(1), "*.safetensors")))
    assert run.audit().clean
    failed = run.audit(deep=True).findings.failed
    assert {finding.check for finding in failed} == {"weights"}
    flip_last_byte(next(run.objects(publication(1), "*.safetensors")))
    flip_last_byte(next(run.objects(checkpoint(2), "optimizer-*")))
    assert {finding.check for finding in run.audit(deep=True).findings.failed} == {"trainer-state"}


def test_weights_are_hashed_as_the_publication_does(run: AuditedRun, tmp_path: Path) -> None:
    stored = next(run.objects(publication(2), "*.safetensors")).parent
    assert tensors_sha256(stored) == weights_sha256(stored)
    tensors = load(next(stored.glob("*.safetensors")).read_bytes())
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "model.safetensors").write_bytes(save(tensors))
    assert tensors_sha256(tmp_path / "half") == weights_sha256(tmp_path / "half")


def test_sums_that_do_not_add_up_are_a_finding(finished: AuditedRun) -> None:
    sums = finished.audit().sums[0]
    for wrong in (replace(sums, open=1), replace(sums, samples=33), replace(sums, scored=7)):
        found = Findings()
        check_sums(found, wrong, 4)
        assert [finding.check for finding in found.failed] == ["sums"]
