"""Draws the course of a job as SVG, for the page, for reports and for slides.

One drawing serves all of them. Colors are classes, which the page's style sheet and the file's own style define for
light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from html import escape

from markupsafe import Markup

from perdure.base.words import count
from perdure.cli.terminal import printable
from perdure.page.course import Course

WHAT = ("worlds", "steps", "throughput", "loss")
"""The plots, from top to bottom."""

STYLE = """
.plot { font: 11px system-ui, sans-serif; } .plot text { fill: #57606a; }
.plot .title { font-weight: 600; fill: #24292f; }
.plot .grid { stroke: #d0d7de; stroke-width: 1; } .plot .line { fill: none; stroke: #0969da; stroke-width: 1.5; }
.plot .mean { stroke: #8250df; stroke-width: 2; stroke-dasharray: 4 3; }
.plot .world { fill: #1a7f37; fill-opacity: .55; stroke: #1a7f37; }
.plot .stop { fill: #cf222e; fill-opacity: .25; stroke: #cf222e; }
.plot .seen { stroke: #bf8700; stroke-dasharray: 2 2; }
.plot .dot { fill: #0969da; }
@media (prefers-color-scheme: dark) {
.plot text { fill: #9198a1; } .plot .title { fill: #f0f6fc; } .plot .grid { stroke: #3d444d; }
.plot .line { stroke: #4493f8; } .plot .mean { stroke: #ab7df8; } .plot .world { fill: #3fb950; stroke: #3fb950; }
.plot .stop { fill: #f85149; stroke: #f85149; } .plot .seen { stroke: #d29922; } .plot .dot { fill: #4493f8; } }
"""
"""The style of a plot; `page.css` has the same for the page, which allows no style within it."""

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT, _AXIS = 960, 64, 12, 22, 96, 22
_NUMBERS = 14
"""The row of the incidents' numbers above the plots."""
_LETTER = 6
"""The width of most letters."""
_INNER = _WIDTH - _LEFT - _RIGHT
_Point = tuple[datetime, float]

NAMES = {
    "worlds": "Nodes of each world",
    "steps": "Step",
    "throughput": "Steps per second",
    "loss": "Loss",
}
"""Their titles."""


def draw(course: Course, *, what: Iterable[str] = WHAT, href: str = "", style: bool = False) -> Markup:
    """Draws plots below each other, over one axis of time.

    Args:
        course: What is drawn.
        what: The plots.
        href: The beginning of the address of an incident, which its number follows; empty: marks are no links.
        style: Put the style into it, for a file that stands alone.
    """
    names = [name for name in WHAT if name in set(what)]
    height = _NUMBERS + len(names) * (_TOP + _HEIGHT) + _AXIS
    length = max((course.end - course.begin).total_seconds(), 1.0)

    def x(time: datetime) -> float:
        share = (time - course.begin).total_seconds() / length
        return _LEFT + _INNER * min(max(share, 0.0), 1.0)

    label = f"{', '.join(NAMES[name].lower() for name in names)} over time, with {count(len(course.marks), 'incident')}"
    size = f'viewBox="0 0 {_WIDTH} {height}"'
    parts = [f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">']
    parts += [f"<style>{STYLE}</style>"] if style else []
    for number, name in enumerate(names):
        parts += _panel(course, name, top=_NUMBERS + number * (_TOP + _HEIGHT), x=x)
    parts += _time_axis(course, bottom=height - _AXIS, x=x)
    parts += _marks(course, bottom=height - _AXIS, x=x, href=href)
    return Markup("".join([*parts, "</svg>"]))  # Numbers, and texts that are escaped here.


def _panel(course: Course, name: str, *, top: int, x: Callable[[datetime], float]) -> list[str]:
    values = _values(course, name)
    low = 0.0 if name != "loss" else min(values, default=0.0)
    high = max(values, default=1.0)
    high = high if high > low else low + 1
    bottom = top + _TOP + _HEIGHT

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (_HEIGHT - 4)

    parts = [f'<text class="title" x="{_LEFT}" y="{top + 15}">{NAMES[name]}</text>']
    for value in _ticks(low, high, whole=name == "worlds"):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    if not values:
        nothing = "the script has reported none" if name == "loss" else "nothing is known yet"
        parts.append(f'<text x="{_LEFT + _INNER / 2}" y="{bottom - _HEIGHT / 2}" text-anchor="middle">{nothing}</text>')
    match name:
        case "worlds":
            for one in course.worlds:
                width = max(x(one.end) - x(one.begin), 1.0)
                choice = f"; {one.choice}" if one.choice else ""
                parts.append(
                    f'<rect class="world" x="{x(one.begin):.1f}" width="{width:.1f}" y="{y(one.nodes):.1f}" '
                    f'height="{bottom - y(one.nodes):.1f}"><title>generation {one.generation}: '
                    f"{one.nodes} node{'' if one.nodes == 1 else 's'}{choice}</title></rect>"
                )
                if one.choice and width >= _LETTER * len(one.choice):
                    # Above the world, or in it where it is as high as the plot.
                    at = max(y(one.nodes) - 4, top + _TOP + 12)
                    parts.append(f'<text x="{x(one.begin) + 3:.1f}" y="{at:.1f}">{one.choice}</text>')
        case "steps":
            parts += [_line(line, x, y) for line in course.steps]
        case "throughput":
            for pace in course.paces:
                at = f"{y(pace.rate):.1f}"
                parts.append(
                    f'<line class="mean" x1="{x(pace.begin):.1f}" x2="{x(pace.end):.1f}" y1="{at}" y2="{at}">'
                    f"<title>mean: {_number(pace.rate)} steps/s</title></line>"
                )
            parts += [_line(line, x, y) for line in course.rates]
        case _:
            parts += [_line(line, x, y) for line in course.losses]
    return parts


def _values(course: Course, name: str) -> list[float]:
    match name:
        case "worlds":
            return [float(one.nodes) for one in course.worlds]
        case "steps":
            return [value for line in course.steps for _, value in line]
        case "throughput":
            return [value for line in course.rates for _, value in line] + [one.rate for one in course.paces]
        case _:
            return [value for line in course.losses for _, value in line]


def _line(points: Sequence[_Point], x: Callable[[datetime], float], y: Callable[[float], float]) -> str:
    if len(points) == 1:
        ((time, value),) = points
        return f'<circle class="dot" r="2" cx="{x(time):.1f}" cy="{y(value):.1f}"/>'
    path = " ".join(f"{x(time):.1f},{y(value):.1f}" for time, value in points)
    return f'<polyline class="line" points="{path}"/>' if path else ""


def _marks(course: Course, *, bottom: float, x: Callable[[datetime], float], href: str) -> list[str]:
    parts: list[str] = []
    top, free = _NUMBERS + _TOP, 0.0
    for mark in course.marks:
        title = f"<title>{escape(printable(mark.title))}</title>"
        begin = x(mark.begin)
        if mark.is_observation:
            shape = f'<line class="seen" x1="{begin:.1f}" x2="{begin:.1f}" y1="{top}" y2="{bottom}">{title}</line>'
        else:
            width = max(x(mark.end or course.end) - begin, 1.0)
            shape = (
                f'<rect class="stop" x="{begin:.1f}" width="{width:.1f}" y="{top}" height="{bottom - top}">'
                f"{title}</rect>"
            )
        number = f"#{mark.number}"
        # Numbers would hide each other where incidents are close.
        if begin >= free:
            shape += f'<text x="{begin:.1f}" y="{_NUMBERS - 2}" text-anchor="middle">{number}</text>'
            free = begin + _LETTER * (len(number) + 1)
        parts.append(f'<a href="{escape(href)}{mark.number}">{shape}</a>' if href else shape)
    return parts


def _time_axis(course: Course, *, bottom: float, x: Callable[[datetime], float]) -> list[str]:
    length = (course.end - course.begin).total_seconds()
    step = next((one for one in _TIME_STEPS if length / one <= 8), _TIME_STEPS[-1])
    format_ = "%H:%M:%S" if step < 60 else "%H:%M" if length < 86_400 else "%b %d %H:%M"
    first = math.ceil(course.begin.timestamp() / step) * step
    parts: list[str] = []
    for number in range(int(length // step) + 1):
        time = datetime.fromtimestamp(first + number * step, course.begin.tzinfo)
        if time <= course.end - timedelta(seconds=length * 0.02):
            parts.append(
                f'<text x="{x(time):.1f}" y="{bottom + 15}" text-anchor="middle">{time.astimezone():{format_}}</text>'
            )
    return parts


_TIME_STEPS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400, 43_200, 86_400, 172_800, 604_800)


def _ticks(low: float, high: float, *, whole: bool) -> list[float]:
    """About four round numbers in a range."""
    raw = (high - low) / 3
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    if abs(value) >= 10_000 and value == int(value):
        return f"{value / 1000:,.0f}k" if value < 1e6 else f"{value / 1e6:,.1f}M"
    return f"{value:.4g}"
