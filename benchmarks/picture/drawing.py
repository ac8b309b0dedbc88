"""Draws the steps of several systems over time, with the faults, as SVG that reads well on light and dark pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise

from benchmarks.picture.course import Fault, Point, Record

WIDTH, HEIGHT = 880, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 120, 62, 44
_LABEL_HEIGHT = 16
_STALL = 1.0
"""Seconds without a step at the end after which a system is drawn as idle."""

_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #57606a; }
.title { font-size: 16px; font-weight: 600; fill: #1f2328; } .name { font-weight: 600; }
.grid { stroke: #d0d7de; } .line { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
.idle { fill: none; stroke-width: 1.5; stroke-dasharray: 3 4; }
.fault { stroke: #cf222e; stroke-width: 1.5; } .fault-name { fill: #cf222e; font-weight: 600; }
.ours { stroke: #1a7f37; } .first { stroke: #0969da; } .second { stroke: #9a6700; }
.ours-name { fill: #1a7f37; } .first-name { fill: #0969da; } .second-name { fill: #9a6700; }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1; } .title { fill: #f0f6fc; } .grid { stroke: #3d444d; }
.fault { stroke: #f85149; } .fault-name { fill: #f85149; }
.ours { stroke: #3fb950; } .first { stroke: #4493f8; } .second { stroke: #d29922; }
.ours-name { fill: #3fb950; } .first-name { fill: #4493f8; } .second-name { fill: #d29922; } }
"""
_CLASSES = ("ours", "first", "second")

_Scale = Callable[[float], float]


def draw(records: Mapping[str, Record], faults: Sequence[Fault], *, seconds: float) -> str:
    """The picture.

    Args:
        records: What became of the job under each system; the first is ours.
        faults: The faults.
        seconds: The time that is shown.
    """
    top = max((record.last_step for record in records.values()), default=0) or 1

    def x(at: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(at / seconds, 1.0)

    def y(step: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * step / top

    words = "Steps of the same training over time, with the same faults"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="22">{words}</text>',
    ]
    for step in _round_numbers(top):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(step):.1f}" y2="{y(step):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(step) + 4:.1f}" text-anchor="end">{step:,}</text>')
    parts += [
        f'<text x="{x(second):.1f}" y="{HEIGHT - _BOTTOM + 20}" text-anchor="middle">{second} s</text>'
        for second in range(0, int(seconds) + 1, 10)
    ]
    for fault in faults:
        at = f"{x(fault.at):.1f}"
        parts.append(f'<line class="fault" x1="{at}" x2="{at}" y1="{_TOP - 12}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text class="fault-name" x="{at}" y="{_TOP - 18}" text-anchor="middle">{fault.title}</text>')
    for kind, record in zip(_CLASSES, records.values(), strict=False):
        parts += _course(kind, record, seconds, x, y)
    parts += _names(records, y)
    return "\n".join([*parts, "</svg>\n"])


def _course(kind: str, record: Record, seconds: float, x: _Scale, y: _Scale) -> list[str]:
    """Lines while it steps, and dashes where it does not."""

    def path(points: Sequence[Point]) -> str:
        return " ".join(f"{x(point.at):.1f},{y(point.step):.1f}" for point in points)

    lines = sorted((line for line in record.lines if line), key=lambda line: line[0].at)
    parts = [f'<polyline class="line {kind}" points="{path(line)}"/>' for line in lines]
    gaps = [(before[-1], after[0]) for before, after in pairwise(lines)]
    if lines and seconds - lines[-1][-1].at > _STALL:
        gaps.append((lines[-1][-1], Point(at=seconds, step=lines[-1][-1].step)))
    parts += [f'<polyline class="idle {kind}" points="{path(gap)}"/>' for gap in gaps]
    return parts


def _names(records: Mapping[str, Record], y: _Scale) -> list[str]:
    """The systems' names at the ends of their lines, below each other where these are close."""
    parts: list[str] = []
    free = -1e9
    named = zip(_CLASSES, records.items(), strict=False)
    for kind, (name, record) in sorted(named, key=lambda entry: -entry[1][1].last_step):
        at = max(y(record.last_step) + 4, free)
        free = at + 2 * _LABEL_HEIGHT
        left = WIDTH - _RIGHT + 8
        parts.append(f'<text class="name {kind}-name" x="{left}" y="{at:.1f}">{escape(name)}</text>')
        parts.append(f'<text x="{left}" y="{at + _LABEL_HEIGHT:.1f}">{record.last_step:,} steps</text>')
    return parts


def _round_numbers(top: int) -> range:
    step = next(size for size in (50, 100, 200, 500, 1000, 2000, 5000, 10**6) if top / size <= 6)
    return range(0, top + 1, step)
