"""The documentation tells the truth: its commands run, its links lead somewhere, its tables are the code's."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted([REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md"), REPOSITORY / "benchmarks" / "README.md"])
LIMIT_S = 120

NOT_RUN = {
    "make run": "takes minutes; its parts are tested in test_workflows_cli.py and by the end-to-end tests",
    "make test": "is what runs this test",
    "make bench": "takes many minutes",
    "moerl run sort-digits": "takes minutes",
    "moerl run --chaos": "takes minutes; test_chaos_plan.py",
    "moerl chaos report": "needs a run; test_chaos_plan.py",
    "moerl audit": "needs a run; test_steps_audit_runs.py",
    "moerl run --set rollout.engine=vllm": "needs vLLM; test_steps_adapters_engines_vllm_real.py",
    "moerl run my.toml": "takes minutes; the same with --dry-run is run",
    "moerl resume": "needs a run; test_workflows_cli.py",
    "moerl report": "needs a run; test_workflows_cli.py",
    **{
        f"moerl {command}": "needs a cluster; test_workflows_cluster_access.py runs it against a double"
        for command in ("submit", "status", "watch", "logs", "stop", "doctor")
    },
    "docker": "needs a container registry",
    "kubectl": "needs a cluster",
    "argo": "needs a cluster",
    "python -m benchmarks": "takes minutes",
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: the words after ```, and its lines."""

    language: str
    options: dict[str, str]
    text: str


def blocks(page: Path) -> Iterator[Block]:
    for match in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        options = dict(word.split("=", 1) for word in match[2].split())
        yield Block(language=match[1], options=options, text=match[3])


def commands(block: Block) -> list[str]:
    """Commands of a console block, without their comments and the path of the virtual environment."""
    lines = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
    return [re.sub(r"\s+# .*$", "", line).replace(".venv/bin/", "").strip() for line in lines]


def is_run(command: str) -> bool:
    return command.endswith(("--dry-run", "--help")) or not any(command.startswith(prefix) for prefix in NOT_RUN)


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`moerl` as the console script would be."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "moerl"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m workflows "$@"\n')
    script.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY), "COLUMNS": "120"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_page_run(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    for block in blocks(page):
        if "file" in block.options:
            (tmp_path / block.options["file"]).write_text(block.text)
        if block.language != "console":
            continue
        for command in filter(is_run, commands(block)):
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
            assert done.returncode == int(block.options.get("exit", "0")), f"{command}\n{done.stdout}\n{done.stderr}"
            assert "Traceback" not in done.stderr


def test_every_reason_for_not_running_a_command_is_needed() -> None:
    shown = [
        command
        for page in PAGES
        for block in blocks(page)
        if block.language == "console"
        for command in commands(block)
    ]
    assert [prefix for prefix in NOT_RUN if not any(command.startswith(prefix) for command in shown)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_page_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_configuration_page_is_what_the_schema_says() -> None:
    sys.path.insert(0, str(REPOSITORY / "docs"))
    try:
        import generate_configuration
    finally:
        sys.path.pop(0)
    text = generate_configuration.PAGE.read_text()
    assert text == generate_configuration.page(text), "run `python docs/generate_configuration.py`"


def test_files_that_the_readme_names_exist() -> None:
    tree = (REPOSITORY / "README.md").read_text().split("## The tree", 1)[1]
    names = re.findall(r"^    ( *)(\S+)", tree, flags=re.MULTILINE)
    folder = ""
    missing = []
    for indent, name in names:
        if not indent:
            folder = name
        path = REPOSITORY / (name if not indent else folder + name)
        if name.endswith((".py", "/")) and "*" not in name and not path.exists():
            missing.append(str(path.relative_to(REPOSITORY)))
    assert missing == []


def test_every_make_target_says_what_it_does() -> None:
    targets = set(re.findall(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)[0].split())
    shown = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert targets == set(re.findall(r"make (\w+)", shown.replace("make run CONFIG", "")))
