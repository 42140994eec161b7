"""Tables of docs/workflows.md against the definitions that they describe."""

import re

from tests.kustomization import REPOSITORY
from workflows import iteration, parameters

PAGE = (REPOSITORY / "docs" / "workflows.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table after a heading, without its head."""
    section = PAGE.split(f"## {heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def test_parameters_of_a_campaign_are_all_there_with_their_defaults_and_choices() -> None:
    table = {row[0].strip("`"): (row[1].strip("`"), row[2]) for row in rows("Parameters")}
    assert list(table) == list(parameters.names(parameters.CAMPAIGN))
    for parameter in parameters.CAMPAIGN:
        default, values = table[parameter.name]
        assert default == (parameter.value or ""), parameter.name
        if parameter.enum:
            assert tuple(re.findall(r"`([^`]+)`", values)) == parameter.enum


def test_stages_are_all_there_with_their_deadlines_grace_periods_and_retries() -> None:
    expected = [
        [
            stage.name,
            f"`{stage.capacity.name}`" if stage.capacity else stage.domain,
            "`rollout-deadline`" if stage.deadline.startswith("{{") else stage.deadline,
            str(stage.grace_s),
            str(stage.retry_limit),
        ]
        for stage in iteration.STAGES
    ]
    assert rows("Stages") == expected
