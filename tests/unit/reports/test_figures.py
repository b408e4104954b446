"""The figures: they show the tables' numbers, keep an arm's colour, cope with zeros, and let no text be cut."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases_fixture import rest_long
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from tailrl.artifacts.results import read_results
from tailrl.config.study import Study
from tailrl.page_parts import TEMPLATES
from tailrl.reports.ablation.numbers import Point, points_of
from tailrl.reports.ablation.page import ablation_figure
from tailrl.reports.axes import (
    ARM_COLOURS,
    BLACK,
    BLUE,
    GREEN,
    RED,
    arm_legend,
    arm_styles,
    make_panels,
    save_svg,
    set_magnitude_scale,
    style,
)
from tailrl.reports.course import page as course
from tailrl.reports.course.numbers import TimeShare
from tailrl.reports.curves import Curve, lacking
from tailrl.reports.mismatch import page as mismatch
from tailrl.reports.mismatch.numbers import NATS, DeltaBin
from tailrl.reports.scores import page as scores
from tailrl.reports.scores.numbers import Gain, PolicyScore, RunScore
from tailrl.stats.intervals import Interval
from tailrl.stats.tests import paired_difference
from tailrl.tracking.metrics import VETOED

ARMS = ("naive", "dvp", "mis", "dvp_mis")
NAN = math.nan


def flat_curve(arm: str, metric: str, value: float, steps: int = 5) -> Curve:
    values = np.full(steps, value)
    return Curve(arm, metric, np.arange(steps), values, values * 0.9, values * 1.1, 1)


def curves(metrics: tuple[str, ...], value: float = 0.5, steps: int = 5) -> list[Curve]:
    return [flat_curve(arm, m, value * (i + 1), steps) for m in metrics for i, arm in enumerate(ARMS)]


def mismatch_curves(value: float = 0.5) -> list[Curve]:
    return curves((*mismatch.MISMATCH, VETOED), value)


def kept_curves() -> list[Curve]:
    return curves(tuple(lacking(key) if mismatch.is_mass(key) else key for pair in mismatch.KEPT for key in pair), 1e-3)


def bins(tokens: int = 50, size: float = 0.01) -> list[DeltaBin]:
    edges = list(itertools.pairwise(NATS))
    return [
        DeltaBin(arm, *edge, tokens, 9, size, size / 2, size * 2, 0.0, -0.1, 0.1, *[0.01] * 6)
        for arm in ARMS
        for edge in edges
    ]


def gains(arms: tuple[str, ...] = ARMS, score: float = 0.6) -> tuple[list[Gain], list[PolicyScore]]:
    interval = Interval(score, score - 0.1, score + 0.5, 3)
    gain = paired_difference([1, 0.5], [0, 0.4])
    found = [Gain(arm, interval, interval, interval, gain, 0.01, 0.1, 0.2, 0.05) for arm in arms]
    policies = [PolicyScore(arm, seed, Interval(score, 0.5, 0.7, 30), 0.9, gain) for arm in arms for seed in range(3)]
    return found, [PolicyScore("base", 0, Interval(0.4, 0.3, 0.5, 30), 0.7, gain), *policies]


def evaluation_figure(arms: tuple[str, ...] = ARMS, score: float = 0.6) -> Figure:
    found, policies = gains(arms, score)
    return scores.evaluation_figure(found, policies, policies[0].avg, 8)


def score_by_k3_figure(arms: tuple[str, ...], k3: float = 0.001) -> Figure:
    runs = [RunScore(arm, seed, k3 * 10**place, 0.5) for place, arm in enumerate(arms) for seed in (0, 1)]
    return scores.score_by_k3_figure(runs, arms, 0.4, 8)


def shares(value: float = 0.125) -> list[TimeShare]:
    return [TimeShare(arm, phase, value, value * 2) for arm in ARMS for phase in course.PHASE_COLOURS]


LONG = tuple(f"an_arm_with_long_name_{number}" for number in range(9))
ALL = {
    "training": lambda: course.training_figure(curves(tuple(course.TRAINING)), ARMS),
    "training, nothing recorded": lambda: course.training_figure(curves(tuple(course.TRAINING), NAN), ARMS),
    "training, one step": lambda: course.training_figure(curves(tuple(course.TRAINING), steps=1), ARMS),
    "mismatch": lambda: mismatch.mismatch_figure(mismatch_curves(), ARMS),
    "mismatch, exactly zero": lambda: mismatch.mismatch_figure(mismatch_curves(value=0.0), ARMS),
    "mismatch, infinite": lambda: mismatch.mismatch_figure(mismatch_curves(value=math.inf), ARMS),
    "kept": lambda: mismatch.kept_figure(kept_curves(), ARMS),
    "kept, no arm prunes": lambda: mismatch.kept_figure([], ARMS),
    "delta": lambda: mismatch.delta_figure(bins(), ARMS),
    "delta, zero": lambda: mismatch.delta_figure(bins(size=0.0), ARMS),
    "delta, few tokens": lambda: mismatch.delta_figure(bins(tokens=0), ARMS),
    "delta, long names": lambda: mismatch.delta_figure([replace(b, arm=LONG[0]) for b in bins()], LONG),
    "evaluation": lambda: evaluation_figure(),
    "evaluation, long names": lambda: evaluation_figure(LONG),
    "evaluation, nothing solved": lambda: evaluation_figure(score=0.0),
    "score by k3": lambda: score_by_k3_figure(LONG),
    "score by k3, not recorded": lambda: score_by_k3_figure(ARMS, NAN),
    "score by k3, none": lambda: score_by_k3_figure(ARMS, 0.0),
    "time": lambda: course.time_figure(shares(), ARMS),
    "time, not recorded": lambda: course.time_figure(shares(NAN), ARMS),
}


def visible_texts(figure: Figure) -> list[Text]:
    """Titles, labels, notes, legends, and the tick labels within the axes' limits."""
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for ax in figure.axes:
        texts += ax.texts
        if not ax.axison:
            continue
        texts += [ax._left_title, ax.xaxis.label, ax.yaxis.label]  # type: ignore[attr-defined]
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text for text in texts if text.get_text() and text.get_visible()]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("error")
def test_no_text_leaves_the_figure(name: str) -> None:
    with style():
        figure = ALL[name]()
        canvas = FigureCanvasAgg(figure)
        figure.draw_without_rendering()
        boxes = {text.get_text(): text.get_window_extent() for text in visible_texts(figure)}
    assert boxes
    width, height = canvas.get_width_height()
    for text, box in boxes.items():
        in_view = box.x0 > -1 and box.x1 < width + 1 and box.y0 > -1 and box.y1 < height + 1
        assert in_view, f"{text!r} is cut: {box}"


