"""What was found in a log, as a page: the answer first. HTML in one file without a network; Markdown for a terminal."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tailrl.diagnosis.advice import SURE, Advice
from tailrl.diagnosis.charts import charts
from tailrl.diagnosis.diagnosis import Diagnosis
from tailrl.diagnosis.gate import Judgement
from tailrl.diagnosis.headline import headline
from tailrl.diagnosis.lags import BEYOND, lag_words
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.metrics import Named, named_metrics, quantity
from tailrl.diagnosis.replay import catalogue, configuration
from tailrl.diagnosis.sizes import sizes
from tailrl.page_parts import TEMPLATES
from tailrl.page_parts.explorer import explorer_data
from tailrl.page_parts.markdown import markdown_html, markdown_tokens, prose
from tailrl.page_parts.number_text import count, short
from tailrl.runtime.data_files import yaml_beside
from tailrl.runtime.templates import renderer
from tailrl.stats.intervals import Interval

SUMMARY = {
    "abs_logp": "mean |Δ|, nats a token",
    "k3": "k3, nats a token",
    "ess_token": "effective sample size of token weights",
    "ess_seq": "effective sample size of responses' weights",
}
"""The numbers that the page begins with."""

SOME_FRAMEWORKS = 2  # the terminal shows the lines of so many where the log's framework is not known
MOST_CARDS = 3  # the page shows this many causes, and folds the others


@cache
def optional_columns() -> dict[str, list[str]]:
    """The optional columns, in words, and what each would tell."""
    return dict(yaml_beside(__file__, "optional_columns.yaml"))


def blank(value: float) -> str:
    """A number in four digits; nothing where there is none, or no limit."""
    return f"{value:.4g}" if math.isfinite(value) else ""


def share(value: float) -> str:
    """A share in percent; nothing where there is none."""
    return f"{value:.2%}" if math.isfinite(value) else ""


def cell(value: Interval) -> str:
    """A value with its interval, three digits."""
    return f"{value.mean:.3g}{ends(value)}"


def ends(value: Interval) -> str:
    """The ends of an interval, if there is one."""
    known = not math.isnan(value.low) and value.low < value.high
    return f" [{value.low:.3g}, {value.high:.3g}]" if known else ""


render = renderer((Path(__file__).parent / "templates", TEMPLATES), blank, cell, count, ends, prose, share, short)


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


def _values(diagnosis: Diagnosis) -> dict[str, object]:
    """What both pages say."""
    measured, advice = diagnosis.measured, diagnosis.advice
    titles = {name: remedy.title for name, remedy in catalogue().remedies.items()}
    configured = configuration(advice.name, advice.threshold, diagnosis.framework) if advice.name else ()
    of_framework = [one for one in configured if one.framework == diagnosis.framework]
    return {
        "diagnosis": diagnosis,
        "measured": measured,
        "answer": headline(diagnosis),
        "numbers": [(words, quantity(measured, name), _floor(measured, name)) for name, words in SUMMARY.items()],
        "odd": {name: number for name, number in measured.odd.items() if number},
        "remedies": [(one, catalogue().remedies[one.name]) for one in diagnosis.remedies],
        "titles": titles,
        "remedy_notes": sorted({f"{titles[one.name]}: {one.note}" for one in diagnosis.remedies if one.note}),
        "advice": advice,
        "probable": SURE,
        "not_replayed": "; ".join(one.words for one in catalogue().not_replayed),
        "configured": configured,
        "pasted": of_framework or configured[:SOME_FRAMEWORKS],
        "normal": [(row, cell(quantity(measured, row.of))) for row in sizes().normal] if measured.tokens else [],
        "bands": sizes().bands,
        "k3": quantity(measured, "k3").mean,
        "meanwhile_word": "Until then" if advice.kind == "fix" else "With",
        "remedy_words": _remedy_words(advice),
        "lag_words": lag_words(diagnosis.lags),
        "beyond": BEYOND,
        "lacking": [words for name, words in optional_columns().items() if name not in measured.has],
    }


def _floor(measured: Measured, name: str) -> str:
    """The same quantity of the trainer against itself; empty if the log has none."""
    return f"{quantity(measured.floor, name).mean:.3g}" if measured.floor and measured.floor.tokens else ""


def _metrics(measured: Measured) -> dict[str, list[tuple[Named, str]]]:
    """Each framework's metrics with their noise floors."""
    found: dict[str, list[tuple[Named, str]]] = {}
    for one in named_metrics(measured):
        found.setdefault(one.framework, []).append((one, _floor(measured, one.of)))
    return found
