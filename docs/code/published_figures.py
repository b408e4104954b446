"""Figures of published studies, drawn from docs/results/tables by the functions that draw them in a study's report.

They are not kept: the site's build draws those of every page of results. `make pages` draws the few that other pages
show into docs/figures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from matplotlib.figure import Figure

from findings.lookups import RESULTS, ROOT, samples, settings_of
from table_records import RecordT, records_of
from tailrl.artifacts.published import PAGE, SUMMARY, read_published
from tailrl.reports.ablation.numbers import Point
from tailrl.reports.ablation.page import ablation_figure
from tailrl.reports.axes import save_svg
from tailrl.reports.distributions.numbers import Distance, HistogramBin, ProbabilityBin, SetOverlap, Signature
from tailrl.reports.distributions.page import distribution_figure
from tailrl.reports.gradients.numbers import Summary
from tailrl.reports.gradients.page import gradient_figure, trade_figure
from tailrl.reports.mismatch.numbers import DeltaBin
from tailrl.reports.mismatch.page import delta_figure
from tailrl.reports.parts.numbers import PooledLine, PooledMeasure
from tailrl.reports.parts.page import pooled_figure
from tailrl.reports.scores.numbers import Gain, PolicyScore
from tailrl.reports.scores.page import evaluation_figure

FIGURES = ROOT / "docs/figures"


@dataclass(frozen=True, slots=True)
class Place:
    """A figure's place: its study, the page that shows it, and its own name."""

    study: str
    page: str
    name: str


def every_figure() -> dict[Place, Callable[[], Figure]]:
    """Every published figure by its place, and what draws it."""
    figures: dict[Place, Callable[[], Figure]] = {}
    for table, (name, draw) in DRAWN.items():
        for study, page in _pages(table):
            figures[Place(study, page, name)] = partial(draw, study, page)
    return {place: draw for place, draw in figures.items() if not _is_without(place)}


def _is_without(place: Place) -> bool:
    """Studies that were searches keep no page; a study may ask for no figure over its parts."""
    pool = settings_of(place.study).pooled if place.name == "pooled" else None
    page = RESULTS / place.study / f"{place.page}.md"
    return not page.is_file() or (place.name == "pooled" and not (pool and pool.figure))


@cache
def _table(table: str) -> Mapping[str, Sequence[Mapping[str, str]]]:
    return read_published(RESULTS, table)


def _pages(table: str) -> Iterator[tuple[str, str]]:
    for study, rows in _table(table).items():
        for page in dict.fromkeys(row[PAGE] for row in rows):
            yield study, page


def _records(table: str, study: str, page: str, kind: type[RecordT]) -> list[RecordT]:
    return records_of([row for row in _table(table).get(study, []) if row[PAGE] == page], kind)


def _scores(study: str, page: str) -> Figure:
    policies = _records("policies", study, SUMMARY, PolicyScore)
    return evaluation_figure(_records("evaluation", study, page, Gain), policies, policies[0].avg, samples(study))


def _ablation(study: str, page: str) -> Figure:
    settings = settings_of(study)
    points = _records("ablations", study, page, Point)
    untrained = _records("policies", study, SUMMARY, PolicyScore)[0].avg
    field = settings.ablations[page].field if page in settings.ablations else page
    return ablation_figure(points, untrained, field, samples(study), [*settings.arms, *(p.base for p in points)])


def _distributions(study: str, page: str) -> Figure:
    return distribution_figure(
        _records("distributions", study, page, Distance),
        _records("safe_sets", study, page, SetOverlap),
        _records("probability", study, page, ProbabilityBin),
        _records("histograms", study, page, HistogramBin),
        _records("signature", study, page, Signature),
    )


def _pooled(study: str, page: str) -> Figure:
    pool = settings_of(study).pooled
    assert pool is not None and pool.figure is not None
    lines = _records("comparisons", study, page, PooledLine)
    return pooled_figure(pool, pool.figure, lines, _records("measures", study, page, PooledMeasure))


def _gradients(study: str, page: str) -> Figure:
    equal = bool(settings_of(study).gradient_quality.nats)
    draw = trade_figure if equal else gradient_figure
    return draw(_records("gradient_quality", study, page, Summary))


def _delta(study: str, page: str) -> Figure:
    bins = _records("delta", study, page, DeltaBin)
    return delta_figure(bins, list(dict.fromkeys(one.arm for one in bins)))


DRAWN: dict[str, tuple[str, Callable[[str, str], Figure]]] = {
    "evaluation": ("evaluation", _scores),
    "ablations": ("ablation", _ablation),
    "distributions": ("distributions", _distributions),
    "comparisons": ("pooled", _pooled),
    "gradient_quality": ("gradient_quality", _gradients),
    "delta": ("delta", _delta),
}
"""By the table that has a figure's rows: the figure's name and what draws it."""

SHOWN = {
    "causes-parts": Place("causes", "pooled/pooled", "pooled"),
    "collapse-scores": Place("collapse", SUMMARY, "evaluation"),
    "default-delta": Place("default", SUMMARY, "delta"),
    "floor": Place("dose_response", "floor", "ablation"),
    "gradient-catalogue": Place("gradient_catalogue", "gradient_catalogue", "gradient_quality"),
    "gradient-quality": Place("gradient_quality", "gradient_quality", "gradient_quality"),
    "long-parts": Place("long", "pooled/pooled", "pooled"),
    "rho": Place("ablate_rho", "rho", "ablation"),
}
"""The figures that pages outside docs/results show, by their names in docs/figures."""


def draw_shown(folder: Path) -> None:
    """Draw the figures that other pages show."""
    figures = every_figure()
    for name, place in SHOWN.items():
        save_svg(figures[place](), folder / f"{name}.svg")