def test_a_panel_shows_the_curves_of_its_table() -> None:
    table = curves(tuple(course.TRAINING))
    figure = course.training_figure(table, ARMS)
    for ax, metric in zip(figure.axes, course.TRAINING, strict=True):
        own = [curve for curve in table if curve.metric == metric]
        assert len(ax.lines) == len(own)
        for line, curve in zip(ax.lines, own, strict=True):
            np.testing.assert_array_equal(line.get_xydata(), np.column_stack([curve.step_N, curve.mean_N]))
            assert to_hex(line.get_color(), keep_alpha=False).upper() == arm_styles(ARMS)[curve.arm][0]


def test_curves_have_a_band_and_scores_an_interval() -> None:
    """From the smallest to the largest seed; over seeds and problems."""
    table = [replace(curve, low_N=curve.mean_N / 2, high_N=curve.mean_N * 2) for curve in curves(course.TRAINING)]
    for ax, metric in zip(course.training_figure(table, ARMS).axes, course.TRAINING, strict=True):
        own = [curve for curve in table if curve.metric == metric]
        bands = [np.asarray(band.get_paths()[0].vertices)[:, 1] for band in ax.collections]
        assert [(band.min(), band.max()) for band in bands] == [(c.low_N.min(), c.high_N.max()) for c in own]
    ax, *_ = evaluation_figure().axes
    lines = [part for part in ax.collections if isinstance(part, LineCollection)]
    ends = {tuple(np.round(np.sort(segment[:, 0]), 9)) for part in lines for segment in part.get_segments()}
    assert (0.5, 1.1) in ends, "of an arm: its score minus 0.1 to its score plus 0.5"


def hidden(figure: Figure, ax: Axes, arms: Sequence[str], least: int = 10) -> list[str]:
    """The arms' colours that fewer than `least` pixels of a panel have."""
    figure.set_dpi(200)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3].astype(int)
    box = ax.get_window_extent()
    inside = pixels[int(box.y0) : int(box.y1), int(box.x0) : int(box.x1)]
    colours = {
        look.colour: [int(look.colour[at : at + 2], 16) for at in (1, 3, 5)] for look in arm_styles(arms).values()
    }
    return [colour for colour, own in colours.items() if (abs(inside - own).max(axis=-1) < 8).sum() < least]


NINE = tuple(f"arm{number}" for number in range(9))
CURVES = [(arms, steps) for arms in (ARMS, NINE) for steps in (1, 5, 40, 200)]
FEW = [(NINE, 1), (ARMS, 5), (NINE, 200)]


