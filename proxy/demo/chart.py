"""Small SVG charts without a library: lines over time, a cumulative distribution, strips of chunks."""

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 40
NUM_TICKS = 5
MAX_POINTS = 360
"""Points of a line: more than this no screen shows."""

SMALLEST_TOP = 1e-9
"""An axis shorter than this shows nothing."""

_STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)

Point = tuple[float, float]


def lines(
    series: Sequence[tuple[str, Sequence[Point]]],
    *,
    x_label: str,
    y_label: str,
    y_text: Callable[[float], str],
    y_max: float | None = None,
) -> str:
    """A chart with one line per `(name, points)`; names are shown by the page's legend, in this order."""
    points = [point for _, each in series for point in each]
    x_top = _ceiling(max((x for x, _ in points), default=1.0))
    y_top = y_max if y_max is not None else _ceiling(max((y for _, y in points), default=1.0))

    def place(point: Point) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / x_top
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(point[1], y_top) / y_top
        return f"{x:.1f},{y:.1f}"

    out = [_frame(x_top, y_top, x_label, y_label, y_text)]
    for number, (name, each) in enumerate(series):
        path = " ".join(place(point) for point in _thinned(each))
        out.append(
            f'<polyline class="line s{number}" points="{path}"><title>{escape(name)}</title></polyline>'
        )
    return _svg(f"{y_label} over {x_label}", out)


def distribution(series: Sequence[tuple[str, Sequence[float]]], *, x_label: str, y_label: str) -> str:
    """Share of values below x, one line per `(name, values)`."""
    curves: list[tuple[str, Sequence[Point]]] = []
    top = max((value for _, values in series for value in values), default=1.0)
    for name, values in series:
        ordered = sorted(values)
        curve = [(value, (at + 1) / len(ordered)) for at, value in enumerate(ordered)]
        curves.append((name, [(0.0, 0.0), *curve, (top, 1.0)]))
    return lines(curves, x_label=x_label, y_label=y_label, y_text=percent, y_max=1.0)


def strip(parts: Sequence[tuple[str, int]]) -> str:
    """A row of `(kind, number of chunks)` blocks, one square a chunk; `kind` is its CSS class."""
    squares = []
    at = 0
    num_all = max(1, sum(number for _, number in parts))
    step = min(14.0, (WIDTH - 2) / num_all)
    for kind, number in parts:
        for _ in range(number):
            squares.append(
                f'<rect class="chunk {kind}" x="{1 + at * step:.2f}" y="1" width="{max(step - 2, 0.6):.2f}" '
                f'height="16" rx="2"/>'
            )
            at += 1
    told = ", ".join(f"{number} {kind}" for kind, number in parts if number)
    return (
        f'<svg class="strip" viewBox="0 0 {WIDTH} 18" role="img" aria-label="{escape(told)}">'
        f"{''.join(squares)}</svg>"
    )


def percent(value: float) -> str:
    """A share as per cent."""
    return f"{value * 100:.0f} %"


def thousands(value: float) -> str:
    """A count, in thousands where it is large."""
    return f"{value / 1000:,.0f}K" if value >= 1000 else f"{value:.0f}"


def _svg(label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _frame(x_top: float, y_top: float, x_label: str, y_label: str, y_text: Callable[[float], str]) -> str:
    out = []
    for number in range(NUM_TICKS + 1):
        share = number / NUM_TICKS
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share
        x = LEFT + (WIDTH - LEFT - RIGHT) * share
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text class="tick end" x="{LEFT - 8}" y="{y + 4:.1f}">{y_text(y_top * share)}</text>')
        anchor = "end" if number == NUM_TICKS else "mid"
        out.append(
            f'<text class="tick {anchor}" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}">{x_top * share:,.4g}</text>'
        )
    out.append(f'<text class="tick mid" x="{WIDTH / 2}" y="{HEIGHT - 4}">{escape(x_label)}</text>')
    out.append(f"<title>{escape(y_label)}</title>")
    return "".join(out)


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    step = max(1, math.ceil(len(points) / MAX_POINTS))
    return [*points[::step], *points[-1:]]


def _ceiling(value: float) -> float:
    """The next round number that divides well into the ticks."""
    if value < SMALLEST_TOP:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(
        step * unit for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * unit >= value * 0.9999
    )
