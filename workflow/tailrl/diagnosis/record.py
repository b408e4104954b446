"""The answer as data: `tailrl diagnose --json`.

The models make the JSON schema, `workflow/schemas/diagnosis.schema.json`: `tailrl schema diagnosis`.
Within a version keys are only added. What is renamed, removed or means something else raises VERSION.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

import tailrl
from tailrl.artifacts.files import Record
from tailrl.diagnosis.change import Change
from tailrl.diagnosis.change import verdict as change_verdict
from tailrl.diagnosis.diagnosis import Diagnosis
from tailrl.diagnosis.gate import WORDS, Judgement, exit_code
from tailrl.diagnosis.headline import headline
from tailrl.diagnosis.measure import TOKEN
from tailrl.diagnosis.metrics import OTHERS, named_metrics, quantity
from tailrl.diagnosis.replay import configuration
from tailrl.diagnosis.sizes import band_of

VERSION: Literal[1] = 1


def _finite(value: float | None) -> float | None:
    """The number as JSON has it: None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


Finite = Annotated[float | None, BeforeValidator(_finite)]


class Part(Record, from_attributes=True):
    """A part of an answer: made of an object's attributes of the same names."""


class NumberRecord(Part):
    """A number with its interval at 95 % over responses; null: it has none, or is no finite number."""

    mean: Finite
    low: Finite = None
    high: Finite = None


class RuleRecord(Part):
    """A framework's own rule of thumb."""

    framework: str
    metric: str = Field(description="the framework's name of the number")
    value: Finite
    rule: str
    source: str = Field(description="the framework's document")
    holds: bool


class CauseRecord(Part):
    """A cause."""

    name: str = Field(description="a key of diagnosis/causes.yaml")
    title: str
    sure: float = Field(description="the probability, from 0 to 1")
    evidence: tuple[str, ...]


class FaultRecord(Part):
    """What the log itself has wrong."""

    name: str = Field(description="a key of diagnosis/exact_checks.yaml")
    says: str
    do: str


class PlaceRecord(Part):
    """Where most of the mismatch is."""

    grouping: str = Field(description="a key of diagnosis/where.yaml")
    words: str
    share: NumberRecord = Field(description="of the mismatch")
    tokens: float = Field(description="the share of the tokens")
    look: str


class LinesRecord(Part):
    """What sets a remedy in a framework."""

    framework: str
    version: str
    text: str


class AdviceRecord(Part):
    """What to do."""

    kind: Literal["none", "ask", "fix", "remedy", "beyond"] = Field(
        description="none: no correction; ask: it depends on what the log does not say; fix: the cause first, the "
        "remedy until then; remedy; beyond: none helps"
    )
    do: str
    remedy: str | None = Field(description="a key of diagnosis/replay.yaml")
    threshold: Finite
    gives: str = Field(description="what the remedy keeps and leaves")
    finding: str = Field(description="the page that the advice follows")
    lines: tuple[LinesRecord, ...]


class GateRecord(Part):
    """A limit and whether the number is within it."""

    name: str
    side: Literal["max", "min"]
    limit: float
    value: NumberRecord
    verdict: Literal["within", "beyond", "cannot tell"]
    words: str


class LogRecord(Part):
    """What a log of tokens says."""

    kind: Literal["log"] = "log"
    version: Literal[1] = VERSION
    tailrl: str = Field(description="the version of tailrl")
    verdict: str
    level: Literal["fine", "coarse", "bad", "unknown"] = Field(description="of the size: diagnosis/sizes.yaml")
    framework: str
    responses: int
    tokens: int
    numbers: dict[str, NumberRecord] = Field(description="by our names, which `--max` and `--min` take")
    rules: list[RuleRecord]
    faults: tuple[FaultRecord, ...]
    where: tuple[PlaceRecord, ...]
    causes: tuple[CauseRecord, ...]
    elsewhere: tuple[CauseRecord, ...] = Field(description="outside the place whose causes are told apart")
    advice: AdviceRecord
    gate: list[GateRecord]
    exit_code: int = Field(description="0: within every limit, or no limit given; 1: beyond one; 2: cannot tell")
    experiment: dict[str, Any] | None = Field(
        None, description="of a probe whose sides differ by more than rounding: what `tailrl explain --json` gives"
    )


