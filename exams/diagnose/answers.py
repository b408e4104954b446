"""What the diagnosis answers to logs of known cause, and the tables that are published of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax
from table import write_csv

from exams.diagnose.faults import Case
from exams.diagnose.models import SPECS, in_words
from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.causes import LEAST_SURE, Cause, cause_words, find_causes, fitting
from tailrl.diagnosis.diagnosis import diagnose_parts
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.measure import Measured, measure
from tailrl.diagnosis.metrics import quantity
from tailrl.diagnosis.parts import part_of
from tailrl.stats.intervals import Interval, share_interval

MATTERS = 10.0
"""A case counts where k3 is so many times that of the trainer against itself."""

BOTH, NEW = "two causes, both named", "mistakes of new kinds"
"""Shares of two causes, and of mistakes of a kind that no settling log has."""

SURE_EDGES = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Bins of how sure the first answer is."""

ALL, CLEAN, FIRST = "all causes", "clean logs", "the planted cause first"
TWO, WEIGHTS = "answers with two causes", "weights where a fix is due"


@dataclass(frozen=True, slots=True)
class Answer:
    """A case with its diagnosis.

    Attributes:
        causes: the most probable first, of the whole log or of the place that has most of the mismatch.
        named: the causes that the page leaves open: one, or several of which it cannot tell which.
        weights: whether a remedy is advised though the cause is one to fix.
    """

    case: Case
    k3: float
    causes: tuple[Cause, ...] = field(default=())
    named: tuple[str, ...] = field(default=())
    weights: bool = False

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
    def first_right(self) -> bool:
        """Whether the first-named cause is a planted one; of a clean log, whether none is named."""
        return self.first in (self.case.truth or ("none",))

    @property
    def right(self) -> bool:
        """Whether a planted cause is among what is named: faults of the log, and one or two causes beside them.

        Of a clean log, whether none is named.
        """
        if not self.case.truth:
            return not self.causes
        faults = {one.name for one in self.causes if cause_words()[one.name].fault}
        return len(self.named) in (1, 2) and bool({*self.named, *faults} & {*self.case.truth})

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


def answer(case: Case, fix: Sequence[str]) -> Answer:
    """The diagnosis of a case; `fix`: names of what was planted that is to be fixed, and needs no weights."""
    found = diagnose_parts([("exam", case.log)])
    # Where a part of each response holds the mismatch and tells no cause, what is told is of the other tokens.
    causes = found.causes or found.elsewhere
    named = fitting(causes, found.measured.signals)
    due = bool({*(case.planted or case.truth)} & {*fix})
    return Answer(
        case, quantity(found.measured, "k3").mean, causes, named, weights=due and found.advice.kind == "remedy"
    )


def answer_few(case: Case, tokens: int) -> Answer:
    """The causes that the first responses of a log tell, with so many tokens."""
    measured = measured_of(replace(case, log=first_tokens(case.log, tokens)))
    return Answer(case, quantity(measured, "k3").mean, find_causes(measured))


def first_tokens(log: Log, tokens: int) -> Log:
    """The first so many tokens of a log."""
    return part_of(log, np.arange(len(log.sequence_T)) < tokens)


def group_rows(answers: Sequence[Answer]) -> list[dict[str, object]]:
    """Each group's cases, how many were answered rightly, and Wilson's interval; all causes together; clean logs; and
    parts: BOTH, NEW, the first-named cause alone, answers with two causes, and weights where a fix is due."""
    counted = [one for one in answers if one.matters]
    groups = {name: [one for one in counted if one.group == name] for name in dict.fromkeys(a.group for a in counted)}
    clean = groups.pop("none", [])
    planted = [one for own in groups.values() for one in own]
    marks = {ALL: [one.right for one in planted]}
    marks |= {name: [one.right for one in own] for name, own in groups.items()}
    marks |= {
        CLEAN: [one.right for one in clean],
        FIRST: [one.first_right for one in planted],
        TWO: [len(one.named) == 2 for one in planted],
        WEIGHTS: [one.weights for one in planted],
        BOTH: [one.all_named for one in counted if len(one.case.truth) > 1],
        NEW: [one.right for one in counted if one.case.new],
    }
    return [
        {"group": name, "cases": len(own), "right": sum(own), **_ends(share_interval(sum(own), len(own)))}
        for name, own in marks.items()
        if own
    ]


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
    columns = ["none", *cause_words()]
    rows = []
    for truth in dict.fromkeys(one.truth for one in counted):
        own = [one.first for one in counted if one.truth == truth]
        rows.append({"truth": truth, **{name: own.count(name) for name in columns}})
    return rows


