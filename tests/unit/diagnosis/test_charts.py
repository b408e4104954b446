"""The charts of a diagnosis: their numbers at their places, and nothing that a browser could not draw."""

import re
from dataclasses import fields

import numpy as np
import pytest
from diagnosis_fixture import diagnosis_of, noisy, noisy_rows

from tailrl.diagnosis import charts
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.diagnosis.measure import Measured


def measured_of(rows: list[LoggedRow]) -> Measured:
    return diagnosis_of(pack(rows)).measured


def numbers(one: charts.Chart) -> list[float]:
    return [float(row[1]) for row in one.rows[1:]]


def test_noise_on_logits_lies_along_the_law() -> None:
    one = charts.size_chart(noisy(200, 60, noise=0.1).measured)
    x, y = ([float(row[column]) for row in one.rows[1:]] for column in (0, 1))
    slope = np.polyfit(np.log(x), np.log(y), 1)[0]
    assert 0.85 < slope < 1.1
    law = re.search(r'd="M ([\d.]+) ([\d.]+) \nL ([\d.]+) ([\d.]+) \n"[^>]*stroke: var\(--arm-1\)', one.svg)
    assert law is not None
    left, low, right, high = map(float, law.groups())
    assert left < right and low > high, "the law rises to the right"
    points = [(float(px), float(py)) for px, py in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', one.svg)]
    assert len(points) == len(one.rows) - 1 == one.svg.count("<title>")
    assert all(abs(py - (low + (high - low) * (px - left) / (right - left))) < 30 for px, py in points)


def test_a_shift_shows_in_the_sign() -> None:
    rows = [LoggedRow("", np.full(20, -1.0), np.full(20, -0.7)) for _ in range(4)]
    assert numbers(charts.sign_chart(measured_of(rows))) == [0.3]


def test_positions_lengths_and_steps_tell_where_it_is() -> None:
    def row(length: int, step: float, late: float) -> LoggedRow:
        size_T = np.where(np.arange(length) >= 8, late, 0.1)
        return LoggedRow("", -3 - size_T, np.full(length, -3.0), step=step)

    found = measured_of([row(8, 0.0, 0.1), row(8, 0.0, 0.1), row(32, 1.0, 0.5), row(32, 1.0, 0.5)])
    by_place = charts.position_chart(found).rows
    assert [(row[0], row[1]) for row in by_place[-2:]] == [("9", "0.5"), ("17", "0.5")]
    assert charts.length_chart(found).rows[1:] == (("8", "0.1", "0.1 to 0.1"), ("32", "0.4", "0.4 to 0.4"))
    steps = charts.step_chart(found)
    assert steps is not None and numbers(steps) == [0.1, 0.4]
    assert charts.step_chart(measured_of([row(8, 0.0, 0.1)])) is None
    many = charts.step_chart(measured_of([row(8, float(step), 0.1) for step in range(500)]))
    assert many is not None and many.svg.count("<title>") == charts.MOST_BARS


def test_responses_are_counted_once() -> None:
    one = charts.response_chart(noisy(50, 20).measured)
    assert sum(int(row[1]) for row in one.rows[1:]) == 50
    assert one.svg.count("<title>") == len(one.rows) - 1


def test_the_joint_picture_has_each_cell_once() -> None:
    found = noisy(50, 40).measured
    one = charts.joint_chart(found)
    cells = re.findall(r'<path d="([^"]*)"[^>]*style="fill: var\(--arm-0\)[;"]', one.svg)
    assert sum(path.count("M") for path in cells) == (found.joint > 0).sum()


@pytest.mark.parametrize(
    "rows",
    [
        [LoggedRow("", np.zeros(3), np.zeros(3))],
        [LoggedRow("", np.array([-1.0]), np.array([-1.0]))],
        [LoggedRow("", np.array([-1e-12, -40.0]), np.array([0.0, -700.0]), step=1.0)],
        [LoggedRow("", np.array([np.nan, -1.0]), np.array([-1.0, np.inf]))],
        noisy_rows(3, 5),
    ],
    ids=["certain", "one token", "extreme", "no log-probs", "small"],
)
def test_whatever_the_log_each_place_is_a_number(rows: list[LoggedRow]) -> None:
    for one in charts.charts(measured_of(rows)):
        text = "".join(str(getattr(one, field.name)) for field in fields(one))
        assert "nan" not in text and "inf" not in text.replace("π_infer", ""), one.name
        places = [float(place) for place in re.findall(r'(?:\bd="M |\bx=")(-?[\d.]+)', one.svg)]
        assert places and all(-1000 < place < 1400 for place in places), one.name
