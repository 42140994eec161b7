"""Files of at most 400 lines, functions of at most 60: a reader sees one whole at a time."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("workflows", "steps", "moe", "benchmarks", "docs", "tests")
FILES = sorted(path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py"))
FILE_LINES = 400
FUNCTION_LINES = 60


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > FILE_LINES} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    long = {f"{p.relative_to(REPOSITORY)}:{name}": n for p in FILES for name, n in functions(p) if n > FUNCTION_LINES}
    assert long == {}


@pytest.mark.parametrize("package", ["workflows", "steps", "moe"])
def test_packages_have_empty_init_files_and_no_utils(package: str) -> None:
    files = list((REPOSITORY / package).rglob("*.py"))
    assert [path for path in files if path.name == "__init__.py" and path.read_text().strip()] == []
    assert [path for path in files if path.name in {"utils.py", "helpers.py", "common.py"}] == []
