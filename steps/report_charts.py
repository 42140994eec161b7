"""Inline SVG charts of a report: no scripts, no remote loads, colours from the page's CSS variables.

Every mark carries a `<title>`, which browsers show as a tooltip; every number is also in the page's tables.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 560
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 14, 36


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One value of a series; `hollow` draws it as not accepted."""

    x: float
    y: float
    label: str = ""
    hollow: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A named line; `colour` is the name of a CSS variable."""

    name: str
    colour: str
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One span of a timeline, in seconds from its start. `state`: ok, running, interrupted or failed."""

    row: str
    start_s: float
    end_s: float
    colour: str
    state: str
    label: str


def line_chart(
    series: Sequence[Series], *, x_label: str, y_max: float | None = None, height: int = 260, unit: str = ""
) -> str:
    """Lines over integer x; y starts at 0."""
    points = [point for line in series for point in line.points]
    if not points:
        return no_data()
    x_min, x_max = min(p.x for p in points), max(p.x for p in points)
    ticks_y = nice_ticks(y_max if y_max is not None else max(p.y for p in points))
    plot = _Plot(x_min, max(x_max, x_min + 1), ticks_y[-1], height)
    body = [plot.grid_y(ticks_y), plot.axis_x(integer_ticks(x_min, x_max), x_label)]
    for line in series:
        body.append(_line(plot, line, unit))
    return _svg(height, body, ", ".join(line.name for line in series) + f" by {x_label}")


def stacked_bars(
    columns: Sequence[tuple[str, Mapping[str, float]]], colours: Mapping[str, str], *, x_label: str, height: int = 260
) -> str:
    """One column for each (label, seconds by part), parts stacked in the order of `colours`."""
    if not columns:
        return no_data()
    ticks_y = nice_ticks(max(sum(parts.values()) for _, parts in columns))
    plot = _Plot(0, len(columns), ticks_y[-1], height)
    step = max(1, math.ceil(len(columns) / 24))
    labels = [(index + 0.5, label) for index, (label, _) in enumerate(columns) if index % step == 0]
    body = [plot.grid_y(ticks_y, suffix=" s"), plot.axis_x(labels, x_label)]
    width = min(44.0, 0.72 * (plot.x(1) - plot.x(0)))
    for index, (label, parts) in enumerate(columns):
        body.append(_stack(plot, plot.x(index + 0.5) - width / 2, width, f"{x_label} {label}", parts, colours))
    return _svg(height, body, f"Seconds of each phase by {x_label}")


def _stack(
    plot: "_Plot", left: float, width: float, label: str, parts: Mapping[str, float], colours: Mapping[str, str]
) -> str:
    rects, below = [], 0.0
    for part, colour in colours.items():
        seconds = parts.get(part, 0.0)
        if seconds <= 0:
            continue
        top, bottom = plot.y(below + seconds), plot.y(below)
        drawn = max(bottom - top, 0.4)
        rects.append(
            f'<rect class="part" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{drawn:.1f}" '
            f'style="fill:var({colour})">{_title(f"{label}: {part} {seconds:.2f} s")}</rect>'
        )
        below += seconds
    return "".join(rects)


def timeline(bars: Sequence[Bar]) -> str:
    """A row for each distinct `row`, in the order given; interrupted and failed spans are marked and named."""
    if not bars:
        return no_data()
    rows = list(dict.fromkeys(bar.row for bar in bars))
    left, row_height = 96, 22
    height = TOP + row_height * len(rows) + BOTTOM
    end_s = max(max(bar.end_s for bar in bars), 0.001)
    ticks = nice_ticks(end_s)
    plot = _Plot(0, max(end_s * 1.02, ticks[-2] if len(ticks) > 1 else 0), 1, height, left=left)
    body = [plot.axis_x([(t, f"{t:g} s") for t in ticks if plot.x(t) <= WIDTH - RIGHT + 1], "", lines=True)]
    for index, row in enumerate(rows):
        middle = TOP + row_height * (index + 0.5)
        body.append(f'<text x="{left - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(row)}</text>')
    body += [_span(plot, bar, TOP + row_height * rows.index(bar.row), row_height) for bar in bars]
    return _svg(height, body, "Timeline of step attempts")


def _span(plot: "_Plot", bar: Bar, top: float, row_height: float) -> str:
    x, width = plot.x(bar.start_s), max(plot.x(bar.end_s) - plot.x(bar.start_s), 2.0)
    rect = (
        f'<rect class="span {bar.state}" x="{x:.1f}" y="{top + 4:.1f}" width="{width:.1f}" '
        f'height="{row_height - 8:.1f}" rx="2" style="fill:var({bar.colour})">{_title(bar.label)}</rect>'
    )
    if bar.state in {"ok", "running"}:
        return rect
    glyph = "✕" if bar.state == "failed" else "↯"
    return f'{rect}<text class="alert" x="{x + width + 3:.1f}" y="{top + row_height / 2 + 4:.1f}">{glyph}</text>'