@pytest.mark.parametrize("case", rest_long(FEW, CURVES, lambda case: f"{len(case[0])}-{case[1]}"))
def test_equal_curves_all_show(case: tuple[tuple[str, ...], int]) -> None:
    """Exact zeros, for example: the panel has each arm's colour, and each arm its own steps for markers."""
    arms, steps = case
    table = [flat_curve(arm, metric, 0.0, steps) for arm in arms for metric in course.TRAINING]
    figure = course.training_figure(table, arms)
    assert hidden(figure, figure.axes[1], arms) == []
    if steps >= len(arms):
        places = [line.get_markevery() for line in figure.axes[1].lines]
        assert len(set(itertools.chain(*places))) == sum(map(len, places))


@pytest.mark.parametrize(
    "bases", rest_long((ARMS[:2], ARMS), (ARMS[:2], ARMS, NINE[:7]), lambda bases: str(len(bases)))
)
def test_equal_values_of_an_ablation_all_show(bases: tuple[str, ...]) -> None:
    zero = Interval(0.0, 0.0, 0.0, 3)
    gain = paired_difference([1, 0.5], [0, 0.4])
    rest = (zero, gain, gain, 1.0, *[zero] * 5, 3, 0)
    points = [Point(base, base, value, *rest) for base in bases for value in "012345"]
    figure = ablation_figure(points, Interval(0.4, 0.3, 0.5, 30), "dose", 8, bases)
    assert hidden(figure, figure.axes[2], bases, 200) == [], "of each, six markers of 74 pixels"


def test_the_delta_figure_leaves_out_bins_with_few_tokens_but_counts_them() -> None:
    table = [replace(b, tokens=mismatch.FEWEST_TOKENS - (b.nats_from == 0.0)) for b in bins() if b.arm == "naive"]
    size, signed, count = mismatch.delta_figure(table, ("naive",)).axes
    assert np.size(count.lines[0].get_xdata()) == len(table)
    assert np.size(size.lines[0].get_xdata()) == np.size(signed.lines[0].get_xdata()) == len(table) - 1


def test_a_panel_of_zeros_says_so() -> None:
    """Rejected sequences are nothing in most studies; a veto in any arm is something."""
    texts = [text.get_text() for text in mismatch.mismatch_figure(mismatch_curves(value=0.0), ARMS).axes[5].texts]
    assert texts == ["0 in every arm"]
    own = [curve for curve in mismatch_curves(value=0.0) if curve.metric != VETOED]
    assert not mismatch.mismatch_figure([*own, *curves((VETOED,))], ARMS).axes[5].texts


def test_time_bars_fill_the_step() -> None:
    (ax,) = course.time_figure(shares(), ARMS).axes
    bars = [bar for bar in ax.patches if isinstance(bar, Rectangle) and bar.get_y() < 0]
    assert sum(bar.get_width() for bar in bars) == pytest.approx(1)
    assert sorted(bar.get_x() for bar in bars) == pytest.approx([i / 8 for i in range(8)])


