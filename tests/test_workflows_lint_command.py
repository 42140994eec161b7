"""`moerl lint`: its output, exit codes and one-line refusals; docs/lint.md against the code."""

import json
from pathlib import Path

import pytest
import yaml

from tests.lint_cases_pods import CASES as PODS
from tests.lint_cases_workflow import CASES as WORKFLOWS
from tests.tampering import OVERLAY, PROFILE, REPOSITORY, Case, documents
from workflows.cli import run_command_line
from workflows.lint.linter import RULES, rules_table
from workflows.platform import profile_names

SMALL = ("--iterations", "2", "--workers", "2")
REFUSED = [
    case for case in (*WORKFLOWS, *PODS) if next(rule for rule in RULES if rule.name == case.rule).severity == "error"
]


@pytest.mark.parametrize("profile", profile_names())
def test_what_renders_from_a_profile_passes_without_a_word(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["lint", "--profile", profile, *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("budget: 2 iterations x 2 workers")
    assert lines[-1].endswith(f"profile {profile}: 0 errors, 0 warnings")


@pytest.mark.parametrize("folder", [".", "overlays/laptop"])
def test_committed_folders_pass(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["lint", str(REPOSITORY / "templates" / folder), "--profile", "cpu", *SMALL]) == 0
    assert "0 errors, 0 warnings" in capsys.readouterr().out


def test_kinds_without_a_schema_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["lint", str(OVERLAY), str(OVERLAY / "nodes"), "--profile", PROFILE, *SMALL]) == 0
    shown = capsys.readouterr().out
    assert shown.count("[no-schema]") == 3 and "0 errors, 3 warnings" in shown


@pytest.mark.parametrize("case", REFUSED[::20], ids=[case.rule for case in REFUSED[::20]])
def test_tampered_campaign_is_refused_with_the_traps_name(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = documents()
    case.edit(edited)
    path = tmp_path / "campaign.yaml"
    path.write_text(yaml.safe_dump_all(edited.values(), sort_keys=False))
    assert run_command_line(["lint", str(path), "--profile", PROFILE, *SMALL]) == 65
    shown = capsys.readouterr()
    assert f"error [{case.rule}] " in shown.out
    assert case.rule in shown.err and len(shown.err.splitlines()) == 1


def test_json_holds_findings_budget_and_what_was_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = documents()
    edited.of("policy-retraining")["spec"]["concurrencyPolicy"] = "Allow"
    path = tmp_path / "cron.yaml"
    path.write_text(yaml.safe_dump(edited.of("policy-retraining")))
    assert run_command_line(["lint", str(path), "--json"]) == 65
    shown = json.loads(capsys.readouterr().out)
    (finding,) = shown["findings"]
    assert finding["rule"] == "cron-overlap" and finding["path"] == "spec.concurrencyPolicy"
    assert finding["severity"] == "error" and finding["source"] == str(path)
    assert shown["profile"] is None and shown["manifests"] == 1 and shown["budget"] == []


def test_without_schemas_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("workflows.lint.schemas.REPOSITORY", tmp_path / "elsewhere")
    monkeypatch.delenv("MOERL_SCHEMAS", raising=False)
    assert run_command_line(["lint", *SMALL]) == 0
    assert "schemas: Argo: Hera's models (no published schema here: give --schemas DIR)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["absent.yaml"], 64, "absent.yaml: No such file or directory; give a file or folder of manifests"),
        (["--profile", "p4d"], 78, "no platform profile 'p4d': use one of cpu, "),
        (["--schemas", "/"], 64, "name the folder that holds them"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["lint", *arguments]) == code
    error = capsys.readouterr().err
    assert problem in error and len(error.splitlines()) == 1


def test_rules_are_listed_as_the_documentation_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["lint", "--rules"]) == 0
    assert capsys.readouterr().out.splitlines() == rules_table()
    assert run_command_line(["lint", "--rules", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == {rule.name for rule in RULES}


def test_documentation_has_every_rule() -> None:
    """`moerl lint --rules` prints the table."""
    text = (REPOSITORY / "docs" / "lint.md").read_text()
    assert "\n".join(rules_table()) in text
