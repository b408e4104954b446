"""The page of all metrics, made from the catalogue."""

from tailrl.report.page import render
from tailrl.tracking.metrics import METRICS, NOTATION, VERIFICATION


def metrics_page() -> str:
    """docs/metrics.md: each metric's key, unit and meaning, and a link to what computes it."""
    return render("metrics.md.j2", notation=NOTATION, metrics=METRICS, verification=VERIFICATION)
