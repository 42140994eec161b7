"""Policy version 0: random, from a checkpoint, and warmed up on the task's answers."""

from pathlib import Path

import boto3
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from steps import paths
from steps.adapters import ledger
from tests.fixtures_s3 import use_server
from tests.fixtures_steps import RUN, TINY_CONFIG, StepRunner

WARM = TINY_CONFIG + "\n[warmup]\nmax_steps = 30\nstop_reward = 1.0\ncheck_every = 10\nbatch_size = 16\n"


def published(steps: StepRunner, run: str = RUN) -> Path:
    return Path(steps.store_uri) / paths.publication_prefix(run, 0)


def weights(steps: StepRunner, run: str = RUN) -> str:
    return ledger.get_publication(steps.database, run, 0).weights_sha256


def test_a_warm_up_learns_from_the_answers_and_is_reproducible(steps: StepRunner) -> None:
    result = steps.init(WARM)
    assert result.code == 0, result.log
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in result.log.splitlines() if "loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert steps.init(WARM, run="again").code == 0
    assert weights(steps) == weights(steps, "again")
    assert steps.init(WARM.replace("iterations = 2", "iterations = 2\nseed = 1"), run="other").code == 0
    assert weights(steps) != weights(steps, "other")


def test_a_run_starts_from_a_hugging_face_checkpoint(steps: StepRunner) -> None:
    steps.init()
    config = TINY_CONFIG + f'\n[warmup]\nstart = "{published(steps)}"\n'
    result = steps.init(config, run="second")
    assert result.code == 0, result.log
    assert weights(steps, "second") == weights(steps)


def test_a_checkpoint_may_lie_in_s3(steps: StepRunner, moto_server, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.init()
    uri = f"s3://{use_server(moto_server, monkeypatch)}/checkpoint"
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    for path in published(steps).iterdir():
        boto3.client("s3").upload_file(str(path), bucket, f"{prefix}/{path.name}")
    result = steps.init(TINY_CONFIG + f'\n[warmup]\nstart = "{uri}"\n', run="second")
    assert result.code == 0, result.log
    assert weights(steps, "second") == weights(steps)


def test_the_publication_loads_with_plain_transformers(steps: StepRunner) -> None:
    steps.init()
    model = AutoModelForCausalLM.from_pretrained(published(steps))
    tokenizer = AutoTokenizer.from_pretrained(published(steps))
    tokens = model.generate(**tokenizer("123>", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert tokens.shape[1] <= 5 + 3


def test_the_configuration_may_be_a_file_or_lie_in_s3(
    steps: StepRunner, tmp_path: Path, moto_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TINY_CONFIG)
    assert steps.init(str(path)).code == 0
    uri = f"s3://{use_server(moto_server, monkeypatch)}/run.toml"
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=TINY_CONFIG.encode())
    result = steps.init(uri, run="from-s3")
    assert result.code == 0, result.log
    assert weights(steps) == weights(steps, "from-s3")


def test_a_kill_before_the_pointer_moved_is_made_good(steps: StepRunner) -> None:
    steps.init()
    steps.store.delete([paths.latest_key(RUN)])
    assert steps.init().code == 0
    assert steps.step("plan").code == 0


def test_a_warm_up_whose_checkpoint_is_stored_is_not_repeated(steps: StepRunner, tmp_path: Path) -> None:
    assert "warm-up step 30" in steps.init(WARM).log
    before = weights(steps)
    steps.database_url = steps.env["MOERL_DATABASE_URL"] = f"sqlite:///{tmp_path}/another.sqlite"
    result = steps.init(WARM)
    assert result.code == 0, result.log
    assert "warm-up step" not in result.log
    assert weights(steps) == before


def test_a_campaign_goes_on_with_the_iteration_that_another_left_half_done(steps: StepRunner) -> None:
    steps.init()
    steps.iterate(1)
    for stage in ("plan", "rollout", "reward", "flush", "train", "publish", "evaluate"):
        assert steps.step(stage, 2).code == 0
    assert steps.init().outputs["first-iteration"] == "2"
    assert steps.step("report", 2).code == 0
    assert steps.init().outputs["first-iteration"] == "3"


def test_a_checkpoint_of_another_alphabet_is_refused_before_anything_is_written(steps: StepRunner) -> None:
    steps.init()
    config = TINY_CONFIG.replace("digits = 3\n", 'kind = "two_digit_addition"\n')
    result = steps.init(config + f'\n[warmup]\nstart = "{published(steps)}"\n', run="second")
    assert (result.code, result.log.count("\n")) == (65, 1), result.log
    assert "'+'" in result.log
    assert not steps.store.list("runs/second")
