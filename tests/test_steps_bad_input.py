"""What a user can get wrong: one line (what, where, what to do), the right exit code, nothing half-written."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from steps import paths
from steps.adapters import ledger
from steps.adapters.publications_manifest import MANIFEST_NAME
from tests.fixtures_s3 import use_server
from tests.fixtures_steps import RUN, TINY_CONFIG, StepResult, StepRunner

UNDER = """
[train]
ranks = 2
[train.update]
micro_batch_tokens = 4096
[moe]
exchange_dtype = "bfloat16"
dispatcher = """


def assert_refused(result: StepResult, code: int, *parts: str) -> None:
    assert result.code == code, result.log
    assert "Traceback" not in result.log
    explanation = result.log.strip().splitlines()[-1]
    for part in parts:
        assert part in explanation, explanation


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ("name = \n", ["line 1"]),
        ("iteratons = 3\n", ["iteratons", "iterations"]),
        ("[rollout]\ngroup_sise = 4\n", ["rollout.group_sise", "rollout.group_size"]),
        ('[rollout]\ngroup_size = "four"\n', ["rollout.group_size", "four"]),
        ("[rollout]\ngroup_size = 1\n", ["rollout.group_size"]),
        ("/no/such/config.toml", ["/no/such/config.toml"]),
        ('[task]\nkind = "jsonl"\n', ["task.train_path"]),
        ('[task]\nverifier = "no_such_module:score"\n', ["no_such_module"]),
        ('[warmup]\nstart = "/no/such/checkpoint"\n', ["warmup.start", "/no/such/checkpoint"]),
        (f'{UNDER}"deepep"', ["package deep_ep is not installed", "argo-moe-rl[deepep]"]),
        (f'{UNDER}"uccl_ep"', ["package uccl is not installed", "argo-moe-rl[uccl]"]),
        (f'{UNDER}"nccl_ep"', ["package nccl is not installed", "argo-moe-rl[nccl-ep]"]),
    ],
)
def test_a_wrong_configuration_is_78_and_starts_no_run(steps: StepRunner, config: str, parts: list[str]) -> None:
    assert_refused(steps.init(config), 78, *parts)
    assert not steps.store.list("runs")


def test_a_run_is_not_continued_with_another_configuration(steps: StepRunner) -> None:
    steps.init()
    assert_refused(steps.init(TINY_CONFIG + "\n[buffer]\nmax_staleness = 3\n"), 78, RUN, "another configuration")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "12>"}', "answer is missing"),
        ('{"prompt": "12>", "answer": ', "JSON"),
        ('{"prompt": "12>", "answer": "21", "score": 1}', "score"),
        ('{"prompt": "98>", "answer": "89"}', "already on line 1"),
    ],
)
def test_a_wrong_row_is_65_with_file_line_and_reason(steps: StepRunner, tmp_path: Path, row: str, reason: str) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "98>", "answer": "89"}\n' + row + "\n")
    result = steps.init(f'name = "tiny"\n[task]\nkind = "jsonl"\ntrain_path = "{data}"\nheldout_size = 1\n')
    assert_refused(result, 65, f"{data}:2:", reason)


def test_a_prompt_that_is_too_long_is_65_and_named(steps: StepRunner, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n:02d}" * 20 + ">", "answer": str(n)}) + "\n" for n in range(40)))
    config = TINY_CONFIG.replace("digits = 3\ntrain_size = 200\n", f'kind = "jsonl"\ntrain_path = "{data}"\n')
    result = steps.init(config.replace("[rollout.sampling]", "[rollout.sampling]\nmax_prompt_tokens = 16"))
    assert_refused(result, 65, "has 42 tokens", "rollout.sampling.max_prompt_tokens = 16")


def test_too_few_prompts_for_an_iteration_are_refused(steps: StepRunner, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}>", "answer": str(n)}) + "\n" for n in range(20)))
    config = TINY_CONFIG.replace("digits = 3\ntrain_size = 200\n", f'kind = "jsonl"\ntrain_path = "{data}"\n')
    assert_refused(steps.init(config), 78, "rollout.prompts_per_iteration = 8", "only 4")


@pytest.mark.parametrize(
    ("variable", "value", "code", "parts"),
    [
        ("MOERL_STORE", "", 78, ["MOERL_STORE", "s3://bucket/prefix"]),
        ("MOERL_STORE", "ftp://host/x", 78, ["ftp://host/x"]),
        ("MOERL_STORE", "/proc/nothing", 69, ["/proc/nothing"]),
        ("MOERL_DATABASE_URL", "", 78, ["MOERL_DATABASE_URL"]),
        ("MOERL_DATABASE_URL", "mysql://u:secret@host/x", 78, ["sqlite"]),
        ("MOERL_DATABASE_URL", "postgresql+psycopg://u:secret@127.0.0.1:1/x", 69, ["127.0.0.1:1", "u:***@"]),
    ],
)
def test_a_service_that_is_missing_or_away_is_named_without_its_password(
    steps: StepRunner, variable: str, value: str, code: int, parts: list[str]
) -> None:
    steps.env[variable] = value
    result = steps.init()
    assert_refused(result, code, *parts)
    assert "secret" not in result.log


def test_a_bad_run_id_never_becomes_a_path(steps: StepRunner) -> None:
    for run in ("../evil", "Capital", "a/b", "", "x" * 41):
        assert_refused(steps.init(run=run), 64, "run id" if run else "run")


def test_a_step_before_its_predecessor_says_which_one_is_missing(steps: StepRunner) -> None:
    assert_refused(steps.step("plan"), 69, "unable to open database file", "init_run")
    steps.init()
    for stage, missing in [("rollout", "plan"), ("flush", "plan"), ("train", "plan"), ("evaluate", "publish")]:
        assert_refused(steps.step(stage), 65, missing)
    steps.step("plan")
    assert_refused(steps.step("flush"), 65, "not done")
    assert_refused(steps.step("publish"), 65, "checkpoints/00001")


def test_a_tampered_publication_is_refused_by_name(steps: StepRunner, tmp_path: Path) -> None:
    steps.init()
    steps.step("plan")
    (weights,) = (tmp_path / "store" / paths.publication_prefix(RUN, 0)).rglob("model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.unlink()
    weights.write_bytes(bytes(data))
    steps.env["MOERL_CACHE_DIR"] = str(tmp_path / "another-cache")
    assert_refused(steps.step("rollout"), 65, "model.safetensors", "sha")


def test_a_corrupt_checkpoint_is_refused_and_the_run_goes_on_when_it_is_restored(
    steps: StepRunner, tmp_path: Path
) -> None:
    steps.init()
    for stage in ("plan", "rollout", "reward", "flush"):
        steps.step(stage)
    folder = tmp_path / "store" / paths.checkpoint_prefix(RUN, 0)
    state = next(folder.rglob("*.safetensors"))
    good = state.read_bytes()
    state.unlink()
    state.write_bytes(good[:-8] + bytes(8))
    steps.env["MOERL_CACHE_DIR"] = str(tmp_path / "another-cache")
    assert_refused(steps.step("train"), 65, state.name)
    assert steps.store.head(f"{paths.checkpoint_prefix(RUN, 1)}/{MANIFEST_NAME}") is None
    state.unlink()
    state.write_bytes(good)
    assert steps.step("train").code == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small-disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_69_and_the_run_continues_when_there_is_room(steps: StepRunner, small_disk: Path) -> None:
    steps.env["MOERL_STORE"] = str(small_disk)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1000 * 1024))
    assert_refused(steps.init(), 69, "the disk is full")
    assert ledger.list_publications(steps.database, RUN) == []
    ballast.unlink()
    assert steps.init().code == 0


def test_a_bucket_without_permission_is_69_and_a_missing_one_78(
    steps: StepRunner, radosgw_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server(radosgw_server, monkeypatch)
    steps.env["MOERL_STORE"] = "s3://no-such-bucket/x"
    assert_refused(steps.init(), 78, "no-such-bucket")
    bucket = "read-only-for-all"
    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject", "Resource": f"arn:aws:s3:::{bucket}/*"}
    client.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]}))
    steps.env["MOERL_STORE"] = f"s3://{bucket}/x"
    assert_refused(steps.init(), 69, bucket)
