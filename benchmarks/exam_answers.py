"""What the diagnosis answers to logs of known cause, and the tables that are published of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from exam_faults import Case
from exam_models import SPECS, in_words
from scipy.special import softmax
from table import write_csv

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.causes import LEAST_SURE, Cause, cause_words, find_causes
from tailrl.diagnosis.measure import Measured, measure
from tailrl.diagnosis.metrics import quantity
from tailrl.stats.intervals import Interval, share_interval

MATTERS = 10.0
"""A case counts where k3 is so many times that of the trainer against itself."""

BOTH, NEW = "two causes, both named", "mistakes of new kinds"
"""Shares that have no limit of their own: of two causes, and of mistakes of a kind that no settling log has."""

SURE_EDGES = (0.0, 0.5, 0.7, 0.9, 1.0)
"""Bins of how sure the first answer is."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A case with its diagnosis; `first` is `none` where nothing is named."""

    case: Case
    k3: float
    causes: tuple[Cause, ...] = field(default=())

    @property
    def truth(self) -> str:
        return "+".join(self.case.planted or self.case.truth) or "none"

    @property
    def group(self) -> str:
        """The group of the case: what was planted, or `two causes`."""
        return "two causes" if len(self.case.truth) > 1 else self.truth

    @property
    def first(self) -> str:
        return self.causes[0].name if self.causes else "none"

    @property
    def right(self) -> bool:
        """Whether the first-named cause is a planted one; of a clean log, whether none is named."""
        return self.first in (self.case.truth or ("none",))

    @property
    def all_named(self) -> bool:
        """Whether every planted cause is as probable as not."""
        return set(self.case.truth) <= {cause.name for cause in self.causes if cause.sure >= 0.5}

    @property
    def matters(self) -> bool:
        """Whether the case counts: a clean log, a fault of the log itself, or a mismatch well above the noise floor."""
        known = cause_words()
        fault = any(known[name].fault for name in self.case.truth)
        return not self.case.truth or fault or self.k3 > MATTERS * self.case.floor


def measured_of(case: Case) -> Measured:
    """Everything measured of a case's log."""
    return measure([("exam", case.log)])


def answer(case: Case) -> Answer:
    """The diagnosis of a case."""
    measured = measured_of(case)
    return Answer(case, quantity(measured, "k3").mean, find_causes(measured))


def group_rows(answers: Sequence[Answer]) -> list[dict[str, object]]:
    """Each group's cases, how many were answered rightly, and Wilson's interval; all causes together; clean logs; and
    two parts that have no limit, BOTH and NEW."""
    counted = [one for one in answers if one.matters]
    groups = {name: [one for one in counted if one.group == name] for name in dict.fromkeys(a.group for a in counted)}
    clean = groups.pop("none", [])
    chosen = {"all causes": [one for own in groups.values() for one in own], **groups, "clean logs": clean}
    rows = []
    for name, own in chosen.items():
        if own:
            share = share_interval(sum(one.right for one in own), len(own))
            rows.append({"group": name, "cases": len(own), "right": sum(one.right for one in own), **_ends(share)})
    for name, right in {
        BOTH: [one.all_named for one in counted if len(one.case.truth) > 1],
        NEW: [one.right for one in counted if one.case.new],
    }.items():
        if right:
            share = share_interval(sum(right), len(right))
            rows.append({"group": name, "cases": len(right), "right": sum(right), **_ends(share)})
    return rows


def _ends(share: Interval) -> dict[str, str]:
    return {"share": f"{share.mean:.3f}", "low": f"{share.low:.3f}", "high": f"{share.high:.3f}"}


def left_out_rows(cases: Sequence[Case], logit_CK: FloatArray, columns: Sequence[str]) -> list[dict[str, object]]:
    """Each group of settling cases by the logits that `left_out` gave: how many are named rightly, and as what else."""
    causes = [column.partition("/")[0] for column in columns]
    shapes = [*dict.fromkeys(causes)]
    sure_CK = softmax(logit_CK, axis=1) @ np.array([[cause == shape for shape in shapes] for cause in causes])
    names = [shapes[sure_K.argmax()] if sure_K.max() >= LEAST_SURE else "unknown" for sure_K in sure_CK]
    found: dict[str, list[tuple[bool, str]]] = {}
    for case, name in zip(cases, names, strict=True):
        if planted := {*case.truth} & {*shapes}:
            found.setdefault("+".join(case.planted or case.truth), []).append((name in planted, name))
    found = {"all": [one for own in found.values() for one in own], **found}
    rows: list[dict[str, object]] = []
    for group, own in found.items():
        wrong = [] if group == "all" else sorted(name for right, name in own if not right)
        rows.append({"left out": group, "cases": len(own), "right": sum(r for r, _ in own), "else": " ".join(wrong)})
    return rows


def confusion_rows(answers: Sequence[Answer]) -> list[dict[str, object]]:
    """Cases by their truth (rows) and the first-named cause (columns); of two causes the truth is both."""
    counted = [one for one in answers if one.matters]
    columns = ["none", *(name for name, said in cause_words().items() if not said.by_place)]
    rows = []
    for truth in dict.fromkeys(one.truth for one in counted):
        own = [one.first for one in counted if one.truth == truth]
        rows.append({"truth": truth, **{name: own.count(name) for name in columns}})
    return rows


