"""The page of all metrics, made from the catalogue."""

from tailrl.analysis.format import table
from tailrl.tracking.metrics import METRICS, NOTATION, VERIFICATION, Metric

INTRODUCTION = """\
# Metrics

A run writes one line a step into `metrics.jsonl`, with these keys; a value that is not finite is null. W&B gets the
same keys, and `training: {stop_when: {metric: ...}}` takes them. `tailrl metrics` writes this page, from
`workflow/tailrl/tracking/metrics.py`.

"""


def metrics_page() -> str:
    """docs/metrics.md: each metric's key, unit and meaning, and a link to what computes it."""
    verified = "## Where the trainer verifies what the engine draws"
    return INTRODUCTION + "\n".join([NOTATION, _table(METRICS), "", verified, "", _table(VERIFICATION)])


def _table(metrics: dict[str, Metric]) -> str:
    rows = [[f"`{key}`", metric.unit, metric.meaning, _link(metric.computed_by)] for key, metric in metrics.items()]
    return table(("key", "unit", "meaning", "computed by"), rows)


def _link(computed_by: str) -> str:
    """A link to the file of a function or method, tailrl.<room>.<module>.<name>."""
    package, room, module, name = computed_by.split(".", maxsplit=3)
    return f"[{module}.{name}](../workflow/{package}/{room}/{module}.py)"