class RunRecord(Part):
    """What the curves of a run say."""

    run: str
    metric: str
    level: Finite = Field(description="the median of the last tenth of the steps")
    k3: Finite = Field(description="the level as a k3 in nats, roughly where the metric is another number")
    shape: str = Field(description="a key of curves/shapes.yaml")
    factor: float = Field(description="by which the level changed")
    since: Finite = Field(description="the step at which the change began")
    size: str | None
    verdict: str
    fits: list[str] = Field(description="causes that fit the shape")
    excludes: list[str] = Field(description="causes that the shape rules out")
    rules_broken: list[str]


class CurvesRecord(Part):
    """What the metrics of a run say, without tokens."""

    kind: Literal["curves"] = "curves"
    version: Literal[1] = VERSION
    tailrl: str
    where: str
    runs: list[RunRecord]
    gate: list[GateRecord]
    exit_code: int


class DifferenceRecord(Part):
    """A mean before and after."""

    name: str
    before: NumberRecord
    after: NumberRecord
    change: NumberRecord = Field(description="after minus before")
    verdict: Literal["smaller", "larger", "no detectable difference"]


class ChangeRecord(Part):
    """Two logs, before and after a change. The gate judges the later one."""

    kind: Literal["change"] = "change"
    version: Literal[1] = VERSION
    tailrl: str
    verdict: str
    paired: int = Field(description="prompts that both logs have")
    numbers: tuple[DifferenceRecord, ...]
    groups: tuple[DifferenceRecord, ...]
    before: LogRecord
    after: LogRecord
    gate: list[GateRecord]
    exit_code: int


AnyRecord = LogRecord | CurvesRecord | ChangeRecord


def schema() -> dict[str, Any]:
    """The JSON schema of what `--json` writes."""
    found: dict[str, Any] = TypeAdapter(AnyRecord).json_schema()
    return {"title": "tailrl diagnose --json", "$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def as_json(record: Record) -> str:
    """A record as the text that `--json` writes."""
    return record.model_dump_json(indent=2) + "\n"


def log_record(diagnosis: Diagnosis, judgements: Sequence[Judgement] = ()) -> LogRecord:
    """The diagnosis of a log as data."""
    measured, advice = diagnosis.measured, diagnosis.advice
    k3 = quantity(measured, "k3").mean
    names = (*TOKEN, *OTHERS, *measured.extremes)
    return LogRecord.model_validate(
        {
            "tailrl": tailrl.__version__,
            "verdict": headline(diagnosis).verdict,
            "level": "unknown" if math.isnan(k3) else band_of(k3).level,
            "framework": diagnosis.framework,
            "responses": measured.sequences,
            "tokens": measured.tokens,
            "numbers": {name: quantity(measured, name) for name in names},
            "rules": [
                RuleRecord(
                    framework=one.framework,
                    metric=one.name,
                    value=one.value.mean,
                    rule=rule.sentence(),
                    source=rule.source,
                    holds=holds,
                )
                for one in named_metrics(measured)
                for rule, holds in one.judged
                if math.isfinite(one.value.mean)
            ],
            "faults": diagnosis.faults,
            "where": diagnosis.places,
            "causes": diagnosis.causes,
            "elsewhere": diagnosis.elsewhere,
            "advice": {
                "kind": advice.kind,
                "do": advice.words,
                "remedy": advice.name,
                "threshold": advice.threshold,
                "gives": advice.gives,
                "finding": advice.finding,
                "lines": configuration(advice.name, advice.threshold, diagnosis.framework) if advice.name else (),
            },
            "gate": gate_records(judgements),
            "exit_code": exit_code(judgements),
        }
    )


def change_record(change: Change, judgements: Sequence[Judgement] = ()) -> ChangeRecord:
    """Two logs as data."""
    return ChangeRecord.model_validate(
        {
            "tailrl": tailrl.__version__,
            "verdict": change_verdict(change),
            "paired": change.paired,
            "numbers": change.numbers,
            "groups": change.groups,
            "before": log_record(change.before),
            "after": log_record(change.after),
            "gate": gate_records(judgements),
            "exit_code": exit_code(judgements),
        }
    )


def gate_records(judgements: Iterable[Judgement]) -> list[GateRecord]:
    """Judgements as data."""
    return [
        GateRecord.model_validate(
            {
                "name": one.limit.name,
                "side": one.limit.side,
                "limit": one.limit.value,
                "value": one.value,
                "verdict": WORDS[one.code],
                "words": one.words,
            }
        )
        for one in judgements
    ]