def calibration_rows(answers: Sequence[Answer]) -> list[dict[str, object]]:
    """How sure the first answer was, against how often it was right, over logs with a named cause."""
    named = [one for one in answers if one.matters and one.causes]
    sure = np.array([one.causes[0].sure for one in named])
    right = np.array([one.right for one in named])
    rows: list[dict[str, object]] = []
    for low, high in pairwise(SURE_EDGES):
        chosen = (sure >= low) & ((sure < high) | (high == 1.0))
        if chosen.any():
            share = share_interval(int(right[chosen].sum()), int(chosen.sum()))
            ends = _ends(share)
            rows.append(
                {
                    "sure": f"{low:g} to {high:g}",
                    "answers": int(chosen.sum()),
                    "mean sure": f"{sure[chosen].mean():.3f}",
                }
                | {"right": ends["share"], "low": ends["low"], "high": ends["high"]}
            )
    return rows


def case_rows(answers: Sequence[Answer]) -> list[dict[str, object]]:
    """One row a case."""
    return [
        {
            "model": one.case.model,
            "case": one.case.number,
            "truth": one.truth,
            "fault": " ".join(f"{name}={value}" for name, value in one.case.fault.items()),
            "k3": f"{one.k3:.3g}",
            "noise floor": f"{one.case.floor:.2g}",
            "counts": int(one.matters),
            "first": one.first,
            "sure": f"{one.causes[0].sure:.3f}" if one.causes else "",
            "right": int(one.right),
            "named": " ".join(f"{cause.name}:{cause.sure:.2f}" for cause in one.causes),
        }
        for one in answers
    ]


def publish(
    answers: Sequence[Answer], limits: Mapping[str, float], notes: str, words: Mapping[str, str], out: Path
) -> None:
    """The tables as CSV, and the page; `notes`: what its misses say; `words`: what the faults' settings mean."""
    tables = {
        "groups": group_rows(answers),
        "confusion": confusion_rows(answers),
        "calibration": calibration_rows(answers),
        "cases": case_rows(answers),
    }
    for name, rows in tables.items():
        write_csv(rows, out / f"{name}.csv")
    (out / "summary.md").write_text(page(answers, tables, limits, notes, words), encoding="utf-8")


def page(
    answers: Sequence[Answer],
    tables: Mapping[str, list[dict[str, object]]],
    limits: Mapping[str, float],
    notes: str = "",
    words: Mapping[str, str] | None = None,
) -> str:
    """The page of the judged cases, in Markdown."""
    misses = [row for row, one in zip(tables["cases"], answers, strict=True) if one.matters and not one.right]
    short = [{name: row[name] for name in ("model", "truth", "fault", "k3", "named")} for row in misses]
    confusion = [
        {"planted": row["truth"]} | {name: row[name] or "" for name in row if name != "truth"}
        for row in tables["confusion"]
    ]
    parts = [
        "# The exam of causes",
        f"{len(answers)} logs of known cause, on models that the rules of `tailrl diagnose` were not settled on. "
        "`benchmarks/diagnose_exam.yaml` has the design, and was fixed before these logs were diagnosed.",
        "A case is right if the cause that is named first was planted; a clean log, if none is named. A case counts if "
        "k3 is above ten times that of the trainer against itself, or if the log itself has a fault. Intervals are "
        "Wilson's, at 95 %.",
        f"Limits: {limits['overall']:.0%} of all causes, {limits['group']:.0%} of each group, and at most "
        f"{limits['false_alarms']:.0%} of clean logs with a cause.",
        _met(tables["groups"], limits),
        notes,
        "## By group",
        _table(tables["groups"]),
        "## What was named first",
        "Rows are what was planted, columns what was named.",
        _table(confusion),
        "## How sure, and how often right",
        _table(tables["calibration"]),
        "## Every miss",
        _table(short) if short else "None.",
        "## What the names mean",
        _table(_names(answers, words or {})),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _met(rows: Sequence[Mapping[str, object]], limits: Mapping[str, float]) -> str:
    """Which limits are met, in a sentence each."""
    share = {str(row["group"]): float(str(row["share"])) for row in rows}
    alarms = 1 - share.pop("clean logs", 1.0)
    share = {name: value for name, value in share.items() if name not in (BOTH, NEW)}
    overall = share.pop("all causes", 0.0)
    below = [f"{name} ({value:.0%})" for name, value in share.items() if value < limits["group"]]
    return "\n".join(
        [
            f"- All causes: {overall:.1%} named first. "
            f"The limit is {'met' if overall >= limits['overall'] else '**missed**'}.",
            f"- Each group: {'**missed** in ' + ', '.join(below) if below else 'the limit is met'}.",
            f"- Clean logs: {alarms:.1%} with a cause. "
            f"The limit is {'met' if alarms <= limits['false_alarms'] else '**missed**'}.",
        ]
    )


def _names(answers: Sequence[Answer], words: Mapping[str, str]) -> list[dict[str, object]]:
    """The short labels of this page: causes, policies, settings of the faults."""
    causes = {"none": "a clean log; nothing is named"} | {name: said.title for name, said in cause_words().items()}
    models = {spec.name: in_words(spec) for spec in SPECS if any(one.case.model == spec.name for one in answers)}
    return [
        {"kind": kind, "name": name, "meaning": meaning}
        for kind, named in (("cause", causes), ("policy", models), ("setting", words))
        for name, meaning in named.items()
    ]


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
