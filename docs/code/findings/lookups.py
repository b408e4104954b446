"""Numbers of the published studies, as the pages of findings call them.

Results come from docs/results/tables, settings from studies/<study>.yaml. A part of a study is <study>/<part>.
What is not there is one StudyError.
Shares are fractions of 1 inside, and percent or points where they are printed.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from findings.number import Number
from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.published import read_published
from tailrl.config.jobs import Run
from tailrl.config.load import read_study
from tailrl.config.results import whole_and_part
from tailrl.config.sampler import VllmSettings
from tailrl.config.study import BASE_ARM, Study
from tailrl.page_parts.number_text import scientific
from tailrl.reports.overview.evidence import SEARCH, StudyResults, read_shown
from tailrl.runtime.errors import StudyError
from tailrl.stats.intervals import Interval, mean_interval
from tailrl.stats.tests import above_and_below

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs/results"
Row = Mapping[str, str]
Pair = tuple[str, str, str]
"""A study, or a part of one, and two of its arms."""


def score(study: str, arm: str) -> Number:
    """Held-out accuracy of an arm; of `base`, the untrained policy. The interval is over seeds and problems."""
    return _number(_arm(study, arm), "avg", "%")


def gain(study: str, arm: str) -> Number:
    """The score minus that of the untrained policy, in points; its p, where there is one, is by Holm over the arms."""
    return _number(_arm(study, arm), "gain", "points")


def difference(study: str, first: str, second: str) -> Number:
    """The score of one arm minus another's, in points, over seeds and problems."""
    for row in _rows(study, "differences"):
        found = _number(row, "both", "points")
        if (row["first"], row["second"]) == (first, second):
            return found
        if (row["first"], row["second"]) == (second, first):
            return Number(-found.mean, -found.high, -found.low, found.p, "points")
    raise StudyError(f"{_table('differences')}: no row of {study} is of {first} and {second}")


def greedy_difference(study: str, first: str, second: str) -> Number:
    """The greedy score of one arm minus another's, in points, over seeds and problems."""
    return cell(f"{study}/greedy_differences", "difference", "points", first=first, second=second)


def rerun(run: str, first: str, second: str) -> Number:
    """`greedy_difference` of another run of the default study, at this commit."""
    return cell("reruns/reruns", "difference", "points", run=run, first=first, second=second)


def between(study: str, first: str, other: str, second: str) -> Number:
    """`difference`, over problems, of arms of two studies with the same seeds and the same held-out problems."""
    ours, theirs = _correct(study, first), _correct(other, second)
    if ours.keys() != theirs.keys():
        raise StudyError(f"docs/results/{study} and {other}: {first} and {second} have other seeds or problems")
    problems: dict[str, list[float]] = {}
    for (seed, problem), share in ours.items():
        problems.setdefault(problem, []).append(share - theirs[seed, problem])
    found = mean_interval([mean_interval(own).mean for own in problems.values()])
    return Number(found.mean, found.low, found.high, unit="points")


