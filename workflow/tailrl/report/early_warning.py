"""Early warnings of a collapse: tables, a page, a figure and verdicts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tailrl.analysis.early_warning import (
    FALLING,
    MISMATCHED,
    TRIED,
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
from tailrl.artifacts.claims import Verdict, write_verdicts
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.claims.early_warning import ANNOUNCES, UNSKILLED, beyond, in_steps, judge_warnings, unskilled, why_not
from tailrl.report.axes import ARM_COLOURS, GREY, make_panels, save_svg, say_nothing_to_show, set_percent_axis, style
from tailrl.report.page import render
from tailrl.runtime.errors import StudyError

WARNED, ALARMED = ARM_COLOURS[:2]


def write_early_warning(studies: Sequence[Path], out: Path) -> None:
    """Write out/early_warning.csv, thresholds.csv, runs.csv, claims.csv, early_warning.md and early_warning.svg.

    Args:
        studies: results folders, each with train/<arm>/seed<seed>/ in it.
        out: the report's folder; the same inputs give the same bytes.

    Raises:
        StudyError: there is no finished run, or its metrics cannot be read.
    """
    cases = distinct([case for folder in studies for case in read_cases(folder)])
    if not cases:
        raise StudyError(f"{', '.join(map(str, studies))}: a rule ended every run")
    every = [warned(cases, name, factor, chooses) for name, factor in thresholds() for chooses in (True, False)]
    judged = _compared([with_p(one, cases) for one in judge_metrics(every)], cases)
    mismatched = [warned(cases, one.metric, one.factor, False, MISMATCHED) for one in judged]
    # Only judged thresholds have a p and a lead over the reward.
    rows = flat_rows(every)
    tried = [{key: row[key] for key in row if key.partition("_")[0] not in ("p", "ahead")} for row in rows]
    write_csv(out / "thresholds.csv", tried)
    write_csv(out / "early_warning.csv", flat_rows([*judged, *mismatched]))
    write_csv(out / "runs.csv", [_row(case) for case in cases])
    verdicts = judge_warnings(cases, judged)
    write_verdicts(out / "claims.csv", verdicts)
    save_svg(warning_figure(judged), out / "early_warning.svg")
    (out / "early_warning.md").write_text(_page(cases, judged, mismatched, verdicts), encoding="utf-8")


def _compared(judged: Sequence[Warned], cases: Sequence[Case]) -> list[Warned]:
    """The metrics with their lead over the falling reward, if that is judged too."""
    reward = next((one for one in judged if one.metric == FALLING), None)
    return [replace(one, ahead=ahead(one, reward, cases)) if reward not in (None, one) else one for one in judged]


def warning_figure(judged: Sequence[Warned]) -> Figure:
    """Sensitivity, false alarms and lead of each metric; the best one on the half that chooses is on top.

    Metrics without a chosen threshold are left out.
    """
    with style():
        figure, (shares, leads) = make_panels(1, 2, 1.0 + 0.3 * max(1, len(judged)))
        if not any(one.collapsed for one in judged):
            for ax in (shares, leads):
                say_nothing_to_show(ax, "No judged run collapsed." if judged else "No threshold was chosen.")
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
    adjusted = {verdict.id: verdict.p_holm for verdict in verdicts}
    return render(
        "early_warning.md.j2",
        cases=cases,
        collapsed=sum(case.collapse is not None for case in cases),
        falling=FALLING,
        judged=[(one, adjusted[ANNOUNCES[one.metric].id]) for one in judged],
        why_not=why_not(cases),
        unskilled=unskilled(judged),
        UNSKILLED=UNSKILLED,
        ended=_ended(cases, judged[0]) if judged else None,
        mismatched=mismatched,
        beyond=beyond,
        steps=in_steps,
    )


def _ended(cases: Sequence[Case], rule: Warned) -> dict[str, int] | None:
    """Counts of the evaluated runs without a collapse; None without such runs.

    `kept`: all of them; `false`: those that the rule would have ended; `better`: those that do not end below the
    untrained policy; `lost`: those of `better` that the rule would have ended.
    """
    kept = [case for case in cases if not case.chooses and case.collapse is None and not math.isnan(case.gain)]
    better = [case for case in kept if case.gain >= 0]
    false, lost = (sum(raised(case, rule.signal, rule.factor) is not None for case in own) for own in (kept, better))
    return {"kept": len(kept), "false": false, "better": len(better), "lost": lost} if kept else None


def _row(case: Case) -> dict[str, Any]:
    """A run's CSV row, with the step, from 0, of each metric's alarm at each threshold."""
    names = ("study", "arm", "seed", "settings", "chooses", "steps", "collapse", "gain")
    alarms = {f"{name} {factor:g}": raised(case, TRIED[name][0], factor) for name, factor in thresholds()}
    return {name: getattr(case, name) for name in names} | {"mismatch": case.mismatched} | alarms
