"""What was found in a log, as a page: the answer first. HTML in one file without a network; Markdown for a terminal."""

import math
from dataclasses import dataclass
from pathlib import Path

from tailrl.analysis.format import count, short
from tailrl.config.presets import frameworks
from tailrl.diagnosis.advice import SURE, mistakes
from tailrl.diagnosis.causes import cause_words, disagrees_with_itself
from tailrl.diagnosis.charts import charts
from tailrl.diagnosis.diagnosis import Diagnosis
from tailrl.diagnosis.lags import BEYOND, lag_words
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.metrics import Rule, named_metrics, quantity
from tailrl.diagnosis.replay import catalogue, configuration
from tailrl.pages import TEMPLATES, scales
from tailrl.pages.explorer import explorer_data
from tailrl.pages.markdown import markdown_html, markdown_tokens, prose
from tailrl.runtime.templates import renderer
from tailrl.stats.intervals import Interval

OPTIONAL_COLUMNS = {
    "token": ("token ids", "which tokens differ"),
    "recomputed": ("the trainer's log-probs before the update (recomputed)", "rounding apart from stale weights"),
    "advantage": ("advantages", "how much each remedy turns the gradient, and what DPPO masks"),
    "again": ("the trainer's log-probs computed a second time", "the noise floor: the trainer against itself"),
    "trainer_top": ("the trainer's largest log-prob at each position", "DVP's safe set of the trainer"),
    "sampler_top": (
        "the sampler's largest log-prob at each position",
        "truncated sampling, and DVP's set of the sampler",
    ),
    "rank": ("ranks of the sampled tokens", "top-k sampling on one side"),
    "trainer_set": ("sizes of the trainer's safe sets", "how many tokens the trainer keeps at each position"),
    "sampler_set": ("sizes of the sampler's safe sets", "how many tokens the sampler keeps at each position"),
    "step": ("training steps", "whether the mismatch grows"),
    "version": ("versions of the sampler's weights", "stale weights"),
    "reward": ("rewards", "whether solved responses differ"),
    "text": ("texts", "what the worst responses say"),
}
"""The optional columns, in words, and what each would tell."""

SUMMARY = {
    "abs_logp": "mean |Δ|, nats a token",
    "k3": "k3, nats a token",
    "ess_token": "effective sample size of token weights",
    "ess_seq": "effective sample size of responses' weights",
}
"""The numbers that the page begins with."""

NOTHING_TO_SAY = ("copy", "constant", "negative")
"""Faults of a log after which its other numbers mean nothing."""

MOST_CARDS = 3
"""The page shows this many causes, and folds the others."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A framework's metric in the table: its value, the noise floor, and its rules of thumb with whether they hold."""

    name: str
    settings: str
    value: str
    floor: str
    rules: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class HeadNumber:
    """One of the numbers that the page begins with."""

    name: str
    value: str
    interval: str
    floor: str


def blank(value: float) -> str:
    """A number in four digits; nothing where there is none, or no limit."""
    return f"{value:.4g}" if math.isfinite(value) else ""


def share(value: float) -> str:
    """A share in percent; nothing where there is none."""
    return f"{value:.2%}" if math.isfinite(value) else ""


render = renderer((Path(__file__).parent / "templates", TEMPLATES), blank, count, prose, share, short)


def terminal_page(diagnosis: Diagnosis, out: Path | None = None) -> str:
    """The answer in a few lines of Markdown; `out`: where the whole page is."""
    return render("diagnosis.md.j2", out=out or "", **_values(diagnosis))


def html_page(diagnosis: Diagnosis, title: str = "Diagnosis of a log", more: str = "") -> str:
    """The whole page: verdict, causes, remedies, numbers, signature, token explorer, and what could not be said.

    `more` is Markdown that follows the signature, such as what whole distributions add.
    """
    measured = diagnosis.measured
    return render(
        "diagnosis.html.j2",
        title=title,
        more=markdown_html(markdown_tokens(more)),
        metrics=_metrics(measured),
        charts=charts(measured),
        shown=MOST_CARDS,
        size={
            "width": scales.WIDTH_OF_PHONE,
            "height": scales.CURVES_HEIGHT,
            "left": scales.LEFT,
            "right": scales.RIGHT,
            "bottom": scales.BOTTOM,
        },
        responses=explorer_data(diagnosis.responses),
        **_values(diagnosis),
    )


