"""Verdicts on early warnings: whether a metric announces a collapse, its lead, and whether it precedes the reward."""

import math
from collections.abc import Sequence
from dataclasses import replace

from tailrl.analysis.early_warning import TRIED, Case, Warned
from tailrl.analysis.format import count
from tailrl.artifacts.claims import Verdict
from tailrl.claims.catalogue import CATALOGUE, named
from tailrl.claims.decide import Line, Scope, decide
from tailrl.claims.finding import Finding, ends, interval, nothing
from tailrl.stats.intervals import Interval

UNSKILLED, ALIKE = "no threshold has skill on the half of the seeds that chooses", "the runs that choose are all alike"
"""The reasons why a metric is not judged."""

ANNOUNCES, FIRST, LEAD = named("warning.*.collapse"), named("warning.*.before_reward"), "warning.k3.collapse.lead"


def judge_warnings(cases: Sequence[Case], judged: Sequence[Warned]) -> list[Verdict]:
    """The verdicts, metric by metric, judged metrics first: its skill; for k3 its lead; its lead over the reward."""
    studies, lines = tuple(dict.fromkeys(case.study for case in cases)), list[Line]()
    for one in judged:
        scope, finding = Scope("", "", f"{beyond(one)} times its start"), _announces(one, studies)
        lines.append(Line(ANNOUNCES[one.metric], scope, finding))
        if one.metric == "k3":
            seen = f"median lead {in_steps(one.lead)} steps" if one.warned else "k3 announced no collapse"
            lead = replace(finding, seeds=one.warned, words=seen, events=one.warned)
            lines.append(Line(CATALOGUE[LEAD], scope, lead))
        if one.ahead.n:
            over = count(one.collapsed, "collapse")
            seen = f"{one.metric}: a median of {in_steps(one.ahead)} steps ahead, over {over}"
            lines.append(Line(FIRST[one.metric], scope, Finding(studies, one.collapsed, *ends(one.ahead), seen)))
    seeds, nowhere = sum(not case.chooses for case in cases), Scope("", "", "")
    for metric in unskilled(judged):
        # A metric without a threshold counts as a test of its family that shows nothing.
        finding = replace(nothing(studies, f"{metric}: {why_not(cases)}"), seeds=seeds, p_for=0.5)
        lines.append(Line(ANNOUNCES[metric], nowhere, finding))
        if metric == "k3":
            lines.append(Line(CATALOGUE[LEAD], nowhere, replace(finding, seeds=0)))
    return decide(lines)


def _announces(one: Warned, studies: tuple[str, ...]) -> Finding:
    """The skill of a judged metric; half of its p is the one-sided p. It needs collapses, and runs without one."""
    lead = f", median lead {in_steps(one.lead)} steps" if one.warned else ""
    true, false = f"{one.warned} of {one.collapsed} collapses", f"{one.alarmed} of {one.others} runs"
    seen = f"{one.metric}: before {true}{lead}; falsely in {false}"
    seeds, events = one.collapsed + one.others, min(one.collapsed, one.others)
    return Finding(studies, seeds, *ends(one.lead), seen, p_for=one.p / 2, holds=one.skill > 0, events=events)


def unskilled(judged: Sequence[Warned]) -> list[str]:
    """The metrics that are not judged."""
    return [metric for metric in TRIED if metric not in {one.metric for one in judged}]


def why_not(cases: Sequence[Case]) -> str:
    """Why a metric is not judged."""
    return ALIKE if len({case.collapse is None for case in cases if case.chooses}) < 2 else UNSKILLED


def beyond(one: Warned) -> str:
    """A threshold in words, as a multiple of a run's own level."""
    return f"{'above' if one.factor > 1 else 'below'} {one.factor:g}"


def in_steps(lead: Interval) -> str:
    """Steps with their interval; empty for NaN."""
    return "" if math.isnan(lead.mean) else interval(*ends(lead), form="g")
