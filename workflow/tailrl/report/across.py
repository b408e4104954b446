"""Studies that have their arms in common and differ in what all arms share, a task or a length: arm by arm."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from tailrl.analysis import arm_kinds
from tailrl.analysis.format import LOST, p_value
from tailrl.analysis.tables import flat_rows, mean_of, write_csv
from tailrl.artifacts.evaluation import read_evaluation
from tailrl.artifacts.results import FloatArray, Results, read_results
from tailrl.artifacts.tables import write_claims
from tailrl.claims import finding
from tailrl.claims.decide import Verdict, change_verdict
from tailrl.claims.finding import interval
from tailrl.config.study import Study
from tailrl.report.axes import (
    arm_legend,
    arm_styles,
    make_panels,
    save_svg,
    say_in_the_middle,
    set_magnitude_scale,
    style,
)
from tailrl.report.page import render
from tailrl.runtime.errors import StudyError
from tailrl.stats.intervals import Interval, mean_interval
from tailrl.stats.tests import NO_DIFFERENCE, Difference, arm_difference, holm
from tailrl.tracking import metrics as keys


def _gain(results: Results, arm: str) -> FloatArray:
    base = results.base.scores[0].avg_at_k
    return 100 * np.array([score.avg_at_k - base for score in results.evaluations[arm].scores])


def _metric(key: str) -> Callable[[Results, str], FloatArray]:
    return lambda results, arm: mean_of(results.runs[arm], key)


GAIN = "gain over base, points"

QUANTITIES: dict[str, Callable[[Results, str], FloatArray]] = {
    GAIN: _gain,
    LOST: lambda results, arm: 1 - mean_of(results.runs[arm], keys.KEPT_MASS_TRAIN),
    "1 − Z of a response, summed": _metric(keys.LOST_MASS),
    "outside": _metric(keys.OUTSIDE),
    "k3 masked, nats": _metric(keys.K3_MASKED),
    "k3 unmasked, nats": _metric(keys.K3_UNMASKED),
    "|Δ| of a response, nats": _metric(keys.DELTA_SEQUENCE_UNMASKED),
    "effective sample size of the responses' weights": _metric(keys.SAMPLE_SIZE_RAW),
}
"""What is compared: a number for each seed; of metrics the mean over a run."""


@dataclass(frozen=True, slots=True)
class Place:
    """One quantity of one arm in one study, with its t interval over seeds.

    Attributes:
        change: against the first of the studies, Welch over seeds; NaN in that one, and where all seeds of both agree.
        change_p_holm: its p by Holm over the arms and studies of the quantity.
    """

    quantity: str
    arm: str
    study: str
    value: Interval
    change: Difference
    change_p_holm: float


def write_across(studies: Sequence[Study], folder: Path, out: Path) -> None:
    """Writes out.csv, out.svg, out.md and out_claims.csv: the arms that all studies have, side by side.

    The seeds are those of the results, which a command line may have made others than the study files'.

    Args:
        studies: at least two; the later ones are held against the first.
        folder: that holds the results folder of each.
        out: path of the files, without their endings.

    Raises:
        StudyError: a single study, none of whose arms another has, or a missing result.
    """
    if len(studies) < 2:
        raise StudyError("to compare studies takes two of them at least")
    shared = [arm for arm in studies[0].arms if all(arm in study.arms for study in studies)]
    if not shared:
        raise StudyError(f"the studies {', '.join(study.name for study in studies)} have no arm in common")
    studies = [_as_run(study, folder / study.name, shared[0]) for study in studies]
    read = [read_results(study, folder / study.name, shared) for study in studies]
    places = [place for name in QUANTITIES for place in _places(name, shared, studies, read)]
    write_csv(out.with_suffix(".csv"), flat_rows(places))
    write_claims(out.with_name(f"{out.name}_claims.csv"), _verdicts(studies, read, places))
    save_svg(across_figure(places), out.with_suffix(".svg"))
    out.with_suffix(".md").write_text(_page(studies, shared, places), encoding="utf-8")


def _as_run(study: Study, folder: Path, arm: str) -> Study:
    """The study with the seeds that an arm of it was evaluated with."""
    evaluated = read_evaluation(folder / "eval" / f"{arm}.json")
    return study.model_copy(update={"seeds": tuple(score.seed for score in evaluated.scores)})


def across_figure(places: Sequence[Place]) -> Figure:
    """A panel for each quantity, a line for each arm over the studies, by what their names do not have in common."""
    arms, studies, names = (
        list(dict.fromkeys(getattr(p, key) for p in places)) for key in ("arm", "study", "quantity")
    )
    same = next((i for i, letters in enumerate(zip(*studies, strict=False)) if len(set(letters)) > 1), 0)
    begin = studies[0][:same].rfind("_") + 1
    with style():
        figure, panels = make_panels(math.ceil(len(names) / 2), 2, 1.9 * math.ceil(len(names) / 2))
        for ax, name in itertools.zip_longest(panels, names):
            if name is None:
                ax.set_axis_off()
                continue
            for index, (arm, (colour, dash)) in enumerate(arm_styles(arms).items()):
                own = [place.value for place in places if (place.quantity, place.arm) == (name, arm)]
                x = [place + 0.2 * ((index + 1) / (len(arms) + 1) - 0.5) for place in range(len(own))]
                ax.plot(x, [i.mean for i in own], color=colour, linestyle=dash, marker="o", markersize=3, linewidth=0.8)
                ax.vlines(x, [i.low for i in own], [i.high for i in own], color=colour, linewidth=1)
            if all(math.isnan(place.value.mean) for place in places if place.quantity == name):
                say_in_the_middle(ax)
            elif name != GAIN:
                set_magnitude_scale(ax, [place.value.mean for place in places if place.quantity == name])
            ax.set_title(name)
            ax.set_xticks(range(len(studies)), [study[begin:] for study in studies])
        arm_legend(figure, arms)
    return figure


def _places(name: str, arms: Sequence[str], studies: Sequence[Study], read: Sequence[Results]) -> list[Place]:
    found = []
    for arm in arms:
        first_S, *_ = values = [QUANTITIES[name](results, arm) for results in read]
        for study, value_S in zip(studies, values, strict=True):
            # What an arm cannot have, as naive no pruned mass, is no comparison.
            varies = np.ptp(np.concatenate([value_S, first_S])) > 0
            change = arm_difference(value_S, first_S) if value_S is not first_S and varies else NO_DIFFERENCE
            found.append((arm, study.name, mean_interval(value_S), change))
    adjusted = holm([change.p for *_, change in found]).tolist()
    return [Place(name, *place, p) for place, p in zip(found, adjusted, strict=True)]


def _verdicts(studies: Sequence[Study], read: Sequence[Results], places: Sequence[Place]) -> list[Verdict]:
    """Of each quantity, arm and later study, whether it differs from what it is in the first."""
    results = {study.name: own for study, own in zip(studies, read, strict=True)}
    first, found = studies[0].name, []
    for place in places:
        if math.isnan(place.change_p_holm):
            continue
        change = place.change
        found.append(
            change_verdict(
                f"across.{finding.QUANTITIES[place.quantity]}",
                arm_kinds.settings_of(results[place.study], place.arm),
                place.arm,
                place.value.n,
                change,
                place.change_p_holm,
                unit="that of the quantity",
                seen=f"{place.quantity}, {place.study} less {first}: " + interval(change.mean, change.low, change.high),
                endpoint=f"Mean over seeds less that in {first}, of the same arm (Welch over seeds), by Holm over the "
                "arms and studies of the quantity.",
            )
        )
    return found


def _page(studies: Sequence[Study], arms: Sequence[str], places: Sequence[Place]) -> str:
    cells = {(place.quantity, place.arm, place.study): _cell(place) for place in places}
    tables = {name: {arm: [cells[name, arm, study.name] for study in studies] for arm in arms} for name in QUANTITIES}
    return render("across.md.j2", studies=studies, tables=tables)


def _cell(place: Place) -> str:
    value = place.value
    if np.isnan(value.mean):
        return "not recorded"
    text = f"{value.mean:.3g}" if np.isnan(value.low) else f"{value.mean:.3g} [{value.low:.3g}, {value.high:.3g}]"
    return text if np.isnan(place.change_p_holm) else f"{text} (p {p_value(place.change_p_holm)})"