def calibration_rows(answers: Sequence[Answer]) -> list[dict[str, object]]:
    """How sure the first answer was, against how often it was right, over logs of a cause that have an answer."""
    named = [one for one in answers if one.matters and one.causes and one.case.truth]
    sure = np.array([one.causes[0].sure for one in named])
    right = np.array([one.first_right for one in named])
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
            "open": " ".join(one.named),
            "weights": int(one.weights),
            "sure": f"{one.causes[0].sure:.3f}" if one.causes else "",
            "right": int(one.right),
            "named": " ".join(f"{cause.name}:{cause.sure:.2f}" for cause in one.causes),
        }
        for one in answers
    ]


def publish(answers: Sequence[Answer], few: Sequence[tuple[int, Answer]], plan: Mapping[str, Any], out: Path) -> None:
    """The tables as CSV, and the page. `few`: answers to the first tokens of each log, with their number."""
    known = {id(one.case): one.matters for one in answers}
    kept = [(tokens, one) for tokens, one in few if known[id(one.case)]]
    sizes = dict.fromkeys(tokens for tokens, _ in kept)
    curves = {"whole": answers, **{str(n): [one for tokens, one in kept if tokens == n] for n in sizes}}
    tables = {
        "groups": group_rows(answers),
        "confusion": confusion_rows(answers),
        "calibration": [{"tokens": n} | row for n, own in curves.items() for row in calibration_rows(own)],
        "cases": case_rows(answers),
    }
    for name, rows in tables.items():
        write_csv(rows, out / f"{name}.csv")
    (out / "summary.md").write_text(page(answers, tables, plan), encoding="utf-8")


def page(answers: Sequence[Answer], tables: Mapping[str, list[dict[str, object]]], plan: Mapping[str, Any]) -> str:
    """The page of the judged cases, in Markdown; `plan`: the design."""
    misses = [row for row, one in zip(tables["cases"], answers, strict=True) if one.matters and not one.right]
    short = [{name: row[name] for name in ("model", "truth", "fault", "k3", "open", "named")} for row in misses]
    confusion = [
        {"planted": row["truth"]} | {name: row[name] or "" for name in row if name != "truth"}
        for row in tables["confusion"]
    ]
    limits = plan["limits"]
    parts = [
        "# The exam of causes",
        f"{len(answers)} logs of known cause, on models that the rules of `tailrl diagnose` were not settled on. "
        "`exams/diagnose/design.yaml` has the design, and was fixed before these logs were made and diagnosed.",
        "An answer is right if the page names one cause and it was planted, or if it leaves two open and one of them "
        "was. Of a clean log it is right if none is named. A case counts if k3 is above ten times that of the trainer "
        "against itself, or if the log itself has a fault. Intervals are Wilson's, at 95 %.",
        f"Limits: {limits['right']:.0%} right; two causes in at most {limits['two']:.0%} of the answers; weights "
        f"advised where a fix is due in at most {limits['weights']:.0%}; at most {limits['false_alarms']:.1%} of clean "
        "logs with a cause.",
        _met(tables["groups"], limits),
        str(plan["notes"]).strip(),
        "## By group",
        _table(tables["groups"]),
        "## What was named first",
        "Rows are what was planted, columns what was named.",
        _table(confusion),
        "## How sure, and how often right",
        "Of the first-named cause: of whole logs, and of the first tokens of the same logs.",
        _table(tables["calibration"]),
        "## Every miss",
        _table(short) if short else "None.",
        "## What the names mean",
        _table(_names(answers, plan["words"])),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _met(rows: Sequence[Mapping[str, object]], limits: Mapping[str, float]) -> str:
    """Which limits are met, in a sentence each."""
    share = {str(row["group"]): float(str(row["share"])) for row in rows}
    right, alarms = share.get(ALL, 0.0), 1 - share.get(CLEAN, 1.0)
    two, weights = share.get(TWO, 0.0), share.get(WEIGHTS, 0.0)
    said = {
        f"All causes: {right:.1%} right": right >= limits["right"],
        f"Two causes in {two:.1%} of the answers": two <= limits["two"],
        f"Weights where a fix is due in {weights:.1%}": weights <= limits["weights"],
        f"Clean logs: {alarms:.1%} with a cause": alarms <= limits["false_alarms"],
    }
    return "\n".join(f"- {words}. The limit is {'met' if met else '**missed**'}." for words, met in said.items())


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