def within_seeds(study: str, first: str, second: str) -> Number:
    """The score of one arm minus another's, in points: the mean over the seeds that both have, paired t."""
    ours, theirs = _by_seed(study, first), _by_seed(study, second)
    found = mean_interval([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
    return Number(found.mean, found.low, found.high, unit="points")


def collapsed(study: str, arm: str) -> str:
    """Collapsed runs, as `9 of 10`."""
    row = next((row for row in _rows(study, "survival") if row["arm"] == arm), None) or _arm(study, arm)
    return f"{_cell(row, 'collapsed', study)} of {_cell(row, 'runs', study)}"


def k3(study: str, arm: str) -> Number:
    """The mean k3 of the full distributions over the run, in nats a token."""
    row = _arm(study, arm)
    if "k3_unmasked_mean" in row:
        return _number(row, "k3_unmasked", "")
    return _trained(study, arm, "k3_unmasked")


def rejected(study: str, arm: str) -> Number:
    """The share of responses that a weight rejects."""
    return replace(_trained(study, arm, "rejected"), unit="share")


def cell(place: str, column: str, unit: str = "", **where: str) -> Number:
    """One cell of a study's only row that fits; with its interval where it has one.

    Args:
        place: the study and the table, as causes/comparisons.
        column: of the cell, or the first part of its name before `_mean`.
        unit: of the number.
        where: what other columns of the row hold; `page` is the ablation of a row of `ablations`.
    """
    study, _, table = place.rpartition("/")
    rows = [row for row in _published(study, table) if all(_fits(row.get(key), value) for key, value in where.items())]
    if len(rows) != 1:
        raise StudyError(f"{_table(table)}: {len(rows)} rows of {study} have {where}")
    if f"{column}_mean" in rows[0]:
        return _number(rows[0], column, unit)
    ends = [float(rows[0][end]) if column == "ratio" else math.nan for end in ("low", "high", "p")]
    return Number(float(_cell(rows[0], column, place)), ends[0], ends[1], ends[2], unit)


def _fits(cell: str | None, wanted: str) -> bool:
    """Whether a cell says so. Tables of before a study had parts name a part with an underscore."""
    return cell in (wanted, wanted.replace("/", "_"))


def course(study: str, arm: str, column: str, tenth: int) -> Number:
    """A metric in one tenth of an arm's runs, counted from 0 or back from -1: the mean over runs."""
    seeds: dict[str, list[float]] = {}
    for row in _published(study, "course"):
        if row["arm"] == arm:
            seeds.setdefault(row["seed"], []).append(float(row[column] or math.nan))
    if not seeds:
        raise StudyError(f"{_table('course')}: no row of {study} is of {arm}")
    return Number(mean_interval([values[tenth] for values in seeds.values()]).mean)


def compared(target: str, family: str) -> list[Number]:
    """The differences of a family over a study's parts, in points: of its lines that count."""
    rows = _published(target, "comparisons")
    found = [row for row in rows if row["family"] == family and row["counts"] == "True"]
    if not found:
        raise StudyError(f"{_table('comparisons')}: no line of {target}, {family}, counts")
    return [_number(row, "difference", "points") for row in found]


def planned_test(target: str, family: str, arm: str, minus: str = "") -> Number:
    """The mean difference over a study's parts, in points, that its plan tests in a family for this arm.

    `minus` says what the arm is compared with, where the family has it more than once.
    """
    where = {"family": family, "arm": arm} | ({"minus": minus} if minus else {})
    return cell(f"{target}/comparisons", "difference", "points", **where)


def equivalence(target: str, family: str, arm: str, minus: str) -> tuple[Number, str, str]:
    """The difference of a planned test with its 90 % interval, the margin, as ±2, and whether the two are level."""
    where = {"family": family, "arm": arm, "minus": minus}
    found = cell(f"{target}/equivalence", "difference", "points", **where)
    (row,) = (row for row in _rows(target, "equivalence") if where.items() <= row.items())
    return found, f"±{100 * float(row['margin']):g}", row["verdict"]


def parts(target: str) -> list[str]:
    """The parts that a page over the parts of a study has, where its intervals are over the seeds of each."""
    measured = {row["part"] for row in _published(target, "measures")}
    return [part for part in planned(target) if any(_fits(name, part) for name in measured)]


def planned(target: str) -> list[str]:
    """All parts of a study that are pooled, those that have not run too."""
    return list(settings_of(target).pooled_parts)


def finished(target: str) -> list[str]:
    """The parts of a study that are published."""
    return [part for part in planned(target) if is_published(part)]


def is_published(study: str) -> bool:
    """Whether its results are there."""
    return bool(_rows(study, "made_by"))


def on_the_way(target: str, arm: str, step: int) -> Number:
    """The held-out score of an arm's policies after so many steps, over the finished parts of a study."""
    means = []
    for part in finished(target):
        means.append(cell(f"{part}/figure1", "avg", arm=arm, step=str(step)).mean)
    found = mean_interval(means)
    return Number(found.mean, found.low, found.high, unit="%")


def along(target: str, arm: str, column: str, tenth: int) -> str:
    """`course` of the finished parts of a study: the smallest to the largest, once if they are printed alike."""
    found = [course(part, arm, column, tenth) for part in finished(target)]
    return " to ".join(dict.fromkeys((smallest(*found).bare, largest(*found).bare)))


def over_parts(target: str, table: str, column: str, arm: str, unit: str = "") -> Number:
    """A metric of an arm in a table of runs: the mean over rows of a part, then over a study's finished parts."""
    means = []
    for part in finished(target):
        own = [float(row[column]) for row in _published(part, table) if row["arm"] == arm]
        means += [mean_interval(own).mean] if own else []
    if not means:
        raise StudyError(f"{_table(table)}: no part of {target} has {arm}")
    return Number(mean_interval(means).mean, unit=unit)


def flips(arm: str, column: str) -> Number:
    """A metric of a mixture's flips, the mean over the arm's runs."""
    own = [float(row[column]) for row in _published("moe", "flips") if row["arm"] == arm]
    return Number(mean_interval(own).mean, unit="share" if column.endswith("fraction") else "")


def claim(study: str, name: str, arms: str = "", seen: str = "") -> Verdict:
    """The only line of a study on a claim (for these arms, and with these words in what was seen)."""
    lines = [line for one in shown() if one.name.partition("/")[0] == study or one.name == study for line in one.claims]
    found = [line for line in lines if line.id == name and line.arms and arms in ("", line.arms) and seen in line.seen]
    if len(found) != 1:
        raise StudyError(f"docs/results/{study}: {len(found)} lines say {name} of {arms or 'its arms'}")
    return found[0]


def speaking(name: str, arms: str) -> list[str]:
    """The published studies with a line on a claim for these arms."""
    return [one.name for one in shown() if any((line.id, line.arms) == (name, arms) for line in one.claims)]


def above_the_bound(studies: Sequence[str], arms: str) -> str:
    """Proposition 4.2's bound in studies that all exceed it: tokens above it, and by how much at most; from and to."""
    seen = [claim(study, "dvp.prop4_2.bound", arms).seen for study in studies]
    found = [re.fullmatch(r"(\d+) of (\d+) .*? by ([\d.]+) %.*", one) for one in seen]
    if not all(found):
        raise StudyError(f"not all of {', '.join(studies)} exceed the bound: {'; '.join(seen)}")
    tokens = [int(one[1]) for one in found if one]
    excess = [float(one[3]) for one in found if one]
    of = found[0][2] if found[0] else ""
    return f"{min(tokens)} to {max(tokens)} of about {of}, by {min(excess)} to {max(excess):.0f} %"


def effect(line: Verdict) -> Number:
    """A claim's effect; the interval is over seeds."""
    unit = "points" if line.unit == "share of samples" else ""
    return Number(line.effect, line.low, line.high, line.p_holm, unit)


def averaged(pairs: Sequence[Pair]) -> Number:
    """The mean over pairs of the score of one arm minus the other's, in points, with an interval and p over pairs.

    A pair counts once, with the mean over its seeds.
    """
    found = _gap(pairs)
    return Number(found.mean, found.low, found.high, 2 * min(above_and_below(found)), "points")


def within(pairs: Sequence[Pair], margin: float) -> Number:
    """`averaged`, with p of two one-sided tests that the mean lies within this margin, in points."""
    found, by = _gap(pairs), margin / 100
    up = Interval(found.mean + by, found.low + by, found.high + by, found.n)
    down = Interval(found.mean - by, found.low - by, found.high - by, found.n)
    p = max(above_and_below(up)[0], above_and_below(down)[1])
    return Number(found.mean, found.low, found.high, p, "points")


def _gap(pairs: Sequence[Pair]) -> Interval:
    def mean(study: str, arm: str) -> float:
        return mean_interval(list(_by_seed(study, arm).values())).mean

    return mean_interval([mean(study, first) - mean(study, second) for study, first, second in pairs])


def in_parts(target: str, first: str, second: str) -> list[Pair]:
    """These two arms in every finished part of a study."""
    return [(part, first, second) for part in finished(target)]


def at_rate(rate: float, first: str, second: str) -> list[Pair]:
    """The two kinds of arm in every published study that has both at this learning rate; a part is a study.

    Kinds: `naive`, and `dvp` at 0.34/V, under vLLM's rounding; `exact`, naive without a mismatch.
    """
    files = [ROOT / "config.yaml", *(ROOT / "studies").glob("*.yaml"), *(ROOT / "studies/search").glob("*.yaml")]
    pairs = []
    for study in sorted(name for file in files for name in read_study(file).each()):
        scored = {row["arm"] for row in _rows(study, "policies")}
        own = {arm: run for arm, run in _runs(study).items() if arm in scored}
        kinds = {_kind(run): arm for arm, run in own.items() if run.training.learning_rate == rate}
        if first in kinds and second in kinds:
            pairs.append((study, kinds[first], kinds[second]))
    return pairs


def _kind(run: Run) -> str:
    """What RLOO and AdamW train on undisturbed samples without weights: `naive`, `dvp` or `exact`; else nothing."""
    usual = run.estimator == "rloo" and not run.clip and not run.correction.weighted and not run.correction.veto
    training = run.training
    usual = usual and training.optimizer == "adamw" and training.dtype != "bfloat16" and not training.routing_replay
    asis = run.disturbance == type(run.disturbance)() and run.vocabulary.rule in ("full", "min_p")
    asis = asis and not run.vocabulary.adapts and run.vocabulary.side == "both" and training.temperature == 1
    sampler = run.sampler
    if not (usual and asis) or sampler.verify or sampler.quantized:
        return ""
    if isinstance(sampler, VllmSettings) and sampler.dtype == "bfloat16":
        return {(): "naive", ("0.34/V",): "dvp"}.get(run.vocabulary.rhos, "")
    return "exact" if sampler.exact and not run.vocabulary.rhos else ""


def over_one_minus_p(study: str, engine: str) -> list[tuple[float, Number, float]]:
    """Each bin of −ln p as (its middle, mean |Δ|, mean |Δ| over 1 − p in the middle), to 20 nats."""
    found = []
    for row in _published(study, "probability"):
        if row["engine"] == engine and row["nats_to"] != "inf":
            middle, size = (float(row["nats_from"]) + float(row["nats_to"])) / 2, _number(row, "size", "")
            found.append((middle, size, size.mean / -math.expm1(-middle)))
    if not found:
        raise StudyError(f"{_table('probability')}: no row of {study} is of {engine}")
    return found


def run_of(study: str, arm: str = "") -> Run:
    """An arm's settings, by default the first arm's."""
    runs = _runs(study)
    if arm and arm not in runs:
        raise StudyError(f"studies/{study}.yaml has no arm {arm}")
    return runs[arm or next(iter(runs))]


def rate(study: str, arm: str = "") -> str:
    """The learning rate, as 1e-4."""
    return scientific(run_of(study, arm).training.learning_rate)


def steps(study: str, arm: str = "") -> int:
    """Training steps of a run."""
    return run_of(study, arm).training.steps


def samples(study: str) -> int:
    """Evaluated samples of a held-out problem."""
    return settings_of(study).evaluation.samples


def floor(study: str, arm: str) -> str:
    """The share of sampled tokens that come from a uniform distribution."""
    return f"{100 * run_of(study, arm).disturbance.floor:g} %"


def seeds(study: str, arm: str) -> int:
    """Runs of an arm."""
    row = _arm(study, arm)
    return int(_cell(row, "avg_n", study))


def runs(study: str) -> int:
    """Runs of a study, or of a part."""
    # An arm can be in an ablation too: it counts once.
    return sum({row["arm"]: int(row["avg_n"]) for row in _scores(study)}.values())


def commits(study: str) -> list[str]:
    """The commits of a study's runs, in seven digits."""
    made_by = _published(study, "made_by")[0]
    return [commit[:7] for commit in re.findall(r"\b[0-9a-f]{40}\b", made_by["commit"])]


def smallest(*numbers: Number | float) -> Number:
    """The one with the smallest mean."""
    return min(map(_as_number, numbers), key=lambda number: number.mean)


def largest(*numbers: Number | float) -> Number:
    """The one with the largest mean."""
    return max(map(_as_number, numbers), key=lambda number: number.mean)


def _as_number(value: Number | float) -> Number:
    return value if isinstance(value, Number) else Number(value)


@cache
def _tables(table: str) -> dict[str, list[dict[str, str]]]:
    return read_published(RESULTS, table)


def _table(table: str) -> str:
    return f"docs/results/tables/{table}"


def _rows(study: str, table: str) -> list[dict[str, str]]:
    """A study's rows, those of its summary first; none where there are none."""
    return _tables(table).get(study, [])


def _published(study: str, table: str) -> list[dict[str, str]]:
    rows = _rows(study, table)
    if not rows:
        raise StudyError(f"{_table(table)} has no row of {study}")
    return rows


def _correct(study: str, arm: str) -> dict[tuple[str, str], float]:
    """An arm's share of right samples by seed and held-out problem, of its last policies."""
    rows = [row for row in _published(study, "problems") if (row["arm"], row["step"]) == (arm, "")]
    if not rows:
        raise StudyError(f"{_table('problems')}: no row of {study} is of {arm}")
    return {(row["seed"], row["problem"]): int(row["correct"]) / int(row["samples"]) for row in rows}


def _by_seed(study: str, arm: str) -> dict[str, float]:
    """Held-out accuracy of an arm, by seed; of `base@0.01` the untrained policy's greedy accuracy."""
    scores = {row["seed"]: float(row["avg_mean"]) for row in _published(study, "policies") if row["arm"] == arm}
    if not scores:
        raise StudyError(f"{_table('policies')}: no row of {study} is of {arm}")
    return scores


def _file(study: str) -> Path:
    """The study's file; of a part, that of its study."""
    name, _ = whole_and_part(study)
    if name == "default":
        return ROOT / "config.yaml"
    return ROOT / "studies" / f"{name.replace(SEARCH, 'search/') if name.startswith(SEARCH) else name}.yaml"


@cache
def shown() -> list[StudyResults]:
    """The published studies with their claims."""
    return read_shown([RESULTS])


@cache
def settings_of(study: str) -> Study:
    """The study's settings, from its file."""
    whole, parts = _with_parts(_file(study))
    return parts.get(study, whole)


@cache
def _with_parts(file: Path) -> tuple[Study, dict[str, Study]]:
    study = read_study(file)
    return study, study.each()


@cache
def _runs(study: str) -> dict[str, Run]:
    return settings_of(study).runs() if _file(study).is_file() else {}


def _arm(study: str, arm: str) -> Row:
    """The row of an arm's score: among the named arms, in an ablation, or in `policies` for the untrained policy."""
    policies = _rows(study, "policies")
    if not policies:
        raise StudyError(f"no study {study} is published in docs/results")
    rows = [*_scores(study), *(policies[:1] if arm == BASE_ARM else [])]
    row = next((row for row in rows if row["arm"] == arm), None)
    if row is None:
        raise StudyError(f"docs/results/tables: no table has the score of {study}, {arm}")
    return row


def _scores(study: str) -> list[dict[str, str]]:
    """The rows of every trained arm's last policies, those of ablations too."""
    return [*_rows(study, "evaluation"), *_rows(study, "ablations")]


def _cell(row: Row, column: str, where: str) -> str:
    if row.get(column) in (None, ""):
        raise StudyError(f"docs/results/{where}: no {column} for {row.get('arm', 'this row')}")
    return row[column]


def _number(row: Row, name: str, unit: str) -> Number:
    mean, low, high = (float(row[f"{name}_{end}"] or math.nan) for end in ("mean", "low", "high"))
    p = next((row[key] for key in (f"{name}_p_holm", f"{name}_p") if row.get(key)), "nan")
    return Number(mean, low, high, float(p), unit)


def _trained(study: str, arm: str, column: str) -> Number:
    """A mean over an arm's runs, as the summary's table of training has it."""
    row = next((row for row in _published(study, "trained") if row["arm"] == arm), None)
    if row is None:
        raise StudyError(f"{_table('trained')}: no row of {study} is of {arm}")
    return Number(float(_cell(row, f"{column}_mean", study)))


LOOKUPS = [
    one for name, one in list(globals().items()) if getattr(one, "__module__", None) == __name__ and name[0] != "_"
]
"""What a template calls, by the functions' own names: every public one above."""
