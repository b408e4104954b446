"""What announces a collapse, as tables, a page, a figure and lines of claims."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tailrl.analysis.early_warning import (
    FALLING,
    METRICS,
    MISMATCHED,
    Case,
    Warned,
    ahead,
    distinct,
    judge_metrics,
    raised,
    read_cases,
    thresholds,
    warned,
    with_p,
)
from tailrl.analysis.format import count, p_value, percent, table
from tailrl.analysis.tables import flat_rows, write_csv
from tailrl.artifacts.tables import write_claims
from tailrl.claims.decide import Verdict
from tailrl.claims.early_warning import ANNOUNCES, UNSKILLED, beyond, in_steps, judge_warnings, unskilled, why_not
from tailrl.report.axes import (
    ARM_COLOURS,
    GREY,
    make_panels,
    save_svg,
    say_nothing_to_show,
    set_percent_axis,
    style,
)
from tailrl.runtime.errors import StudyError
from tailrl.stats.intervals import Interval

WARNED, ALARMED = ARM_COLOURS[:2]


def write_early_warning(studies: Sequence[Path], out: Path) -> None:
    """Writes out/early_warning.csv, thresholds.csv, runs.csv, claims.csv, early_warning.md and early_warning.svg.

    Args:
        studies: results folders, each with train/<arm>/seed<seed>/ in it.
        out: where the report goes; the same inputs give the same bytes.

    Raises:
        StudyError: there is no finished run, or its metrics cannot be read.
    """
    cases = distinct([case for folder in studies for case in read_cases(folder)])
    if not cases:
        raise StudyError(f"{', '.join(map(str, studies))}: a rule ended every run")
    every = [warned(cases, name, factor, chooses) for name, factor in thresholds() for chooses in (True, False)]
    judged = _compared([with_p(one, cases) for one in judge_metrics(every)], cases)
    mismatched = [warned(cases, one.metric, one.factor, False, MISMATCHED) for one in judged]
    # Only what is judged is tested and compared.
    rows = flat_rows(every)
    tried = [{key: row[key] for key in row if key.partition("_")[0] not in ("p", "ahead")} for row in rows]
    write_csv(out / "thresholds.csv", tried)
    write_csv(out / "early_warning.csv", flat_rows([*judged, *mismatched]))
    write_csv(out / "runs.csv", [_row(case) for case in cases])
    verdicts = judge_warnings(cases, judged)
    write_claims(out / "claims.csv", verdicts)
    save_svg(warning_figure(judged), out / "early_warning.svg")
    (out / "early_warning.md").write_text(_page(cases, judged, mismatched, verdicts), encoding="utf-8")


def _compared(judged: Sequence[Warned], cases: Sequence[Case]) -> list[Warned]:
    """The metrics with how far each is ahead of the falling reward, where that is one of them."""
    reward = next((one for one in judged if one.metric == FALLING), None)
    return [replace(one, ahead=ahead(one, reward, cases)) if reward not in (None, one) else one for one in judged]


def warning_figure(judged: Sequence[Warned]) -> Figure:
    """Sensitivity and false alarms of each metric, and its lead; the best one on the other half of the runs on top.

    Metrics of which no threshold was chosen are left out.
    """
    with style():
        figure, (shares, leads) = make_panels(1, 2, 1.0 + 0.3 * max(1, len(judged)))
        if not any(one.collapsed for one in judged):
            for ax in (shares, leads):
                say_nothing_to_show(ax, "No run that is judged collapsed." if judged else "No threshold was chosen.")
            return figure
        for place, one in enumerate(judged):
            for interval, colour, shift in ((one.sensitivity, WARNED, -0.13), (one.false_alarms, ALARMED, 0.13)):
                shares.hlines(place + shift, interval.low, interval.high, color=colour, linewidth=1)
                shares.plot(interval.mean, place + shift, "o", markersize=4, color=colour)
            if not math.isnan(one.lead.mean):
                leads.hlines(place, one.lead.low, one.lead.high, color=GREY, linewidth=1)
                leads.plot(one.lead.mean, place, "D", markersize=4, color="black")
        words = [f"{one.metric} {'>' if one.factor > 1 else '<'} {one.factor:g} ×" for one in judged]
        shares.set_yticks(range(len(judged)), words)
        leads.set_yticks(range(len(judged)), [""] * len(judged))
        for ax in (shares, leads):
            ax.set_ylim(len(judged) - 0.5, -0.5)
        shares.set_xlim(-0.03, 1.03)
        set_percent_axis(shares)
        shares.set_xlabel("share of runs")
        marks = [Line2D([], [], color=colour, marker="o", markersize=4, linewidth=1) for colour in (WARNED, ALARMED)]
        figure.legend(marks, ["warned before a collapse", "alarmed without one"], loc="outside upper center", ncols=2)
        leads.set_xlabel("median lead (steps)")
        return figure


def _page(
    cases: Sequence[Case], judged: Sequence[Warned], mismatched: Sequence[Warned], verdicts: Sequence[Verdict]
) -> str:
    parts = ["# Early warning", _introduction(cases)]
    if not judged:
        return "\n\n".join([*parts, f"No threshold can be chosen: {why_not(cases)}."]) + "\n"
    header = ("metric", "threshold", "warned before a collapse", "alarmed without one", "median lead, steps")
    adjusted = {verdict.id: verdict.p_holm for verdict in verdicts}
    rows = [[*_cells(one), in_steps(one.ahead), p_value(adjusted[ANNOUNCES[one.metric].id])] for one in judged]
    rows += [[metric, UNSKILLED, *[""] * 5] for metric in unskilled(judged)]
    best = judged[0]
    rule = f"`training: {{stop_when: {{metric: {best.signal}, factor: {best.factor:g}}}}}`"
    last = (
        f"The first line had most skill where thresholds were chosen; as a rule that ends a run at its alarm: {rule}."
    )
    parts += [table((*header, f"ahead of the {FALLING}, steps", "p, Holm"), rows), last + _ended(cases, best)]
    if runs := mismatched[0].collapsed + mismatched[0].others:
        among = (
            "A metric of the mismatch cannot move in a run that has none, such as a matched control, whose unmasked k3 "
            "is 0 at every step: there it neither warns nor raises a false alarm, and says nothing of how well it does "
            f"where it can. The same thresholds among the {count(runs, 'run')} of that half with a mismatch, with an "
            "unmasked k3 other than 0; these lines decide no claim."
        )
        parts += ["## Among the runs with a mismatch", among, table(header, map(_cells, mismatched))]
    return "\n\n".join(parts) + "\n"


def _introduction(cases: Sequence[Case]) -> str:
    studies = ", ".join(dict.fromkeys(case.study for case in cases))
    collapsed = sum(case.collapse is not None for case in cases)
    return (
        f"{count(len(cases), 'run')} of {studies}, each counted once, of which {collapsed} collapsed; none that a "
        "rule ended is among them. An "
        "alarm is raised at the first step at which a metric's mean over the last 5 steps is beyond so many times the "
        "run's own level, its mean over the first tenth of the steps. Each metric's threshold is the one with most "
        "skill (warned before a collapse, less alarmed without one) on half of the seeds, if any has skill there; what "
        "is shown is of the other half. Runs of an arm are alike, so that arms are what intervals are over and what is "
        "shuffled: shares have Korn and Graubard's intervals, medians Woodruff's: of the lead, and of how far a metric "
        f"is ahead of the {FALLING}, over all collapses, an alarm that does not come counting as at the collapse. p, "
        "by Holm over all metrics, is twice the share of shuffles with at least the skill seen, where each arm has the "
        "alarms, seed by seed, of any arm of its study with the same seeds, and the threshold is chosen anew. Such a "
        "test says that a metric tells arms that collapse from arms that do not, not which run of an arm will."
    )


def _cells(one: Warned) -> list[str]:
    shares = [f"{k} of {n}, {percent(share)}" if n else "" for k, n, share in _counts(one)]
    return [one.metric, f"{beyond(one)} times", *shares, in_steps(one.lead)]


def _ended(cases: Sequence[Case], rule: Warned) -> str:
    """How the runs end that the rule would have ended for nothing, as a sentence."""
    kept = [case for case in cases if not case.chooses and case.collapse is None and not math.isnan(case.gain)]
    if not kept:
        return ""
    better = [case for case in kept if case.gain >= 0]
    false, lost = (sum(raised(case, rule.signal, rule.factor) is not None for case in own) for own in (kept, better))
    return (
        f" Of the {count(len(kept), 'run')} without a collapse whose policies were evaluated it would have ended "
        f"{false}, {false - lost} of them in the end below the untrained policy; of the {len(better)} that do not end "
        f"below it, {lost}."
    )


def _counts(one: Warned) -> tuple[tuple[int, int, Interval], tuple[int, int, Interval]]:
    return (one.warned, one.collapsed, one.sensitivity), (one.alarmed, one.others, one.false_alarms)


def _row(case: Case) -> dict[str, Any]:
    """A run, and the step, from 0, at which each metric raises its alarm at each threshold, if it does."""
    names = ("study", "arm", "seed", "settings", "chooses", "steps", "collapse", "gain")
    alarms = {f"{name} {factor:g}": raised(case, METRICS[name][0], factor) for name, factor in thresholds()}
    return {name: getattr(case, name) for name in names} | {"mismatch": case.mismatched} | alarms
