"""The parts that a report page is made of: sections, tables and numbers as text."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


def section(title: str, hint: str, content: str) -> str:
    """`content` is HTML, the rest text."""
    line = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    return f"<section><h2>{escape(title)}</h2>{line}{content}</section>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """`rows` hold HTML; the header holds text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def pairs_table(values: Mapping[str, Any], header: tuple[str, str] = ("component", "version")) -> str:
    """A table of names and values, both text."""
    return table(header, [[escape(str(k)), escape(str(v))] for k, v in values.items()], "text")


def bullet_list(lines: Sequence[str]) -> str:
    """Lines of text."""
    return f'<ul class="notes">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def number_text(value: float | None, digits: int) -> str:
    """With so many digits after the point; a dash for what is not known."""
    return "–" if value is None else f"{value:.{digits}f}"


def count_text(value: float | None) -> str:
    """Whole, with separators."""
    return "–" if value is None else f"{value:,.0f}"


def seconds_text(value: float | None) -> str:
    """In minutes from two minutes on."""
    if value is None:
        return "–"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"
