from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from perdure.spec.durations import Duration, PositiveDuration, format_duration, parse_duration


@given(st.timedeltas(timedelta(0), timedelta(days=36500)))
def test_what_is_written_is_read_back_to_the_millisecond(duration: timedelta):
    assert abs(parse_duration(format_duration(duration)) - duration) <= timedelta(microseconds=500)


@given(st.integers(0, 10**12).map(lambda count: timedelta(milliseconds=count)))
def test_whole_milliseconds_survive_json(duration: timedelta):
    adapter = TypeAdapter(Duration)
    assert adapter.validate_json(adapter.dump_json(duration)) == duration
    assert parse_duration(duration / timedelta(seconds=1)) == duration


@given(st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.none(), st.from_regex(r"\d{1,40}[smhd]")))
def test_anything_else_is_refused_with_an_example(value: object):
    try:
        duration = parse_duration(value)
    except ValueError as error:
        said = str(error)
    else:
        said = f"expected a duration and got {duration}"
    assert said.startswith("expected a duration")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172800), ("250ms", 0.25), ("1h 30m", 5400), ("1.5h", 5400)],
)
def test_forms(text: str, seconds: float):
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "30", "s", "1x", "1:30", "-3s", "1h-3m", "PT1H", "٣s x"])
def test_other_texts_are_refused(text: str):
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration(text)


def test_some_durations_are_longer_than_zero():
    with pytest.raises(ValidationError, match="longer than 0"):
        TypeAdapter(PositiveDuration).validate_python("0s")
    assert format_duration(timedelta(0)) == "0s"
