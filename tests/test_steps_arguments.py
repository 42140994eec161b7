"""A wrong call of a step exits with 64 and one line; --help shows an example."""

import pytest

from steps.arguments import step_parser


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--iteration", "1"], "--run"),
        (["--run", "a"], "--iteration"),
        (["--run", "a", "--iteration", "0"], "'0' is not a number from 1"),
        (["--run", "a", "--iteration", "x"], "'x' is not a whole number"),
        (["--run", "a", "--iteration", "-1"], "--iteration"),
        (["--run", "a", "--iteration", "1", "--unknown"], "--unknown"),
    ],
)
def test_a_wrong_call_is_one_line_and_64(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        step_parser("plan", "text").parse_args(argv)
    error = capsys.readouterr().err
    assert raised.value.code == 64
    assert error.count("\n") == 1
    assert complaint in error


def test_padded_numbers_of_argo_sequences_are_read() -> None:
    arguments = step_parser("rollout", "text", worker=True).parse_args(
        ["--run", "a", "--iteration", "00012", "--worker", "0"]
    )
    assert (arguments.iteration, arguments.worker) == (12, 0)


def test_help_shows_what_the_step_does_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        step_parser("reward", "Score responses.", worker=True).parse_args(["--help"])
    shown = capsys.readouterr().out
    assert raised.value.code == 0
    assert "Score responses." in shown
    assert "python -m steps.reward --run reverse-digits-1 --iteration 1 --worker 0" in shown