def _values(diagnosis: Diagnosis) -> dict[str, object]:
    """What both pages say."""
    measured, advice = diagnosis.measured, diagnosis.advice
    titles = {name: remedy.title for name, remedy in catalogue().remedies.items()}
    return {
        "measured": measured,
        "verdict": verdict(diagnosis),
        "numbers": [_summary(measured, name) for name in SUMMARY],
        "odd": {name: number for name, number in measured.odd.items() if number},
        "notes": diagnosis.notes,
        "causes": [(cause, cause_words()[cause.name]) for cause in diagnosis.causes],
        "remedies": [(one, catalogue().remedies[one.name]) for one in diagnosis.remedies],
        "titles": titles,
        "remedy_notes": sorted({f"{titles[one.name]}: {one.note}" for one in diagnosis.remedies if one.note}),
        "advice": advice,
        "probable": SURE,
        "not_replayed": "; ".join(one.words for one in catalogue().not_replayed),
        "configured": configuration(advice.name, advice.threshold, _framework(measured)) if advice.name else (),
        "lags": diagnosis.lags,
        "depths": diagnosis.depths,
        "lag_words": lag_words(diagnosis.lags),
        "beyond": BEYOND,
        "lacking": [words for name, words in OPTIONAL_COLUMNS.items() if name not in measured.has],
    }


def _framework(measured: Measured) -> str:
    """The framework whose log it is, as its presets are named; empty if the format is of none of these."""
    titles = [title.lower() for title in measured.titles]
    return next((name for name in frameworks() if any(title.startswith(name) for title in titles)), "")


def verdict(diagnosis: Diagnosis) -> str:
    """The answer: what the log itself has wrong, what the mismatch is, and what to do."""
    faults = [f"{fault.says} {fault.do}" for fault in diagnosis.faults]
    if any(fault.name in NOTHING_TO_SAY for fault in diagnosis.faults):
        return " ".join(faults)
    return " ".join([*faults, _of_the_mismatch(diagnosis)])


def _of_the_mismatch(diagnosis: Diagnosis) -> str:
    """What the mismatch is, and what to do, in two sentences."""
    measured = diagnosis.measured
    if not measured.tokens:
        return "No token of this log has log-probs of both sides. Log both, for the same tokens."
    size = short(quantity(measured, "abs_logp").mean)
    advice = diagnosis.advice
    if disagrees_with_itself(measured.signals):
        return (
            f"The trainer disagrees with itself: its log-probs of the same tokens, computed twice, differ by "
            f"{_floor(measured, 'abs_logp')} nats a token, and those of the sampler by {size}. So nothing can be said "
            f"of the sampler's own share. {advice.words}"
        )
    if not diagnosis.causes:
        if measured.extremes["abs_logp_max"] == 0:
            return "Sampler and trainer agree to the last bit. No correction is needed."
        return f"No mismatch that needs a cause: mean |Δ| is {size} nats a token. {advice.words}"
    cause = (*mistakes(diagnosis.causes), diagnosis.causes[0])[0]
    words = cause_words()[cause.name]
    if cause.sure >= SURE:
        return f"{words.verdict} {words.do if advice.kind == 'fix' else advice.words}"
    return f"No cause is sure; the most probable one ({cause.sure:.0%}): {words.title}. {advice.words}"


def cell(value: Interval) -> str:
    """A value with its interval, three digits."""
    return f"{value.mean:.3g}{_ends(value)}"


def _ends(value: Interval) -> str:
    known = not math.isnan(value.low) and value.low < value.high
    return f" [{value.low:.3g}, {value.high:.3g}]" if known else ""


def _floor(measured: Measured, name: str) -> str:
    """The same quantity of the trainer against itself; empty if the log has none."""
    return f"{quantity(measured.floor, name).mean:.3g}" if measured.floor and measured.floor.tokens else ""


def _summary(measured: Measured, name: str) -> HeadNumber:
    value = quantity(measured, name)
    return HeadNumber(SUMMARY[name], f"{value.mean:.3g}", _ends(value).strip(), _floor(measured, name))


def _metrics(measured: Measured) -> dict[str, list[MetricRow]]:
    """The rows of each framework."""
    found: dict[str, list[MetricRow]] = {}
    for one in named_metrics(measured):
        rules = () if math.isnan(one.value.mean) else tuple(_rule(rule, one.value.mean) for rule in one.rules)
        found.setdefault(one.framework, []).append(
            MetricRow(one.name, one.settings, cell(one.value), _floor(measured, one.of), rules)
        )
    return found


def _rule(rule: Rule, value: float) -> tuple[str, str, str]:
    """Whether a value is within a rule of thumb, the rule in words, and its source."""
    return "within" if rule.holds(value) else "beyond", rule.sentence(), rule.source
