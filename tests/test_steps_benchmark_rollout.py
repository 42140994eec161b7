"""steps.benchmark_rollout: the same prompts under two dispatchers, in ranks of this machine."""

import json

import pytest

from steps.benchmark_rollout import one_line, summarise, table
from tests.fixtures_steps import RUN, StepRunner

ARGV = ["steps.benchmark_rollout", "--run", RUN]


def test_two_dispatchers_draw_the_same_tokens_of_a_runs_policy(steps: StepRunner) -> None:
    assert steps.init().code == 0
    result = steps.run([*ARGV, "--ranks", "2", "--prompts", "5", "--repeats", "1"])
    assert result.code == 0, result.log
    report = json.loads(result.outputs["report"])
    assert report["ranks"] == 2
    assert report["responses"] == 10
    assert report["equal_responses"] == report["equal_tokens"] == 1.0
    assert set(report["tokens_per_s"]) == {"local", "all_to_all"}
    assert result.outputs["summary"] in result.log
    assert float(result.outputs["ratio"]) > 0


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--first", "all_to_all"), 64, "--first and --second are both all_to_all"),
        (("--second", "pigeon"), 64, "invalid choice: 'pigeon'"),
        (("--second", "deepep"), 78, "deepep"),
        (("--ranks", "3"), 78, "must divide the model's number of experts, 4"),
    ],
)
def test_what_can_not_be_compared_is_refused_in_one_line(
    steps: StepRunner, options: tuple[str, ...], code: int, words: str
) -> None:
    assert steps.init().code == 0
    result = steps.run([*ARGV, "--prompts", "1", "--repeats", "1", *options])
    assert result.code == code, result.log
    assert words in result.log
    assert "Traceback" not in result.log


def test_a_run_that_does_not_exist_has_nothing_to_sample_from(steps: StepRunner) -> None:
    result = steps.run([*ARGV, "--ranks", "1"])
    assert result.code == 65
    assert f"run {RUN} has no policy yet" in result.log


def turn(dispatcher: str, seconds: float, responses: list[list[int]]) -> dict[str, object]:
    return {"dispatcher": dispatcher, "seconds": seconds, "tokens": 4, "responses": responses}


def test_speeds_are_medians_and_equality_is_counted_by_token_and_by_response() -> None:
    turns = [
        turn("local", 1.0, [[1, 2], [3, 4]]),
        turn("all_to_all", 2.0, [[1, 2], [3, 5]]),
        turn("local", 2.0, [[1, 2], [3, 4]]),
        turn("all_to_all", 2.0, [[9, 9], [9, 9]]),
        turn("local", 4.0, [[1, 2], [3, 4]]),
        turn("all_to_all", 8.0, [[9, 9], [9, 9]]),
    ]
    report = summarise(turns, ("local", "all_to_all"), ranks=2)
    assert report == {
        "ranks": 2,
        "responses": 2,
        "tokens_per_s": {"local": 2.0, "all_to_all": 2.0},
        "ratio": 1.0,
        "equal_tokens": 0.75,
        "equal_responses": 0.5,
    }
    assert one_line(report) in table(report)
    assert "50.0% of responses and 75.0% of tokens are equal" in one_line(report)
