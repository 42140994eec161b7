"""The conformance table names tests that exist."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = (REPOSITORY / "docs" / "conformance.md").read_text()
LINES = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| construct")]
ROWS = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in LINES]
TESTS = {
    name
    for path in (REPOSITORY / "tests").glob("test_*.py")
    for name in re.findall(r"^def (test_\w+)\(", path.read_text(), flags=re.MULTILINE)
}


def test_every_row_names_what_argo_does_its_source_what_happens_here_and_a_test() -> None:
    assert len(ROWS) > 40
    incomplete = [row[0] for row in ROWS if len(row) != 5 or "" in row or not row[4].startswith("`test_")]
    assert incomplete == []


def test_every_test_that_the_documents_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", TABLE))
    assert named - TESTS == set()
