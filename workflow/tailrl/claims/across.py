"""Verdicts over several studies: whether an arm's quantity differs from that in the first study."""

import math
from collections.abc import Sequence

from tailrl.analysis import arm_kinds
from tailrl.analysis.across import ArmQuantity
from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.results import Results
from tailrl.claims.catalogue import named
from tailrl.claims.decide import Line, decide, scope_of
from tailrl.claims.finding import changed, ends, interval
from tailrl.config.study import Study


def judge_across(studies: Sequence[Study], read: Sequence[Results], measured: Sequence[ArmQuantity]) -> list[Verdict]:
    """The verdicts, by quantity, arm and later study; the first study is the reference."""
    results = {study.name: own for study, own in zip(studies, read, strict=True)}
    first, claims, lines = studies[0].name, named("across.*"), []
    for one in measured:
        change = one.change
        if not math.isnan(change.p):
            words = f"{one.quantity}, {one.study} less {first}: {interval(*ends(change))}"
            finding = changed((one.arm,), one.value.n, change, words)
            scope = scope_of(arm_kinds.settings_of(results[one.study], one.arm))
            lines.append(Line(claims[one.quantity].filled(first=first), scope, finding))
    return decide(lines)