def heat_map(load: Sequence[Sequence[float]], row_name: str = "layer", column_name: str = "expert") -> str:
    """Cells coloured by value relative to a balanced share; each row is normalised to a mean of 1."""
    rows = [_relative(row) for row in load if row]
    if not rows:
        return no_data()
    columns = max(len(row) for row in rows)
    left, top = 58, 22
    cell_width = min(64.0, (WIDTH - left - RIGHT) / columns)
    cell_height = 30 if columns <= 32 else 18
    numbers = cell_width >= 28
    body = []
    for column in range(0, columns, max(1, math.ceil(columns / 24))):
        x = left + (column + 0.5) * cell_width
        body.append(f'<text x="{x:.1f}" y="{top - 7}" text-anchor="middle">{column}</text>')
    for index, row in enumerate(rows):
        y = top + index * cell_height
        body.append(
            f'<text x="{left - 8}" y="{y + cell_height / 2 + 4:.1f}" text-anchor="end">{row_name} {index}</text>'
        )
        for column, value in enumerate(row):
            body.append(
                _cell(left + column * cell_width, y, cell_width, cell_height, value, numbers)
                + f"{_title(f'{row_name} {index}, {column_name} {column}: {value:.2f} of a balanced share')}</g>"
            )
    height = top + len(rows) * cell_height + 6
    return _svg(height, body, f"Load by {row_name} and {column_name}")


def _cell(x: float, y: float, width: float, height: float, value: float, number: bool) -> str:
    strength = min(1.0, 0.06 + 0.44 * value)
    text = ""
    if number:
        tone = "on-strong" if strength > 0.6 else "on-weak"
        text = (
            f'<text class="{tone}" x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle">'
            f"{value:.2f}</text>"
        )
    return (
        f'<g><rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{height - 2:.1f}" rx="2" '
        f'style="fill:var(--heat);fill-opacity:{strength:.3f}"/>{text}'
    )


def _relative(row: Sequence[float]) -> list[float]:
    mean = sum(row) / len(row)
    return [value / mean if mean > 0 else 0.0 for value in row]


def legend(entries: Mapping[str, str]) -> str:
    """An HTML legend of (name, CSS variable)."""
    items = "".join(
        f'<li><span class="swatch" style="background:var({colour})"></span>{escape(name)}</li>'
        for name, colour in entries.items()
    )
    return f'<ul class="legend">{items}</ul>'


def no_data() -> str:
    return '<p class="quiet">Nothing recorded yet.</p>'


def nice_ticks(maximum: float) -> list[float]:
    """Up to seven round ticks from 0 to at least `maximum`."""
    if maximum <= 0 or not math.isfinite(maximum):
        return [0.0, 1.0]
    raw = maximum / 5
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    count = math.ceil(maximum / step - 1e-9)
    return [round(index * step, 10) for index in range(count + 1)]


def integer_ticks(first: float, last: float) -> list[tuple[float, str]]:
    step = max(1, math.ceil((last - first) / 10))
    return [(float(x), str(x)) for x in range(math.ceil(first), math.floor(last) + 1, step)]


class _Plot:
    """Maps data to pixels."""

    def __init__(self, x_min: float, x_max: float, y_max: float, height: int, left: int = LEFT) -> None:
        self.x_min, self.x_max, self.y_max, self.height, self.left = x_min, x_max, y_max, height, left

    def x(self, value: float) -> float:
        return self.left + (value - self.x_min) / (self.x_max - self.x_min) * (WIDTH - RIGHT - self.left)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - value / self.y_max * (self.height - BOTTOM - TOP)

    def grid_y(self, ticks: Sequence[float], suffix: str = "") -> str:
        return "".join(
            f'<line class="grid" x1="{self.left}" x2="{WIDTH - RIGHT}" y1="{self.y(t):.1f}" y2="{self.y(t):.1f}"/>'
            f'<text x="{self.left - 7}" y="{self.y(t) + 4:.1f}" text-anchor="end">{compact(t)}{suffix}</text>'
            for t in ticks
        )

    def axis_x(self, ticks: Sequence[tuple[float, str]], label: str, lines: bool = False) -> str:
        base = self.height - BOTTOM
        marks = "".join(
            f'<text x="{self.x(t):.1f}" y="{base + 16}" text-anchor="middle">{escape(text)}</text>'
            + (
                f'<line class="grid" x1="{self.x(t):.1f}" x2="{self.x(t):.1f}" y1="{TOP}" y2="{base}"/>'
                if lines
                else ""
            )
            for t, text in ticks
        )
        middle = (self.left + WIDTH - RIGHT) / 2
        title = (
            f'<text class="axis-label" x="{middle}" y="{self.height - 4}" text-anchor="middle">{escape(label)}</text>'
        )
        return f'<line class="axis" x1="{self.left}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>{marks}{title}'


def compact(value: float) -> str:
    """12500 -> 12.5k, 3000000 -> 3M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):g}{suffix}"
    return f"{value:g}"


def _line(plot: _Plot, line: Series, unit: str) -> str:
    path = " ".join(f"{plot.x(p.x):.1f},{plot.y(p.y):.1f}" for p in line.points)
    radius = 3.5 if len(line.points) <= 60 else 1.8
    dots = "".join(
        f'<circle class="{"hollow" if p.hollow else "dot"}" cx="{plot.x(p.x):.1f}" cy="{plot.y(p.y):.1f}" r="{radius}" '
        f'style="--mark:var({line.colour})">{_title(f"{line.name}, {p.label or p.x:}: {p.y:.4g}{unit}")}</circle>'
        for p in line.points
    )
    return f'<polyline class="line" points="{path}" style="stroke:var({line.colour})"/>{dots}'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _svg(height: float, body: Sequence[str], description: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>'
    )
