"""What was found in a log, as a page: the answer first. HTML in one file without a network; Markdown for a terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrl.diagnosis.advice import SURE, Advice
from tailrl.diagnosis.charts import charts
from tailrl.diagnosis.diagnosis import Diagnosis
from tailrl.diagnosis.gate import Judgement
from tailrl.diagnosis.headline import headline
from tailrl.diagnosis.lags import BEYOND, lag_words
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.metrics import Named, named_metrics, quantity
from tailrl.diagnosis.replay import Configured, catalogue, configuration
from tailrl.diagnosis.sizes import number_name, sizes
from tailrl.page_parts import TEMPLATES
from tailrl.page_parts.explorer import explorer_data
from tailrl.page_parts.markdown import markdown_html, markdown_tokens, prose
from tailrl.page_parts.number_text import count, short
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

SOME_FRAMEWORKS = 2
"""The terminal shows the lines of so many where the log's framework is not known."""

MOST_CARDS = 3
"""The page shows this many causes, and folds the others."""


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


def cell(value: Interval) -> str:
    """A value with its interval, three digits."""
    return f"{value.mean:.3g}{_ends(value)}"


def _ends(value: Interval) -> str:
    known = not math.isnan(value.low) and value.low < value.high
    return f" [{value.low:.3g}, {value.high:.3g}]" if known else ""


render = renderer(
    (Path(__file__).parent / "templates", TEMPLATES), blank, cell, count, number_name, prose, share, short
)


def terminal_page(diagnosis: Diagnosis, out: Path | None = None, judgements: Sequence[Judgement] = ()) -> str:
    """The answer in a few lines of Markdown; `out`: where the whole page is."""
    return render("diagnosis.md.j2", out=out or "", judgements=judgements, **_values(diagnosis))


def html_page(
    diagnosis: Diagnosis,
    title: str = "Diagnosis of a log",
    more: str = "",
    judgements: Sequence[Judgement] = (),
) -> str:
    """The whole page: verdict, causes, remedies, numbers, signature, token explorer, and what could not be said.

    `more` is Markdown that follows the signature, such as what whole distributions add.
    """
    measured = diagnosis.measured
    return render(
        "diagnosis.html.j2",
        title=title,
        judgements=judgements,
        more=markdown_html(markdown_tokens(more)),
        metrics=_metrics(measured),
        charts=charts(measured),
        shown=MOST_CARDS,
        responses=explorer_data(diagnosis.responses),
        **_values(diagnosis),
    )


def _remedy_words(advice: Advice) -> str:
    """The advised remedy with its threshold; empty without one."""
    if advice.name is None:
        return ""
    threshold = f", {'ρ' if advice.name == 'dvp' else 'C'} = {short(advice.threshold)}"
    return catalogue().remedies[advice.name].title + (threshold if math.isfinite(advice.threshold) else "")


def pasted(diagnosis: Diagnosis) -> tuple[Configured, ...]:
    """The advised remedy's lines for a terminal: the framework's own, or those of some where it is not known."""
    advice = diagnosis.advice
    if advice.name is None:
        return ()
    lines = configuration(advice.name, advice.threshold, diagnosis.framework)
    own = tuple(one for one in lines if one.framework == diagnosis.framework)
    return own or lines[:SOME_FRAMEWORKS]


def _values(diagnosis: Diagnosis) -> dict[str, object]:
    """What both pages say."""
    measured, advice = diagnosis.measured, diagnosis.advice
    titles = {name: remedy.title for name, remedy in catalogue().remedies.items()}
    return {
        "measured": measured,
        "answer": headline(diagnosis),
        "numbers": [_summary(measured, name) for name in SUMMARY],
        "odd": {name: number for name, number in measured.odd.items() if number},
        "notes": diagnosis.notes,
        "causes": [(cause, cause.words) for cause in diagnosis.causes],
        "elsewhere": [(cause, cause.words) for cause in diagnosis.elsewhere],
        "places": diagnosis.places,
        "focus": diagnosis.focus,
        "remedies": [(one, catalogue().remedies[one.name]) for one in diagnosis.remedies],
        "titles": titles,
        "remedy_notes": sorted({f"{titles[one.name]}: {one.note}" for one in diagnosis.remedies if one.note}),
        "advice": advice,
        "probable": SURE,
        "not_replayed": "; ".join(one.words for one in catalogue().not_replayed),
        "configured": configuration(advice.name, advice.threshold, diagnosis.framework) if advice.name else (),
        "framework": diagnosis.framework,
        "normal": [(row, cell(quantity(measured, row.of))) for row in sizes().normal] if measured.tokens else [],
        "bands": sizes().bands,
        "k3": quantity(measured, "k3").mean,
        "meanwhile_word": "Until then" if advice.kind == "fix" else "With",
        "pasted": pasted(diagnosis),
        "remedy_words": _remedy_words(advice),
        "lags": diagnosis.lags,
        "depths": diagnosis.depths,
        "lag_words": lag_words(diagnosis.lags),
        "beyond": BEYOND,
        "lacking": [words for name, words in OPTIONAL_COLUMNS.items() if name not in measured.has],
    }


def _floor(measured: Measured, name: str) -> str:
    """The same quantity of the trainer against itself; empty if the log has none."""
    return f"{quantity(measured.floor, name).mean:.3g}" if measured.floor and measured.floor.tokens else ""


def _summary(measured: Measured, name: str) -> HeadNumber:
    value = quantity(measured, name)
    return HeadNumber(SUMMARY[name], f"{value.mean:.3g}", _ends(value).strip(), _floor(measured, name))


def _metrics(measured: Measured) -> dict[str, list[tuple[Named, str]]]:
    """Each framework's metrics with their noise floors."""
    found: dict[str, list[tuple[Named, str]]] = {}
    for one in named_metrics(measured):
        found.setdefault(one.framework, []).append((one, _floor(measured, one.of)))
    return found
