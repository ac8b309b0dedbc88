"""Tests of reports and plots: files that stand alone, of the course of a job as its own records tell it."""

from __future__ import annotations

import math
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest

from perdure.base.errors import Refused
from perdure.contract import CourseSample, Progress, Resized, ScalingView
from perdure.page.course import Course, course_of
from perdure.page.figures import write_figure
from perdure.page.plots import WHAT, draw
from perdure.page.report import plot, report
from tests.page.played import HOSTILE, PlayedClient, PlayedJob, failed, interrupted
from tests.policy.scenario import Scenario


def course(job: PlayedJob, *samples: CourseSample) -> Course:
    status = job.status
    progress = (status.progress or Progress()).model_copy(update={"course": samples})
    return course_of(status.model_copy(update={"progress": progress}), job.incidents, now=datetime.now(UTC))


def test_worlds_begin_and_end_with_the_interruptions_between_them() -> None:
    job = PlayedJob(interrupted())
    (incident,) = job.incidents
    found = course(job)
    first, second = found.worlds
    assert (first.generation, first.nodes, first.begin, first.end) == (1, 4, job.status.started_at, incident.started_at)
    assert (second.generation, second.nodes, second.begin) == (2, 4, incident.over_at)
    assert [mark.number for mark in found.marks] == [1]


def test_steps_are_drawn_between_those_that_the_job_recorded() -> None:
    job = PlayedJob(interrupted())
    (incident,) = job.incidents
    first, *_ = course(job).steps
    assert first == [(job.status.started_at, 0), (incident.started_at, 120)]
    (pace,) = course(job).paces
    assert pace.rate == pytest.approx(2.0)


def test_samples_of_agents_are_between_them() -> None:
    job = PlayedJob(interrupted())
    begin = int(job.status.started_at.timestamp())
    samples = [CourseSample(begin + second, 2 * second, 2.0, 5.0 - second / 100) for second in range(10, 50, 10)]
    found = course(job, *samples, CourseSample(begin + 55, 110, float("inf"), float("nan")))
    assert [step for _, step in found.steps[0]] == [0, 20, 40, 60, 80, 110, 120]
    assert [rate for line in found.rates for _, rate in line] == [2.0] * 4
    assert [len(line) for line in found.losses] == [4]


def test_no_line_crosses_an_interruption() -> None:
    job = PlayedJob(interrupted())
    (incident,) = job.incidents
    begin, stop = int(job.status.started_at.timestamp()), int(incident.started_at.timestamp())
    times = (begin + 10, begin + 20, stop + 10, stop + 20, stop + 30)
    found = course(job, *(CourseSample(time, 10 + time - begin, 2.0, 1.0) for time in times))
    assert [len(line) for line in found.losses] == [2, 3]
    assert [len(line) for line in found.rates] == [2, 3]


def test_a_sample_of_ranks_that_began_within_an_interruption_is_a_point_of_its_own() -> None:
    job = PlayedJob(interrupted())
    (incident,) = job.incidents
    assert incident.over_at is not None
    begin, end = incident.started_at.timestamp(), incident.over_at.timestamp()
    times = (begin - 10, math.ceil(begin), end + 10)
    found = course(job, *(CourseSample(int(time), 10, 2.0, 1.0) for time in times))
    assert [len(line) for line in found.losses] == [1, 1, 1]


def test_node_hours_are_those_of_its_worlds() -> None:
    found = course(PlayedJob(interrupted()))
    first, second = found.worlds
    hours = sum((one.end - one.begin).total_seconds() for one in (first, second)) * 4 / 3600
    assert found.node_hours == pytest.approx(hours)