VISION = {
    "any": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""Machado, Oliveira and Fernandes (2009): linear sRGB as seen without one kind of cone."""


def linear(colour: str) -> np.ndarray:
    share = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear sRGB, in which a distance of 2 is just seen."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.maximum(to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089], 0.008856))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


CSS = (TEMPLATES / "page.css").read_text(encoding="utf-8")
ON_DARK = [re.findall(rf"--arm-{number}: (#\w+);", CSS)[1] for number in range(len(ARM_COLOURS))]


@pytest.mark.parametrize(("colours", "page"), [(ARM_COLOURS, "#FFFFFF"), (ON_DARK, "#14181C")])
@pytest.mark.parametrize("vision", VISION)
def test_any_eye_tells_the_colours_apart(colours: tuple[str, ...], page: str, vision: str) -> None:
    seen = [lab(np.array(VISION[vision]) @ linear(colour)) for colour in colours]
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 22
    back = linear(page) @ [0.2126, 0.7152, 0.0722] + 0.05
    for colour in colours:
        shines = linear(colour) @ [0.2126, 0.7152, 0.0722] + 0.05
        assert max(shines / back, back / shines) >= 3, f"WCAG 1.4.11 asks for a contrast of 3: {colour}"


def test_a_remedy_has_one_colour_in_all_studies() -> None:
    names = ["exact", "mine", "naive_stressed", "dvp_mis", "grpo_dvp_control", "naive", "other"]
    looks = arm_styles(names)
    assert [looks[arm].colour for arm in ("exact", "naive", "naive_stressed", "dvp_mis", "grpo_dvp_control")] == [
        BLACK, BLUE, BLUE, GREEN, RED,
    ]  # fmt: skip
    assert arm_styles(["dvp_mis", "naive=e-3"])["naive=e-3"].colour == BLUE
    assert len({looks[arm].colour for arm in names}) == 6, "the others take colours that no known arm has"


def test_an_ablation_draws_an_arm_as_the_study_does(make_study: Callable[..., tuple[Study, Path]]) -> None:
    """Its base arms are some of the study's."""
    dose = {"base": ["b"], "field": "disturbance.floor", "values": [0.0, 0.01]}
    study, folder = make_study(seeds=[0], training={"steps": 2}, arms={"a": {}, "b": {}}, ablations={"dose": dose})
    arms = study.ablation_arms("dose")
    points = points_of(read_results(study, folder, arms), [("b", arm, str(at)) for at, arm in enumerate(arms)])
    ax, *_ = ablation_figure(points, Interval(0.4, 0.3, 0.5, 30), "dose", 8, list(study.arms)).axes
    assert arm_styles(["a", "b"])["b"].colour in {to_hex(line.get_color()).upper() for line in ax.lines}
    assert arm_styles(["b"])["b"].colour != arm_styles(["a", "b"])["b"].colour


def test_an_arm_keeps_its_style_and_no_two_share_one() -> None:
    names = [f"arm{number}" for number in range(5 * len(ARM_COLOURS))]
    styles = arm_styles(names)
    assert len(set(styles.values())) == len(names)
    assert arm_styles(names[:3]) == {name: styles[name] for name in names[:3]}


@pytest.mark.filterwarnings("error")
def test_a_long_legend_leaves_the_panels_their_height() -> None:
    """Beside one of two rows, which the figure's own height has room for."""
    heights = []
    for names in ([f"arm{number}" for number in range(8)], [f"reinforce_dvp_mis_stressed{n}" for n in range(32)]):
        with style():
            figure, panels = make_panels(1, 3, 2.3)
            arm_legend(figure, names)
            figure.draw_without_rendering()
        heights.append(panels[0].get_position().height * figure.get_figheight())
    assert heights[1] == pytest.approx(heights[0], rel=0.02)


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1e-4, 1e-2], "log"),
        ([0.0, 1e-4, 1e-2], "symlog"),
        ([-1e-3, 1e-2], "symlog"),
        ([1.0, 5.0], "linear"),
        ([0.0, 0.0], "linear"),
        ([NAN, math.inf], "linear"),
        ([], "linear"),
        ([1.0, math.inf, 1e3], "log"),
    ],
)
def test_magnitude_scale(values: list[float], scale: str) -> None:
    with style():
        figure, (ax,) = make_panels(1, 1, 2.0)
        ax.plot(values, "o")
        set_magnitude_scale(ax, values)
        figure.draw_without_rendering()
    assert ax.get_yscale() == scale
    low, high = ax.get_ylim()
    finite = [value for value in values if math.isfinite(value)]
    assert all(low <= value <= high for value in finite)
    if scale != "linear":
        ticks = [tick for tick in ax.get_yticks() if low <= tick <= high]
        assert 2 <= len(ticks) <= 8
        assert (0.0 in ticks) == (scale == "symlog")


@pytest.mark.parametrize("values", [[0.0, 1e-6, 1.0], [1e-6, 1.0], [-1e-3, 1e-2]])
def test_the_values_fill_a_magnitude_axis(values: list[float]) -> None:
    """Also where the linear axis had its limits already."""
    with style():
        figure, (ax,) = make_panels(1, 1, 2.0)
        ax.plot(values, "o")
        ax.get_ylim()
        set_magnitude_scale(ax, values)
        figure.draw_without_rendering()
    heights = ax.transAxes.inverted().transform(ax.transData.transform([(0, min(values)), (0, max(values))]))[:, 1]
    assert heights == pytest.approx([1 / 22, 21 / 22], abs=0.01), "margins of 5 % of what lies between"


def test_a_tiny_rounding_error_does_not_stretch_the_axis() -> None:
    with style():
        _, (ax,) = make_panels(1, 1, 2.0)
        set_magnitude_scale(ax, [-1e-30, 1e-3])
    assert min(tick for tick in ax.get_yticks() if tick > 0) >= 1e-12


def test_svg_has_no_date_and_repeats_to_the_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_svg(evaluation_figure(), tmp_path / "figures" / f"{name}.svg")
    first, second = ((tmp_path / "figures" / f"{name}.svg").read_bytes() for name in ("a", "b"))
    assert first == second
    assert b"<dc:date>" not in first
