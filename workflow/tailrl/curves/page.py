"""What curves say, as a page: HTML in one file without a network, Markdown for a terminal, and plain data for JSON."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

import tailrl
from tailrl import diagnosis
from tailrl.curves.reading import EXACT, MetricReading, Reading, RunReading, shape_words
from tailrl.diagnosis.formats import how_to_log
from tailrl.diagnosis.gate import Judgement, exit_code
from tailrl.diagnosis.metrics import Rule
from tailrl.diagnosis.record import CurvesRecord, RunRecord, gate_records
from tailrl.diagnosis.sizes import LEVELS, limits, sizes
from tailrl.page_parts import TEMPLATES
from tailrl.page_parts.drawing import LAW, MARK, chart, in_page, set_magnitudes
from tailrl.page_parts.markdown import prose
from tailrl.page_parts.number_text import count, short
from tailrl.runtime.templates import renderer

DIAGNOSIS = Path(diagnosis.__file__).parent / "templates"  # its table of sizes
MOST_POINTS = 600  # of a drawn line; a longer one is drawn by the lowest and highest value of each stretch


@dataclass(frozen=True, slots=True)
class Line:
    """A curve as an <svg> element, with dashes at the steps of spikes and of a change; empty without a finite value."""

    title: str
    svg: str


render = renderer((Path(__file__).parent / "templates", DIAGNOSIS, TEMPLATES), count, prose, short)


def curves_html(reading: Reading, judgements: Sequence[Judgement] = ()) -> str:
    """The whole page."""
    lines = [_line(run.main, f"run{number}") for number, run in enumerate(reading.runs)]
    return render("curves.html.j2", title="Curves of a run", lines=lines, judgements=judgements, **_values(reading))


def curves_text(reading: Reading, out: Path | None = None, judgements: Sequence[Judgement] = ()) -> str:
    """The answer in a few lines of Markdown; `out`: where the whole page is."""
    return render("curves.md.j2", out=out or "", judgements=judgements, **_values(reading))


def curves_record(reading: Reading, judgements: Sequence[Judgement] = ()) -> CurvesRecord:
    """The same as data."""
    return CurvesRecord(
        tailrl=tailrl.__version__,
        where=reading.where,
        runs=[
            RunRecord(
                run=run.run,
                metric=run.main.curve.name,
                level=run.main.level,
                k3=run.main.k3,
                shape=run.shape,
                factor=run.main.shape.factor,
                since=run.main.shape.since,
                size=run.band.title if run.band else None,
                verdict=answer(run),
                fits=shape_words().shapes[run.shape].fits,
                excludes=shape_words().shapes[run.shape].excludes,
                rules_broken=[rule.sentence() for _, rule in _broken(run)],
            )
            for run in reading.runs
        ],
        gate=gate_records(judgements),
        exit_code=exit_code(judgements),
    )


def _values(reading: Reading) -> dict[str, object]:
    return {
        "reading": reading,
        "runs": [_run_values(run) for run in reading.runs],
        "bands": sizes().bands,
    }


def _run_values(run: RunReading) -> dict[str, object]:
    words = shape_words()
    shape = words.shapes[run.shape]
    levels = {told.metric.of: short(told.level) for told in (*run.others, run.main)}
    return {
        "run": run,
        "answer": answer(run),
        "since": since(run),
        "shape": shape,
        "fits": [words.causes[name] for name in shape.fits],
        "excluded": [words.causes[name] for name in shape.excludes],
        "broken": _broken(run),
        "logging": how_to_log(run.main.metric.framework),
        "normal": [(one, levels.get(one.of, "")) for one in sizes().normal],
        "table": [(one, one.level) for one in (run.main, *run.others)],
    }


def _broken(run: RunReading) -> list[tuple[MetricReading, Rule]]:
    """The frameworks' rules that a run breaks."""
    return [(one, rule) for one in (run.main, *run.others) for rule, holds in one.rules if not holds]


