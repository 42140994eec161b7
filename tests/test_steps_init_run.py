"""Policy version 0: random, from a checkpoint, and warmed up on the task's answers."""

import json
import re
import sqlite3
from pathlib import Path

import boto3
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from steps import paths
from steps.adapters import ledger
from tests.checkpoint_layouts import model_of, write_checkpoint
from tests.fixtures_s3 import use_server
from tests.fixtures_steps import RUN, TINY_CONFIG, StepRunner

WARM = TINY_CONFIG + "\n[warmup]\nmax_steps = 30\nstop_reward = 1.0\ncheck_every = 10\nbatch_size = 16\n"


def published(steps: StepRunner, run: str = RUN) -> Path:
    (config,) = (Path(steps.store_uri) / paths.publication_prefix(run, 0)).rglob("config.json")
    return config.parent


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


CHECKPOINT = """
[warmup]
start = "{folder}"
[rollout.sampling]
max_new_tokens = 4
"""


def from_checkpoint(folder: Path, more: str = "") -> str:
    before, _, after = TINY_CONFIG.partition("[rollout.sampling]\nmax_new_tokens = 4\n")
    return before + CHECKPOINT.format(folder=folder) + more + after


@pytest.mark.parametrize("fused", [False, True])
def test_a_real_checkpoint_is_published_with_its_own_settings_and_scored_by_the_first_evaluate_step(
    steps: StepRunner, tmp_path: Path, fused: bool
) -> None:
    folder = write_checkpoint(model_of("qwen3_moe"), tmp_path / "checkpoint", fused=fused)
    result = steps.init(from_checkpoint(folder))
    assert result.code == 0, result.log
    assert ledger.list_evaluations(steps.database, RUN) == []
    assert steps.init(from_checkpoint(folder)).code == 0
    steps.iterate(1)
    assert [row.policy_version for row in ledger.list_evaluations(steps.database, RUN)] == [0, 1]
    for version in (0, 1):
        (config,) = (Path(steps.store_uri) / paths.publication_prefix(RUN, version)).rglob("config.json")
        for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (config.parent / name).read_bytes() == (folder / name).read_bytes(), name
    steps.iterate(2)
    before = steps.final_weights()
    assert before != weights(steps)


def test_a_campaign_on_chat_prompts_from_warm_up_to_evaluation(steps: StepRunner, tmp_path: Path) -> None:
    folder = write_checkpoint(model_of("qwen3_moe", max_position_embeddings=128), tmp_path / "checkpoint")
    turns = [{"role": "user", "content": "sort"}, {"role": "assistant", "content": "yes"}]
    rows = [{"prompt": [*turns, {"role": "user", "content": f"{n}"}], "answer": f"{n}"[::-1]} for n in range(10, 30)]
    rows += [{"prompt": f"{n}", "answer": f"{n}"[::-1]} for n in range(30, 50)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = f'kind = "jsonl"\ntrain_path = "{data}"\nprompt_format = "chat"\nsystem_prompt = "reverse"\n'
    config = from_checkpoint(folder, "max_prompt_tokens = 96\n").replace("digits = 3\ntrain_size = 200\n", chat)
    result = steps.init(config.replace("[warmup]", "[warmup]\nmax_steps = 10"))
    assert result.code == 0, result.log
    steps.iterate(1)
    with sqlite3.connect(tmp_path / "moerl.sqlite") as connection:
        prompts = {bytes(row[0]) for row in connection.execute("SELECT prompt_ids FROM prompt_draws")}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = {tokenizer.decode(np.frombuffer(ids, "<i4").tolist()).replace(" ", "") for ids in prompts}
    assert all(
        re.fullmatch(r"<bos>system\|reverse\|user\|(sort\|assistant\|yes\|user\|)?\d\d\|assistant\|", t) for t in texts
    )
    assert {"sort" in text for text in texts} == {True, False}


def test_chat_prompts_need_a_template_before_anything_is_written(steps: StepRunner, tmp_path: Path) -> None:
    folder = write_checkpoint(model_of("qwen3_moe"), tmp_path / "checkpoint")
    (folder / "chat_template.jinja").unlink()
    result = steps.init(from_checkpoint(folder).replace("[task]", '[task]\nprompt_format = "chat"'))
    assert result.code == 65 and "Traceback" not in result.log, result.log
    assert "no chat template" in result.log.splitlines()[-1]
    assert not steps.store.list("runs")


def test_a_kill_between_state_and_publication_of_a_checkpoint_is_made_good(steps: StepRunner, tmp_path: Path) -> None:
    config = from_checkpoint(write_checkpoint(model_of("qwen3_moe"), tmp_path / "checkpoint"))
    assert steps.init(config).code == 0
    before = weights(steps)
    steps.database_url = steps.env["MOERL_DATABASE_URL"] = f"sqlite:///{tmp_path}/another.sqlite"
    keys = [info.key for info in steps.store.list(paths.publication_prefix(RUN, 0))]
    steps.store.delete([*keys, paths.latest_key(RUN)])
    assert steps.init(config).code == 0
    assert weights(steps) == before


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