def test_a_script_that_starts_over_has_its_speed_from_its_own_first_step() -> None:
    job = PlayedJob(interrupted())
    (incident,) = job.incidents
    assert incident.over_at is not None
    begin = int(incident.over_at.timestamp())
    samples = [CourseSample(begin + second, 2 * second, 2.0, None) for second in (1, 11, 21)]
    found = course(job, *samples)
    assert [step for _, step in found.steps[1]] == [2, 22, 42]
    assert found.paces[1].rate == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("chosen", "following", "expected"),
    [
        (4, None, "kept"),
        (None, None, "tried"),
        (2, Resized(time=datetime.max.replace(tzinfo=UTC), before=4, after=2, is_try=False), "taken back"),
        (2, Resized(time=datetime.max.replace(tzinfo=UTC), before=4, after=2, is_try=True), "tried"),
    ],
)
def test_worlds_tell_what_became_of_a_number_that_the_job_chose(
    chosen: int | None, following: Resized | None, expected: str
) -> None:
    job = PlayedJob(interrupted())
    (incident,) = job.incidents
    tried = Resized(time=incident.started_at, before=4, after=4, is_try=True)
    resized = (tried,) if following is None else (tried, following)
    view = ScalingView(fewest=1, largest=4, min_efficiency=0.7, chosen=chosen, resized=resized)
    status = job.status.model_copy(update={"scaling": view})
    found = course_of(status, job.incidents, now=datetime.now(UTC))
    assert [world.choice for world in found.worlds] == ["", expected]
    assert f"4 nodes; {expected}</title>" in draw(found)


@pytest.mark.parametrize("job", [interrupted(), failed()], ids=["interrupted", "failed"])
def test_a_plot_is_xml_that_stands_alone(job: object) -> None:
    found = course(PlayedJob(job))  # pyrefly: ignore[bad-argument-type]
    for what in (WHAT, ("loss",), ("throughput", "worlds")):
        root = ElementTree.fromstring(draw(found, what=what, style=True))
        titles = [one.text for one in root if one.get("class") == "title"]
        assert len(titles) == len(what)


def test_an_incident_at_the_beginning_has_its_number_above_the_titles() -> None:
    job = PlayedJob(Scenario("2").running().wait(1).lost(1).ready(1).steps().wait(600))
    texts = [one for one in ElementTree.fromstring(draw(course(job))).iter() if one.tag.endswith("text")]
    height = {one.text: float(one.attrib["y"]) for one in texts if one.text in ("#1", "Nodes of each world")}
    assert height["#1"] + 10 < height["Nodes of each world"]


def test_a_job_that_has_just_begun_has_a_plot() -> None:
    now = datetime.now(UTC)
    ElementTree.fromstring(draw(Course(now, now, [], [], [], [], [], [])))
    ElementTree.fromstring(draw(Course(now, now + timedelta(days=30), [], [], [[(now, 7.0)]], [[(now, 0.0)]], [], [])))


async def test_a_report_has_what_the_page_has_and_loads_nothing(client: PlayedClient) -> None:
    for name in ("llama", "gpt"):
        written = await report(client, name)
        assert "<svg" in written
        assert "incident-1" in written
        assert "train.py" in written
        for forbidden in ("<script", "<link", "src=", "logs?", 'href="http'):
            assert forbidden not in written.replace("&lt;script", "").replace("img src=x", "")
    assert "<img" not in written
    assert HOSTILE not in written


@pytest.mark.parametrize(
    ("name", "beginning"), [("a.svg", b"<svg "), ("a.SVG", b"<svg "), ("a.png", b"\x89PNG\r\n"), ("a.pdf", b"%PDF-")]
)
async def test_a_plot_is_written_in_the_format_of_its_file(
    client: PlayedClient, tmp_path: Path, name: str, beginning: bytes
) -> None:
    await plot(client, "llama", ["loss", "worlds"], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(beginning)


def test_a_figure_has_the_requested_plots_and_one_is_drawn_of_any_job(tmp_path: Path) -> None:
    heights: list[int] = []
    path = tmp_path / "figure.png"
    for job, what in ((interrupted(), ("loss",)), (interrupted(), ("throughput", "worlds")), (failed(), WHAT)):
        write_figure(course(PlayedJob(job)), path, what=what, title=f"{HOSTILE} $\\bad{{")
        content = path.read_bytes()
        heights.append(int.from_bytes(content[20:24], "big"))
        assert int.from_bytes(content[16:20], "big") == 1920
    assert heights == sorted(set(heights))


async def test_a_format_without_its_package_is_refused_with_the_remedy(
    client: PlayedClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Refused, match=r"needs matplotlib") as refused:
        await plot(client, "llama", ["loss"], tmp_path / "a.png")
    assert "perdure[plots]" in refused.value.remedy
    assert not (tmp_path / "a.png").exists()
    await plot(client, "llama", ["loss"], tmp_path / "a.svg")
