"""What each verifier accepts, and how a user's own function is loaded."""

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps.config import TaskConfig
from steps.config_loader import load_config
from steps.errors import ConfigError
from steps.tasks.catalog import build_dataset, load_verifier
from steps.tasks.dataset import make_prompt
from steps.tasks.scoring import score
from steps.tasks.verifiers import answer_problem, last_number


def verify(verifier: str, answer: str, response: str) -> float:
    return load_verifier(TaskConfig(verifier=verifier))(make_prompt("q", answer), response)


@pytest.mark.parametrize(
    ("verifier", "answer", "response", "value"),
    [
        ("exact", "12", " 12\n", 1.0),
        ("exact", "12", "1 2", 0.0),
        ("exact", "12", "", 0.0),
        ("exact", "Yes", "yes", 0.0),
        ("per_position", "1234", "1234", 1.0),
        ("per_position", "1234", "1239", 0.75),
        ("per_position", "1234", "12", 0.5),
        ("per_position", "12", "1234", 0.5),
        ("per_position", "1234", "", 0.0),
        ("per_position", "1234", "4123", 0.0),
        ("regex", r"\d+ apples?", "12 apples", 1.0),
        ("regex", r"\d+ apples?", "I have 12 apples", 0.0),
        ("regex", "(?i)yes|no", " NO ", 1.0),
        ("numeric", "42", "The answer is 42.", 1.0),
        ("numeric", "#### 1,234.5", "so 1234.50", 1.0),
        ("numeric", "0.5", "1/2", 1.0),
        ("numeric", "3/4", "it is 0.75", 1.0),
        ("numeric", "-3", "x=-3", 1.0),
        ("numeric", "5", "10-5", 1.0),
        ("numeric", "1000000", "1000000.5", 1.0),
        ("numeric", "1000000", "1000002", 0.0),
        ("numeric", "0", "1e-7", 1.0),
        ("numeric", "0", "1e-5", 0.0),
        ("numeric", "7", "none", 0.0),
        ("numeric", "7", "7/0", 0.0),
        ("numeric", "7", "1e999", 0.0),
        ("math_verify", "42", "The answer is 42", 1.0),
        ("math_verify", r"\frac{3}{4}", r"\boxed{\frac{6}{8}}", 1.0),
        ("math_verify", r"$\frac{3}{4}$", "0.75", 1.0),
        ("math_verify", "x+1", "$1+x$", 1.0),
        ("math_verify", r"\sqrt{2}", r"\sqrt{2}", 1.0),
        ("math_verify", "7", "no idea", 0.0),
        ("math_verify", "7", "", 0.0),
    ],
)
def test_verifier_scores(verifier: str, answer: str, response: str, value: float) -> None:
    assert verify(verifier, answer, response) == value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", None),
        ("no", None),
        ("1,2,3", 3.0),
        ("1,234,567", 1234567.0),
        ("12,34", 34.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("2e3", 2000.0),
        ("\u22127", -7.0),
        ("3 / 4", 0.75),
        ("(3)-2", 2.0),
        ("+3", 3.0),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_a_number_is_found_as_python_writes_it(value: float) -> None:
    assert last_number(f"so x = {value!r}") == value


@given(st.text(max_size=30), st.text(min_size=1, max_size=30))
def test_positions_are_a_fraction_and_all_of_them_is_exact(response: str, answer: str) -> None:
    value = verify("per_position", answer, response)
    assert 0.0 <= value <= 1.0
    assert (value == 1.0) == (verify("exact", answer, response) == 1.0)


@given(st.text(max_size=30))
def test_any_response_has_a_numeric_score(response: str) -> None:
    assert verify("numeric", "42", response) in (0.0, 1.0)


def test_unusable_answers_are_explained() -> None:
    assert answer_problem("exact", "(") is None
    assert answer_problem("regex", "a+") is None
    assert "is not a regular expression" in str(answer_problem("regex", "(a"))
    assert answer_problem("numeric", "12 apples") is None
    assert "holds no number" in str(answer_problem("numeric", "twelve"))


def test_a_gold_answer_without_mathematics_is_an_error_not_a_zero() -> None:
    status, value, detail = score(load_verifier(TaskConfig(verifier="math_verify")), make_prompt("q", ""), "x", 10.0)
    assert (status, value) == ("error", None)
    assert "holds no mathematical expression" in detail


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module in the working directory whose name no other test uses; returns its name."""
    name = f"user_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(
        "def half(prompt, response, answer, meta):\n"
        "    assert (prompt, answer) == ('q', 'a')\n"
        "    meta['seen'] = True\n"
        "    return 0.5 if response == meta['wanted'] else 0.0\n"
        "async def later(prompt, response, answer, meta): return 1.0\n"
        "def two(prompt, response): return 1.0\n"
        "number = 3\n"
    )
    (tmp_path / f"{name}_broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / f"{name}_syntax.py").write_text("def (:\n")
    (tmp_path / f"{name}_exit.py").write_text("raise SystemExit('bye')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_users_function_gets_prompt_response_answer_and_a_copy_of_meta(user_module: str) -> None:
    verifier = load_verifier(TaskConfig(verifier=f"{user_module}:half"))
    prompt = make_prompt("q", "a", {"wanted": "r"})
    assert (verifier(prompt, "r"), verifier(prompt, "s")) == (0.5, 0.0)
    assert prompt.meta == {"wanted": "r"}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("{}:absent", "has no function absent"),
        ("{}:number", "number is not a function"),
        ("{}:later", "later is async"),
        ("{}:two", r"two must take \(prompt, response, answer, meta\)"),
        ("{}_absent:f", "there is no module user_"),
        ("{}_broken:f", "there is no module nothing_of_this_name"),
        ("{}_syntax:f", "importing user_.* failed: SyntaxError"),
        ("{}_exit:f", "importing user_.* failed: SystemExit: bye"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_a_config_error(user_module: str, spec: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        load_verifier(TaskConfig(verifier=spec.format(user_module)))
    assert str(caught.value).startswith(f"task.verifier = {spec.format(user_module)}: ")


def test_the_documented_example_is_scored_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text()
    for name, text in re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = load_config("words.toml")
    data = build_dataset(config.task, config.seed)
    verifier = load_verifier(config.task)
    prompts = {prompt.text: prompt for prompt in (*data.train, *data.heldout)}
    assert len(prompts) == 4 and len(data.heldout) == 1
    assert {score(verifier, prompt, prompt.answer, 1.0) for prompt in prompts.values()} == {("ok", 1.0, "")}
    assert score(verifier, prompts["red blue>"], "blue red", 1.0) == ("ok", 0.5, "")
    assert score(verifier, prompts["red blue>"], "green", 1.0) == ("ok", 0.0, "")
    assert score(verifier, prompts["one two>"], "two one", 1.0) == ("ok", 0.0, "")


def test_a_built_in_function_without_a_signature_is_accepted() -> None:
    assert callable(load_verifier(TaskConfig(verifier="builtins:max")))


def test_an_unknown_verifier_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="there is no such verifier"):
        load_verifier(TaskConfig(verifier="exakt"))
