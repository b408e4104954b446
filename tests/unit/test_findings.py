"""The pages of findings: rendered from the published files, without a result that somebody typed."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from pages_fixture import DOCS, published
from scipy import stats

from blocks import filled
from findings import lookups
from findings.flips import flip_ratios
from findings.pages import TEMPLATES, rendered
from tailrl.artifacts.tables import write_csv
from tailrl.config.load import read_study
from tailrl.runtime.errors import StudyError

ROOT = Path(__file__).parents[2]

LOOKUP = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
NO_TEXT = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|^!\[.*?\]", re.DOTALL | re.MULTILINE)
NAMES = re.compile(
    r"\b(b?float(16|32|64)|SmolLM2-135M|smollm2\w*|[Kk][13]|8-bit|(Proposition|Theorem) \d\.\d)\b|"
    r"\b(C = (2|8|10|100)|0\.34/V)\b|1 ?[−/]"
)
SETTINGS = {
    # Doses, numbers of tokens, limits and formats, where the sentence is about the setting.
    "η = 0.07",
    "noise of 1 nat",
    "k3 of 0.03",
    "k3 of 0.3",
    "responses of 3 tokens",
    "exceeds 2",
    "from 10 tokens on",
    "60 steps, six seeds",
    "within 5 points",
    "within some 20 points",
    "below some 15 points",
    "stays below 0.001",
    "the 90 % interval",
    "p is below 0.05 by Holm",
    "temperature 1",
    "8 or 4 bits",
    "8- and 4-bit",
    "In 16 bits",
    "MIS with C = 10 minus",
    "int4 weights",
    "2 is assumed",
    "some 100,000 times",
    # Sizes of models, tasks and vocabularies.
    "4 layers of 128 with V = 2,048",
    "6 random models with 10 tokens and responses of 3",
    "12 random models with 12 tokens and responses of 3",
    "vocabulary of 150,000",
    "48 of the 100 held-out problems",  # tests/docs/test_numbers.py counts them
    # Formulas and papers.
    "2 ε_max (1 − p)",
    "p ≈ 0.3",
    "p = 2e-9",
    "arXiv 2512.23087",
}
RESULT = re.compile(r"[+−]\d|\d\s*(%|points|nats)|\[[−+\d]|\d\.\d")
LABEL = re.compile(
    r"^(.* |)(3 %|7 %|15 %)( random tokens|)$|C = \d+|0\.34/V|^0\.[68]$|^1\.2$|top-p, 0\.9985|, 9[05] % interval$"
)


@pytest.fixture(scope="module")
def written():
    return rendered()


def test_the_pages_are_those_of_the_published_results(written) -> None:
    """`make pages` writes them anew."""
    pages, _ = written
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert filled(ROOT / "README.md", {"findings": pages["README"].strip()}) == readme
    found = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "findings").glob("*.md")}
    assert found == {name: text for name, text in pages.items() if name != "README"}


def test_every_figure_has_its_numbers_beside_it(written, tmp_path: Path) -> None:
    _, drawings = written
    for name, (rows, _) in drawings.items():
        write_csv(tmp_path / f"{name}.csv", rows)
        assert (tmp_path / f"{name}.csv").read_bytes() == (DOCS / f"figures/{name}.csv").read_bytes(), name
        assert (DOCS / f"figures/{name}.svg").is_file()


def test_every_link_and_figure_of_the_pages_is_there(written) -> None:
    pages, _ = written
    for name, text in pages.items():
        folder = ROOT if name == "README" else DOCS / "findings"
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert (folder / target).exists(), f"{name}: {target}"
    listed = set(re.findall(r"\]\(([^\s/]+)\.md\)", pages["index"]))
    assert listed == {*pages} - {"README", "index"} and "](../claims.md)" in pages["index"]


def typed(text: str) -> list[str]:
    """The numbers of a template that no lookup gives, beside names and settings."""
    literals = [found[1] for lookup in LOOKUP.findall(text) for found in re.finditer(r'"([^"]*)"', lookup)]
    bad = [
        one
        for one in literals
        if RESULT.search(one) and not LABEL.search(one) and not re.search(r"=\d\.\d|^\d\.\d+$", one)
    ]
    prose = NO_TEXT.sub(" ", LOOKUP.sub(" ", text))
    prose = " ".join(prose.split())
    for setting in sorted(SETTINGS, key=len, reverse=True):
        prose = prose.replace(setting, " ")
    return bad + re.findall(r"\S*\d\S*", NAMES.sub(" ", prose))


@pytest.mark.parametrize("template", sorted(TEMPLATES.glob("*.j2")), ids=lambda path: path.name)
def test_no_result_is_typed(template: Path) -> None:
    assert typed(template.read_text(encoding="utf-8")) == []


def test_a_typed_result_is_seen() -> None:
    assert typed("DVP ends 44.6 points above naive") == ["44.6"]
    assert typed('{{ row("DVP minus naive", "+44.6 [+40.3, +49.0]") }}') == ["+44.6 [+40.3, +49.0]"]
    assert typed("9 of 10 runs collapsed at 1e-4") == ["9", "10", "1e-4"]
    assert typed('At {{ rate("collapse") }} naive ends at {{ score("collapse", "naive").bare }}') == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: lookups.score("colapse", "naive"), "no study colapse is published in docs/results"),
        (lambda: lookups.score("collapse", "nave"), "docs/results/tables: no table has the score of collapse, nave"),
        (
            lambda: lookups.difference("collapse", "dvp", "x"),
            "docs/results/tables/differences: no row of collapse is of dvp and x",
        ),
        (lambda: lookups.k3("collapse", "x"), "docs/results/tables: no table has the score of collapse, x"),
        (lambda: lookups.claim("collapse", "x"), "docs/results/collapse: 0 lines say x of its arms"),
        (lambda: lookups.rate("collapse", "x"), "studies/collapse.yaml has no arm x"),
        (
            lambda: lookups.cell("collapse/arms", "arm", arm="x"),
            "docs/results/tables/arms: 0 rows of collapse have {'arm': 'x'}",
        ),
        (lambda: lookups.cell("collapse/x", "arm"), "docs/results/tables/x has no row of collapse"),
        (
            lambda: lookups.compared("causes", "x"),
            "docs/results/tables/comparisons: no line of causes, x, counts",
        ),
        (
            lambda: lookups.course("horizon/1", "x", "k3", 0),
            "docs/results/tables/course: no row of horizon/1 is of x",
        ),
    ],
)
def test_a_wrong_lookup_is_one_sentence(wrong, says: str) -> None:
    with pytest.raises(StudyError, match=f"^{re.escape(says)}"):
        wrong()


def test_a_line_whose_measure_is_far_off_is_not_compared() -> None:
    family = "harm beyond that of the engine"
    rows = published("comparisons", study="causes", family=family)
    near = [float(row["difference_mean"]) for row in rows if row["counts"] == "True"]
    assert 0 < len(near) < len(rows)
    assert [one.mean for one in lookups.compared("causes", family)] == near


def test_lookups_give_what_the_files_say() -> None:
    (row,) = published("differences", study="collapse", first="naive", second="control")
    there, back = lookups.difference("collapse", "naive", "control"), lookups.difference("collapse", "control", "naive")
    assert (there.mean, there.low, there.high) == tuple(float(row[f"both_{end}"]) for end in ("mean", "low", "high"))
    assert (back.mean, back.low, back.high) == (-there.mean, -there.high, -there.low)
    assert str(there) == "−50.1 [−54.7, −45.5]" and there.tested == "−50.1 [−54.7, −45.5], p < 0.001"
    assert lookups.collapsed("collapse", "naive") == "9 of 10"
    assert lookups.collapsed("dose_response", "naive+floor=0.15") == "9 of 10"
    assert lookups.k3("collapse", "naive").bare == "1.7"


def test_two_arms_are_level_where_the_published_scores_say_so() -> None:
    """From each part's scores, with t's quantile of SciPy: the 90 % interval within the margin, and nothing else."""
    said = set()
    for row in published("equivalence"):
        column = "greedy" if row["family"].endswith("greedy") else "avg_mean"
        differences = []
        for part in lookups.finished(row["study"]):
            scores = {one["arm"]: float(one[column]) for one in published("policies", study=part)}
            differences.append(scores[row["arm"]] - scores[row["minus"]])
        mean, n = np.mean(differences), len(differences)
        # Parts that agree do not show how much parts differ.
        spread = np.std(differences, ddof=1) if n > 1 and np.ptp(differences) > 1e-9 else math.nan
        half = stats.t.ppf(0.95, n - 1) * spread / math.sqrt(n)
        place = (row["study"], row["family"], row["arm"], row["minus"])
        found, margin, verdict = lookups.equivalence(*place)
        assert found.mean == pytest.approx(mean, abs=1e-9)
        assert (found.low, found.high) == pytest.approx((mean - half, mean + half), rel=1e-8, abs=1e-9, nan_ok=True)
        limit = 0.02 if row["arm"].startswith(("rounding", "vllm")) else 0.03
        assert margin == f"±{100 * limit:g}" and (verdict == "level") == (abs(mean) + half <= limit)
        assert (verdict == "differs") == (lookups.planned_test(*place).p < 0.05 and abs(mean) > limit)
        said.add(verdict)
    assert said == {"level", "not decided"}


def test_flips_over_warm_starts_are_what_the_parts_tables_say() -> None:
    """Ratios of geometric means, with the SD within policies; the two have as many warm starts each."""
    policies = {
        name: [f"flips/{name}{start}" for start in starts]
        for name, starts in (("", ("base", "seed1", "seed2")), ("short", ("", "_seed1", "_seed2")))
    }
    logs = np.zeros((2, 3))
    for at, parts in enumerate(policies.values()):
        for start, part in enumerate(parts):
            (row,) = published("flips_by_layer", study=part, layer="mean")
            logs[at, start] = math.log(float(row["flip_share_mean"]))
    found = flip_ratios(policies)["short"]
    half = stats.t.ppf(0.975, 4) * math.sqrt(logs.var(axis=1, ddof=1).mean() * 2 / 3)
    expected = logs[1].mean() - logs[0].mean() + np.array([0, -half, half])
    assert (found.mean, found.low, found.high) == pytest.approx(tuple(np.exp(expected)))


def test_a_score_on_the_way_is_no_run() -> None:
    """A table of snapshots has as many problems as rows of scores have runs."""
    assert lookups.runs("horizon/1") == 5
    entropies = [float(row["entropy"]) for row in published("course", study="horizon/1", arm="naive")]
    assert [lookups.course("horizon/1", "naive", "entropy", tenth).mean for tenth in (0, 3, -1)] == [
        *(entropies[0], entropies[3], entropies[9])
    ]


def test_a_difference_between_studies_is_that_within_one() -> None:
    """Both arms of one study: what its own table says, over problems."""
    study, first, second = "smollm2_fp8/1", "fp8_dvp", "fp8_naive"
    found, table = lookups.between(study, first, study, second), f"{study}/differences"
    expected = lookups.cell(table, "problems", "points", first=first, second=second)
    ends = (found.mean, found.low, found.high)
    assert ends == pytest.approx((expected.mean, expected.low, expected.high), rel=1e-6)
    with pytest.raises(StudyError, match="fp8_dvp and naive have other seeds or problems"):
        lookups.between(study, first, "horizon/1", "naive")


def test_a_difference_within_seeds_leaves_out_those_of_one_arm_alone() -> None:
    by_arm = {
        arm: {row["seed"]: float(row["avg_mean"]) for row in published("policies", study="long/500", arm=arm)}
        for arm in ("fp8_mis", "fp8")
    }
    common = sorted(by_arm["fp8_mis"].keys() & by_arm["fp8"].keys())
    assert 1 < len(common) < len(by_arm["fp8"])
    paired = [by_arm["fp8_mis"][seed] - by_arm["fp8"][seed] for seed in common]
    ends = stats.ttest_1samp(paired, 0).confidence_interval(0.95)
    found = lookups.within_seeds("long/500", "fp8_mis", "fp8")
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(paired), ends.low, ends.high))


def test_a_metric_along_the_parts_has_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [lookups.course(f"horizon/{number}", "naive", "entropy", 0).mean for number in (1, 2, 3)]
    assert lookups.along("horizon", "naive", "entropy", 0) == f"{min(parts):.2g} to {max(parts):.2g}"
    monkeypatch.setattr(lookups, "finished", lambda _: ["horizon/2"])
    assert lookups.along("horizon", "naive", "entropy", 0) == f"{parts[1]:.2g}"


def test_a_metric_over_parts_has_one_weight_a_part() -> None:
    means = []
    for part in ("horizon/1", "horizon/2", "horizon/3"):
        own = [float(row["k3"]) for row in published("course", study=part, arm="naive")]
        means.append(sum(own) / len(own))
    found = lookups.over_parts("horizon", "course", "k3", "naive")
    assert found.mean == pytest.approx(sum(means) / len(means), rel=1e-12)
    with pytest.raises(StudyError, match="tables/course: no part of horizon has nobody"):
        lookups.over_parts("horizon", "course", "k3", "nobody")


def test_studies_are_pooled_that_differ_in_the_pruning_alone() -> None:
    """Without those at another rate."""
    pairs = lookups.at_rate(1e-4, "dvp", "naive")
    files = [path for path in (ROOT / "studies").glob("ablate_*.yaml") if path.stem not in NO_PAIR]
    assert len(pairs) == sum(len(read_study(path).each()) for path in files)
    assert [study for study, _, _ in lookups.at_rate(3e-4, "dvp", "naive")] == ["ablate_optimizer"]


def test_rounding_is_pooled_over_all_studies_with_an_exact_arm() -> None:
    """Against SciPy, from each study's scores; a trainer in bfloat16 does not count."""
    pairs = lookups.at_rate(1e-4, "naive", "exact")
    lengths = [f"long/{length}" for length in ("030", "060", "150", "300", "500")]
    assert [study for study, _, _ in pairs] == [
        *("ablate_engine", "acrostic", "default"),
        *(*lengths, "moe", "moe_dense", *lookups.finished("skill_gaps")),
    ]
    assert pairs[-1][1] == "vllm_float32_trainer"
    gaps = []
    for study, *arms in pairs:
        scores = {arm: [float(row["avg_mean"]) for row in published("policies", study=study, arm=arm)] for arm in arms}
        gaps.append(np.mean(scores[arms[0]]) - np.mean(scores[arms[1]]))
    found, test = lookups.averaged(pairs), stats.ttest_1samp(gaps, 0)
    assert (found.mean, found.p) == pytest.approx((np.mean(gaps), test.pvalue))
    assert (found.low, found.high) == pytest.approx(tuple(test.confidence_interval()))
    sides = [stats.ttest_1samp(gaps, by, alternative=to).pvalue for by, to in ((-0.02, "greater"), (0.02, "less"))]
    assert lookups.within(pairs, 2).p == pytest.approx(max(sides))


NO_PAIR = {"ablate_mask_side_floor", "ablate_optimizer", "ablate_reject"}
"""Without DVP under rounding, or at another rate."""
