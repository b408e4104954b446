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
from tailrl.analysis.format import count
from tailrl.analysis.tables import flat_rows, write_csv
from tailrl.artifacts.tables import write_claims
from tailrl.claims.decide import Verdict
from tailrl.claims.finding import CONTRADICTED, OPEN, REPRODUCED, UNDECIDED, UNTESTABLE, WARNINGS
from tailrl.report.axes import (
    ARM_COLOURS,
    GREY,
    make_panels,
    save_svg,
    say_nothing_to_show,
    set_percent_axis,
    style,
)
from tailrl.report.page import render
from tailrl.runtime.errors import StudyError
from tailrl.stats.intervals import LEVEL, Interval
from tailrl.stats.tests import holm

PLATEAU = (30, 50)
"""Steps from where K3 leaves its plateau to where the reward drops, in arXiv 2605.14220."""

UNSKILLED, ALIKE = "no threshold has skill on the half of the seeds that chooses", "the runs that choose are all alike"
"""What is said of a metric that is not judged."""

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
    write_claims(out / "claims.csv", _verdicts(cases, judged))
    save_svg(warning_figure(judged), out / "early_warning.svg")
    (out / "early_warning.md").write_text(_page(cases, judged, mismatched), encoding="utf-8")


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


def _page(cases: Sequence[Case], judged: Sequence[Warned], mismatched: Sequence[Warned]) -> str:
    return render(
        "early_warning.md.j2",
        cases=cases,
        collapsed=sum(case.collapse is not None for case in cases),
        falling=FALLING,
        judged=list(zip(judged, _adjusted(judged), strict=True)),
        why_not=_why_not(cases),
        unskilled=_unskilled(judged),
        UNSKILLED=UNSKILLED,
        ended=_ended(cases, judged[0]) if judged else None,
        mismatched=mismatched,
        beyond=_beyond,
        lead=_lead,
    )


def _why_not(cases: Sequence[Case]) -> str:
    """Why a metric is not judged."""
    return ALIKE if len({case.collapse is None for case in cases if case.chooses}) < 2 else UNSKILLED


def _adjusted(judged: Sequence[Warned]) -> list[float]:
    """The p of each metric by Holm over all: one that chose no threshold is a test that shows nothing, and counts."""
    found: list[float] = holm([*(one.p for one in judged), *[1.0] * len(_unskilled(judged))]).tolist()
    return found[: len(judged)]


def _beyond(one: Warned) -> str:
    return f"{'above' if one.factor > 1 else 'below'} {one.factor:g}"


def _unskilled(judged: Sequence[Warned]) -> list[str]:
    """The metrics that are not judged."""
    return [metric for metric in METRICS if metric not in {one.metric for one in judged}]


def _ended(cases: Sequence[Case], rule: Warned) -> dict[str, int] | None:
    """Of the evaluated runs that do not collapse, `kept`, how many the rule would have ended, `false`; of those of them
    that do not end below the untrained policy, `better`, how many, `lost`."""
    kept = [case for case in cases if not case.chooses and case.collapse is None and not math.isnan(case.gain)]
    better = [case for case in kept if case.gain >= 0]
    false, lost = (sum(raised(case, rule.signal, rule.factor) is not None for case in own) for own in (kept, better))
    return {"kept": len(kept), "false": false, "better": len(better), "lost": lost} if kept else None


def _lead(lead: Interval) -> str:
    if math.isnan(lead.mean):
        return ""
    return f"{lead.mean:g}" + ("" if math.isnan(lead.low) else f" [{lead.low:g}, {lead.high:g}]")


