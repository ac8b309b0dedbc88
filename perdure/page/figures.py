"""Draws the course of a job with matplotlib, for slides and papers that take no SVG.

Only `perdure plot -o` needs it, and only for files of other formats than SVG, so it is an extra.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from perdure.base.errors import Refused
from perdure.cli.terminal import printable
from perdure.page.course import Course
from perdure.page.plots import NAMES, WHAT

FORMATS = ("png", "pdf")

_STEPS, _MEAN, _WORLD, _STOP, _SEEN, _SOFT = "#0969da", "#8250df", "#1a7f37", "#cf222e", "#bf8700", "#57606a"
_WIDTH, _HEIGHT = 9.6, 1.5
"""Inches of a figure, and of each of its plots: 1,920 pixels at its 200 dots per inch."""
_DOTS = 200


def write_figure(course: Course, path: Path, *, what: Iterable[str], title: str) -> None:
    """Draws plots below each other, over one axis of time, and writes them.

    Args:
        course: What is drawn.
        path: The file, whose suffix is the format.
        what: The plots.
        title: The title of the figure.

    Raises:
        Refused: if matplotlib is not installed.
    """
    try:
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise Refused(
            f"{path}: a plot in this format needs matplotlib ({missing.name} is not installed)",
            remedy="Run `pip install 'perdure[plots]'`, or name a file that ends with .svg.",
        ) from missing
    names = [name for name in WHAT if name in set(what)]
    # Not pyplot, which would choose a window system and keep every figure.
    figure: Any = Figure(figsize=(_WIDTH, _HEIGHT * len(names) + 0.6), dpi=_DOTS, layout="constrained")
    figure.suptitle(printable(title), fontsize=10, x=0.01, ha="left", parse_math=False)
    all_axes = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    zone = datetime.now().astimezone().tzinfo
    for axes, name in zip(all_axes, names, strict=True):
        _panel(axes, course, name)
        _marks(axes, course, is_first=axes is all_axes[0])
    last = all_axes[-1]
    last.set_xlim(course.begin, max(course.end, course.begin + timedelta(seconds=1)))
    locator = AutoDateLocator(tz=zone, minticks=3, maxticks=9)
    last.xaxis.set_major_locator(locator)
    last.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=zone))
    last.xaxis.get_offset_text().set(size=8, color=_SOFT)
    figure.savefig(path, format=path.suffix.lower().removeprefix("."))


def _panel(axes: Any, course: Course, name: str) -> None:
    axes.set_title(NAMES[name], loc="left", fontsize=9, color=_SOFT)
    axes.tick_params(labelsize=8, colors=_SOFT)
    axes.grid(visible=True, color="#d0d7de", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    match name:
        case "worlds":
            _worlds(axes, course)
        case "steps":
            _lines(axes, course.steps)
        case "throughput":
            for pace in course.paces:
                axes.plot([pace.begin, pace.end], [pace.rate, pace.rate], color=_MEAN, linewidth=1.5, linestyle="--")
            _lines(axes, course.rates)
        case _:
            _lines(axes, course.losses)
    if not axes.has_data():
        nothing = "the script has reported none" if name == "loss" else "nothing is known yet"
        axes.text(0.5, 0.5, nothing, transform=axes.transAxes, ha="center", va="center", fontsize=8, color=_SOFT)
    if name != "loss":
        axes.set_ylim(bottom=0)


def _worlds(axes: Any, course: Course) -> None:
    for world in course.worlds:
        axes.fill_between([world.begin, world.end], 0, world.nodes, color=_WORLD, alpha=0.55, linewidth=0)
    axes.yaxis.get_major_locator().set_params(integer=True)


def _lines(axes: Any, lines: Sequence[Sequence[tuple[datetime, float]]]) -> None:
    for line in lines:
        alone = "o" if len(line) == 1 else None
        axes.plot([time for time, _ in line], [value for _, value in line], color=_STEPS, marker=alone, markersize=2)
    for line in axes.lines:
        line.set_linewidth(1.2)


def _marks(axes: Any, course: Course, *, is_first: bool) -> None:
    for mark in course.marks:
        if mark.is_observation:
            axes.axvline(mark.begin, color=_SEEN, linewidth=0.8, linestyle=":")
        else:
            axes.axvspan(mark.begin, mark.end or course.end, color=_STOP, alpha=0.25, linewidth=0.8)
        if is_first:
            axes.annotate(
                f"#{mark.number}",
                (mark.begin, 1.0),
                xycoords=("data", "axes fraction"),
                fontsize=7,
                color=_SOFT,
                ha="center",
                va="bottom",
            )
