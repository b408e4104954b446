"""The page of all metrics, made from the catalogue."""

from pathlib import Path

from tailrl.runtime.data_files import yaml_beside
from tailrl.runtime.templates import renderer
from tailrl.tracking.metrics import CURRICULUM, METRICS, ROUTING, VERIFICATION

# Not beside the metrics: training depends on those.
ALIASES: dict[str, dict[str, dict[str, str]]] = yaml_beside(__file__, "aliases.yaml")
"""By framework and its name of a metric: our key, and a note where the values differ."""

render = renderer(Path(__file__).parent)  # that of `report.page` needs SciPy and matplotlib


def metrics_page() -> str:
    """reference/metrics.md: each metric's key, unit, meaning, a link to what computes it, and its names elsewhere."""
    catalogues = {
        "metrics": METRICS,
        "verification": VERIFICATION,
        "routing": ROUTING,
        "curriculum": CURRICULUM,
        "aliases": ALIASES,
    }
    return render("page.md.j2", **catalogues)
