"""The page of all metrics, made from the catalogue."""

from tailrl.report.page import render
from tailrl.tracking.metrics import ALIASES, METRICS, NOTATION, VERIFICATION


def metrics_page() -> str:
    """docs/metrics.md: each metric's key, unit, meaning, a link to what computes it, and its names elsewhere."""
    catalogues = {"metrics": METRICS, "verification": VERIFICATION, "aliases": ALIASES}
    return render("metrics.md.j2", notation=NOTATION, **catalogues)
