"""What the first screen of a study's page shows: charts, the arms' legend, and the claims as cards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.results import Results
from tailrl.page_parts import scales
from tailrl.reports.axes import ARM_COLOURS, DARK_COLOURS, arm_styles
from tailrl.reports.curves import Curve
from tailrl.reports.overview import charts
from tailrl.reports.overview.arms import describe_arms
from tailrl.reports.overview.cards import SILENT_GROUP, Card, cards, tally
from tailrl.reports.scores.numbers import Gain, PolicyScore
from tailrl.stats.intervals import problem_interval
from tailrl.tracking.metrics import K3_UNMASKED, REWARD

MOST_LINES = 3
"""A card shows this many lines, and folds the rest."""

K3_WORDS = (
    "k3 KL on the full distributions, of the tokens that an arm samples: mean over seeds, band from the smallest to "
    "the largest seed. An axis that shows 0 is linear below its smallest power of ten."
)


@dataclass(frozen=True, slots=True)
class Screen:
    """The first screen; `panels` are the charts of curves, each with its name, its caption and its table.

    `colours` are those of arms by number, on a light and on a dark page. The lengths are those of the charts.
    """

    keys: Sequence[charts.Key]
    scores: charts.Scores
    samples: int
    panels: Sequence[tuple[charts.Panel, str, str, str]]
    cards: Mapping[str, Sequence[Card]]
    tally: str
    colours: tuple[tuple[str, str], ...] = tuple(zip(ARM_COLOURS, DARK_COLOURS, strict=True))
    silent: str = SILENT_GROUP
    limit: int = MOST_LINES
    width: int = scales.WIDTH_OF_PHONE
    height: int = scales.CURVES_HEIGHT
    left: int = scales.LEFT
    right: int = scales.RIGHT
    bottom: int = scales.BOTTOM
    edge: int = charts.EDGE


def first_screen(
    results: Results,
    gains: Sequence[Gain],
    policies: Sequence[PolicyScore],
    curves: Sequence[Curve],
    verdicts: Sequence[Verdict],
) -> Screen:
    """The first screen from what the report's tables hold; `curves` has those of the reward and of unmasked k3."""
    keys = charts.keys_of(arm_styles(results.arms), describe_arms(results))
    base = results.base.scores[0].correct_PK
    reward = [curve for curve in curves if curve.metric == REWARD]
    window = max(curve.window for curve in reward)
    smoothed = f"; each seed is a moving mean of {window} steps" if window > 1 else ""
    words = f"Mean over seeds, band from the smallest to the largest seed{smoothed}."
    k3 = [curve for curve in curves if curve.metric == K3_UNMASKED]
    found = cards(verdicts)
    return Screen(
        keys,
        charts.score_chart(gains, policies, problem_interval(base), keys),
        base.shape[1],
        (
            (charts.curve_chart("Training reward", reward, keys), "reward", words, "training"),
            (charts.curve_chart("Mismatch: k3 (nats a token)", k3, keys, magnitude=True), "k3", K3_WORDS, "mismatch"),
        ),
        found,
        tally(found),
    )