def answer(run: RunReading) -> str:
    """The first line: how large, by which rule, and what the curve does."""
    main = run.main
    present = main.level
    if math.isnan(present):
        return f"{main.curve.name} has no finite value."
    if main.impossible:
        return f"Nothing can be said: {main.curve.name} is {short(present)}, and such a number is never below 0."
    size = f"{main.curve.name} is {short(present)}"
    if run.band is not None:
        roughly = "" if main.metric.of in EXACT else f", roughly a k3 of {short(main.k3)} nats a token"
        size = f"{LEVELS[run.band.level]}: {size}{roughly}, {run.band.title} ({limits(run.band)})"
    else:
        rules = [f"{rule.sentence()} ({main.metric.framework}'s rule)" for rule, _ in main.rules]
        holds = all(holds for _, holds in main.rules)
        state = ("Not bad", "within") if holds else ("Bad", "beyond")
        size = f"{state[0]}: {size}, {state[1]} {'; '.join(rules)}" if rules else f"{size}; no rule of thumb is known"
    told = f"{size}. {shape_words().shapes[run.shape].says}"
    if math.isnan(main.ended):
        return told
    return f"Bad: {main.curve.name} became NaN or infinite at step {main.ended:g}. Until then: {told}"


def since(run: RunReading) -> str:
    """Since when, and by how much; empty for a curve that keeps its level."""
    shape = run.main.shape
    sentences = []
    if not math.isnan(shape.until):
        times = f"as far as {short(shape.factor)} times that size"
        sentences.append(f"From step {shape.since:g} to step {shape.until:g} it leaves its usual size, {times}.")
    elif not math.isnan(shape.since):
        verb = "Since" if shape.name in ("growth", "rise", "fall") else "At"
        sentences.append(f"{verb} step {shape.since:g}, by a factor of {short(shape.factor)}.")
        before = [step for step in run.restarts if step <= shape.since]
        if shape.name in ("jump", "drop") and before and shape.since - max(before) <= 2:
            sentences.append(f"The log goes back at step {max(before):g}: the run was started again there.")
    if shape.spikes:
        some = ", ".join(f"{step:g}" for step in shape.spikes[:5]) + (", ..." if len(shape.spikes) > 5 else "")
        sentences.append(f"{count(len(shape.spikes), 'spike')}, at step {some}.")
    if not math.isnan(shape.period):
        sentences.append(f"It falls back every {shape.period:g} steps.")
    if run.main.unsound and math.isnan(run.main.ended):
        sentences.append(f"At {count(run.main.unsound, 'step')} the value is NaN or infinite.")
    return " ".join(sentences)


def _line(told: MetricReading, name: str) -> Line:
    title = told.curve.name
    finite_N = np.isfinite(told.curve.value_N)
    step_N, value_N = told.curve.step_N[finite_N], told.curve.value_N[finite_N]
    if not len(value_N):
        return Line(title, "")
    chosen = _drawn(value_N)
    with chart("step") as (figure, plane):
        plane.plot(step_N[chosen], value_N[chosen], color=MARK, linewidth=1.5)
        for step in (*told.shape.spikes, told.shape.since):
            if math.isfinite(step):
                plane.axvline(step, color=LAW, linestyle=(0, (4, 3)), linewidth=1)
        plane.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        set_magnitudes(plane.yaxis, value_N.tolist())
        return Line(title, in_page(figure, name, f"{title} over the steps", {}))


def _drawn(value_N: np.ndarray) -> list[int]:
    """Which points are drawn: all, or the lowest and the highest of each stretch."""
    if len(value_N) <= MOST_POINTS:
        return list(range(len(value_N)))
    chosen: set[int] = set()
    for part in np.array_split(np.arange(len(value_N)), MOST_POINTS // 2):
        chosen |= {int(part[value_N[part].argmin()]), int(part[value_N[part].argmax()])}
    return sorted(chosen)
