"""What the first screen of a study's page shows: charts, the arms' legend, and the claims as cards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.results import Results
from tailrl.page_parts.number_text import percent
from tailrl.reports.axes import arm_styles
from tailrl.reports.curves import Curve
from tailrl.reports.overview import charts
from tailrl.reports.overview.arms import describe_arms
from tailrl.reports.overview.cards import SILENT_GROUP, Card, cards, tally
from tailrl.reports.scores.numbers import Gain, PolicyScore, greedy_scores
from tailrl.stats.intervals import problem_interval
from tailrl.tracking.metrics import K3_UNMASKED, REWARD

MOST_LINES = 3
"""A card shows this many lines, and folds the rest."""

SCORE_WORDS = "Each arm: mean with its 95 % interval over seeds and problems; small dots are seeds."
GREEDY_WORDS = "Open diamonds: the greedy score, which takes the most probable token each time."
K3_WORDS = (
    "k3 KL on the full distributions, of the tokens that an arm samples: mean over seeds, band from the smallest to "
    "the largest seed. An axis that shows 0 is linear below its smallest power of ten."
)


@dataclass(frozen=True, slots=True)
class Screen:
    """The first screen; `panels` are the charts, each with its name, its caption and its tables."""

    keys: Sequence[charts.Key]
    panels: Sequence[tuple[charts.Panel, str, str, tuple[str, ...]]]
    cards: Mapping[str, Sequence[Card]]
    tally: str
    silent: str = SILENT_GROUP
    limit: int = MOST_LINES


def first_screen(
    results: Results,
    gains: Sequence[Gain],
    policies: Sequence[PolicyScore],
    curves: Sequence[Curve],
    verdicts: Sequence[Verdict],
    temperature: float = 1.0,
) -> Screen:
    """The first screen from what the report's tables hold; `curves` has those of the reward and of unmasked k3.

    The scores' responses were sampled at `temperature`.
    """
    keys = charts.keys_of(arm_styles(results.arms), describe_arms(results))
    base = results.base.scores[0].correct_PK
    reward = [curve for curve in curves if curve.metric == REWARD]
    window = max(curve.window for curve in reward)
    smoothed = f"; each seed is a moving mean of {window} steps" if window > 1 else ""
    words = f"Mean over seeds, band from the smallest to the largest seed{smoothed}."
    k3 = [curve for curve in curves if curve.metric == K3_UNMASKED]
    found = cards(verdicts)
    greedy = greedy_scores(results)
    scores = charts.score_chart(gains, policies, problem_interval(base), keys, base.shape[1], greedy)
    score_words = f"{SCORE_WORDS} Sampled at temperature {temperature:g}."
    if greedy:
        score_words += f" {GREEDY_WORDS} Dotted: that of the untrained policy, {percent(greedy[0].greedy)}."
    score_tables = ("evaluation", "policies", *(["greedy"] if greedy else []))
    panels = (
        (scores, "score", score_words, score_tables),
        (charts.curve_chart("reward", "Training reward", reward, keys), "reward", words, ("training",)),
        (
            charts.curve_chart("k3", "Mismatch: k3 (nats a token)", k3, keys, magnitude=True),
            "k3",
            K3_WORDS,
            ("mismatch",),
        ),
    )
    return Screen(keys, panels, found, tally(found))