def _verdicts(cases: Sequence[Case], judged: Sequence[Warned]) -> list[Verdict]:
    """A line for each metric, those that are judged first, and after that of k3 one on its lead.

    A metric announces a collapse where its one-sided p, by Holm, is at most 2.5 %: half of the one shown.
    """
    found = []
    for one, p in zip(judged, _adjusted(judged), strict=True):
        lead = f", median lead {_lead(one.lead)} steps" if one.warned else ""
        true, false = f"{one.warned} of {one.collapsed} collapses", f"{one.alarmed} of {one.others} runs"
        shown = p <= LEVEL and one.skill > 0
        line = replace(
            _untested(cases, one.metric),
            verdict=UNTESTABLE if math.isnan(p) else REPRODUCED if shown else UNDECIDED,
            dose=f"{_beyond(one)} times its start",
            seeds=one.collapsed + one.others,
            effect=one.lead.mean,
            low=one.lead.low,
            high=one.lead.high,
            p=one.p,
            p_holm=p,
            seen=f"{one.metric}: before {true}{lead}; falsely in {false}",
        )
        found += [line, _plateau(line, one)] if one.metric == "k3" else [line]
        found += [_first(line, one, shown)] if one.ahead.n else []
    for metric in _unskilled(judged):
        line = _untested(cases, metric)
        found += [line, _plateau(line, None)] if metric == "k3" else [line]
    return found


def _untested(cases: Sequence[Case], metric: str) -> Verdict:
    """The line on a metric that is not judged."""
    return Verdict(
        id=f"warning.{WARNINGS[metric]}.collapse",
        source="arXiv 2605.14220; open question",
        verdict=UNTESTABLE,
        policy="",
        task="",
        dose="",
        arms=", ".join(dict.fromkeys(case.study for case in cases)),
        seeds=sum(not case.chooses for case in cases),
        effect=math.nan,
        low=math.nan,
        high=math.nan,
        unit="steps",
        p=math.nan,
        p_holm=math.nan,
        seen=f"{metric}: {_why_not(cases)}",
        endpoint="An alarm is likelier before a collapse than in a run without one, by more than it would be if arms "
        "of a study had one another's alarms: a permutation test of the difference on the half of the seeds that did "
        "not choose the threshold, whole arms shuffled and the threshold chosen anew each time, twice the one-sided p, "
        "by Holm over all metrics.",
    )


def _plateau(line: Verdict, one: Warned | None) -> Verdict:
    """Whether the median lead of k3 is the one that arXiv 2605.14220 reports; `one` is None where k3 is not judged."""
    low, high = PLATEAU
    # Comparisons with NaN, where there is no interval, are false.
    nothing, inside = math.isnan(line.effect), low <= line.low and line.high <= high
    apart = line.high < low or line.low > high
    lead = f"median lead {_lead(one.lead)} steps" if one and one.warned else "k3 announced no collapse"
    return replace(
        line,
        id="warning.k3.collapse.lead",
        verdict=UNTESTABLE if nothing else CONTRADICTED if apart else REPRODUCED if inside else UNDECIDED,
        seeds=one.warned if one else 0,
        p=math.nan,
        p_holm=math.nan,
        seen=lead if one else line.seen,
        endpoint="The interval of the median lead, from where k3 is beyond the multiple that was chosen, over the arms "
        "of the collapses that it announced, lies within that range; contradicted where it lies outside.",
    )


def _first(line: Verdict, one: Warned, shown: bool) -> Verdict:
    """Whether a metric warns before the falling reward does; only one that is shown to announce a collapse can."""
    own = one.ahead
    return replace(
        line,
        id=f"warning.{WARNINGS[one.metric]}.before_reward",
        source=OPEN,
        verdict=REPRODUCED if own.low > 0 and shown else CONTRADICTED if own.high < 0 else UNDECIDED,
        seeds=one.collapsed,
        effect=own.mean,
        low=own.low,
        high=own.high,
        p=math.nan,
        p_holm=math.nan,
        seen=f"{one.metric}: a median of {_lead(own)} steps ahead, over {count(one.collapsed, 'collapse')}",
        endpoint=f"The metric announces a collapse, and the interval of the median of the steps from its alarm to that "
        f"of the {FALLING}, each of them at the collapse where it does not come before, over the arms of all "
        "collapses, lies above 0; contradicted where it lies below.",
    )


def _row(case: Case) -> dict[str, Any]:
    """A run, and the step, from 0, at which each metric raises its alarm at each threshold, if it does."""
    names = ("study", "arm", "seed", "settings", "chooses", "steps", "collapse", "gain")
    alarms = {f"{name} {factor:g}": raised(case, METRICS[name][0], factor) for name, factor in thresholds()}
    return {name: getattr(case, name) for name in names} | {"mismatch": case.mismatched} | alarms
