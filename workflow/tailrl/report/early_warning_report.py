"""What announces a collapse, as tables, a page, a figure and lines of claims."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tailrl.errors import StudyError
from tailrl.report.axes import ARM_COLOURS, GREY, make_panels, save_svg, say_nothing_to_show, set_percent_axis, style
from tailrl.report.early_warning import Case, Warned, distinct, judge_metrics, raised, read_cases, thresholds, warned
from tailrl.report.findings import CONTRADICTED, REPRODUCED, UNDECIDED, UNTESTABLE
from tailrl.report.statistics import Interval, holm
from tailrl.report.summary import count, p_value, percent, table
from tailrl.report.tables import flat_rows, write_csv
from tailrl.report.verdicts import LEVEL, Verdict

PLATEAU = (30, 50)
"""Steps from where K3 leaves its plateau to where the reward drops, in arXiv 2605.14220."""

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
        raise StudyError(f"{', '.join(map(str, studies))}: no finished run, train/<arm>/seed<seed>/run.json")
    every = [warned(cases, name, factor, chooses) for name, factor in thresholds() for chooses in (True, False)]
    judged = judge_metrics(every)
    write_csv(out / "thresholds.csv", flat_rows(every))
    write_csv(out / "early_warning.csv", flat_rows(judged))
    write_csv(out / "runs.csv", [_row(case, judged) for case in cases])
    write_csv(out / "claims.csv", flat_rows(_verdicts(cases, judged)))
    save_svg(warning_figure(judged), out / "early_warning.svg")
    (out / "early_warning.md").write_text(_page(cases, judged), encoding="utf-8")


def warning_figure(judged: Sequence[Warned]) -> Figure:
    """Sensitivity and false alarms of each metric, and its lead; the best one on the other half of the runs on top."""
    with style():
        figure, (shares, leads) = make_panels(1, 2, 1.0 + 0.3 * max(1, len(judged)))
        if not any(one.collapsed for one in judged):
            for ax in (shares, leads):
                say_nothing_to_show(ax, "No run that is judged collapsed.")
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


def _page(cases: Sequence[Case], judged: Sequence[Warned]) -> str:
    studies = ", ".join(dict.fromkeys(case.study for case in cases))
    collapsed = sum(case.collapse is not None for case in cases)
    introduction = (
        f"{count(len(cases), 'run')} of {studies}, each counted once, of which {collapsed} collapsed. An "
        "alarm is raised at the first step at which a metric's mean over the last 5 steps is beyond so many times the "
        "run's own level, its mean over the first tenth of the steps. Each metric's threshold is the one with most "
        "skill (warned before a collapse, less alarmed without one) on half of the seeds; what is shown is of the "
        "other half. Shares have Wilson's intervals, the median lead that of order statistics; p is Fisher's, "
        "one-sided, by Holm over the metrics."
    )
    if not judged:
        return (
            f"# Early warning\n\n{introduction}\n\nNo threshold can be chosen: the runs of that half are all alike.\n"
        )
    p_holm = holm([one.p for one in judged]).tolist()
    rows = []
    for one, p in zip(judged, p_holm, strict=True):
        beyond = f"{'above' if one.factor > 1 else 'below'} {one.factor:g} times"
        warned_, false = (f"{k} of {n}, {percent(share)}" if n else "" for k, n, share in _counts(one))
        rows.append([one.metric, beyond, warned_, false, _steps(one.lead), p_value(p)])
    header = ("metric", "threshold", "warned before a collapse", "alarmed without one", "median lead, steps", "p, Holm")
    best = judged[0]
    rule = f"`training: {{stop_when: {{metric: {best.signal}, factor: {best.factor:g}}}}}`"
    last = (
        f"The first line had most skill where thresholds were chosen; as a rule that ends a run at its alarm: {rule}."
    )
    last += _ended(cases, best)
    return "\n\n".join(["# Early warning", introduction, table(header, rows), last]) + "\n"


def _ended(cases: Sequence[Case], rule: Warned) -> str:
    """How the runs end that the rule would have ended for nothing, as a sentence."""
    kept = [case for case in cases if not case.chooses and case.collapse is None and not math.isnan(case.gain)]
    if not kept:
        return ""
    better = [case for case in kept if case.gain >= 0]
    false, lost = (sum(raised(case, rule.signal, rule.factor) is not None for case in own) for own in (kept, better))
    return (
        f" Of the {count(len(kept), 'run')} without a collapse whose policies were evaluated it would have ended "
        f"{false}, {false - lost} of them in the end below the untrained policy; of the {len(better)} that end above "
        f"it, {lost}."
    )


def _counts(one: Warned) -> tuple[tuple[int, int, Interval], tuple[int, int, Interval]]:
    return (one.warned, one.collapsed, one.sensitivity), (one.alarmed, one.others, one.false_alarms)


def _steps(lead: Interval) -> str:
    if math.isnan(lead.mean):
        return ""
    return f"{lead.mean:g}" + ("" if math.isnan(lead.low) else f" [{lead.low:g}, {lead.high:g}]")


def _verdicts(cases: Sequence[Case], judged: Sequence[Warned]) -> list[Verdict]:
    studies = ", ".join(dict.fromkeys(case.study for case in cases))
    found = []
    for one, p in zip(judged, holm([one.p for one in judged]).tolist(), strict=True):
        lead = f", median lead {_steps(one.lead)} steps" if one.warned else ""
        true, false = f"{one.warned} of {one.collapsed} collapses", f"{one.alarmed} of {one.others} runs"
        line = Verdict(
            claim=f"{one.metric} announces a collapse",
            source="arXiv 2605.14220; open question",
            verdict=UNTESTABLE if math.isnan(p) else REPRODUCED if p <= LEVEL else UNDECIDED,
            policy="",
            task="",
            dose=f"{'above' if one.factor > 1 else 'below'} {one.factor:g} times its start",
            arms=studies,
            seeds=one.collapsed + one.others,
            effect=one.lead.mean,
            low=one.lead.low,
            high=one.lead.high,
            unit="steps",
            p=one.p,
            p_holm=p,
            seen=f"{one.metric}: before {true}{lead}; falsely in {false}",
            endpoint="An alarm is likelier before a collapse than in a run without one: Fisher's test on the half of "
            "the seeds that did not choose the threshold, one-sided, by Holm over the metrics.",
        )
        found.append(line)
        if one.metric == "k3":
            found.append(_plateau(line, one.lead))
    return found


def _plateau(line: Verdict, lead: Interval) -> Verdict:
    """Whether the median lead of k3 is the one that arXiv 2605.14220 reports."""
    low, high = PLATEAU
    apart, inside = lead.high < low or lead.low > high, low <= lead.low and lead.high <= high
    return replace(
        line,
        claim=f"k3 leaves its level {low} to {high} steps before a collapse",
        verdict=UNTESTABLE if math.isnan(lead.mean) else CONTRADICTED if apart else REPRODUCED if inside else UNDECIDED,
        seeds=lead.n,
        p=math.nan,
        p_holm=math.nan,
        seen=f"median lead {_steps(lead)} steps" if lead.n else "k3 announced no collapse",
        endpoint="The interval of the median lead, by order statistics over the collapses that k3 announced, lies "
        "within that range; contradicted where it lies outside.",
    )


def _row(case: Case, judged: Sequence[Warned]) -> dict[str, Any]:
    """A run, and the step at which each metric raises its alarm, if it does."""
    names = ("study", "arm", "seed", "chooses", "steps", "collapse", "gain")
    alarms = {one.metric: raised(case, one.signal, one.factor) for one in judged}
    return {name: getattr(case, name) for name in names} | alarms
