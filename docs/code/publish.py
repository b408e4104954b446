"""Publishes studies that have run from a clean tree: `make publish STUDY=moe`, or a part of one, STUDY=causes/1.

Their pages are copied from results/ into docs/results/, and their rows into docs/results/tables. The digest of each
study's file, the pages over the parts of a study, the page of claims and all that `make pages` writes are made anew.
"""

import argparse
import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from findings.lookups import RESULTS, ROOT, settings_of
from tailrl.artifacts.evaluation import Samples
from tailrl.artifacts.published import PAGE, SUMMARY, Rows, has_part, replace_published
from tailrl.artifacts.tables import read_csv, write_csv
from tailrl.config.results import whole_and_part
from tailrl.config.study import Study
from tailrl.reports.overview.all_studies import claims_page
from tailrl.reports.overview.evidence import read_answers
from tailrl.reports.parts.page import write_pooled
from tailrl.runtime.errors import StudyError
from tailrl.stats.intervals import mean_interval
from tailrl.tasks.answers import last_boxed
from tailrl.tasks.loaded import canonical
from tailrl.tasks.problem import read_problems
from tailrl.tasks.scoring import reward_of

TABLES = (
    *("arms", "claims", "collapses", "course", "differences", "evaluation", "first_k3", "flips", "k3_ratios"),
    *("greedy", "greedy_differences", "made_by", "policies"),
    # Scores by problem and rewards by step, with which intervals and collapses can be made again.
    *("problems", "responses", "rewards", "survival", "time", "trained"),
    "figure1",  # scores on the way, of a study that keeps snapshots
)
"""What is published of a study's own tables where it is there."""

OF_FIGURES = ("delta", "kept", "mismatch", "training")
"""The tables behind figures of a study's page; a part's page is published without its figures."""

OF_AN_ABLATION = re.compile(r"(?P<page>.+)_(?P<table>claims|differences|problems|rewards)")
"""Tables of an ablation beside its own, by their file's name."""

PAGES = {"endpoint", "makes", "parts", "pooled"}
"""Settings of a study's pages."""

DIGESTS = "studies.csv"
"""The digest of every published study's settings, which do not change any more."""


def publish(study: str, results: Path, published: Path) -> list[Path]:
    """Puts the rows of a study, or of one of its parts, into the published tables, and its pages into its folder.

    Returns:
        That folder, and that of the page over the study's parts, which is made anew.

    Raises:
        StudyError: the study has no report, or its settings are not those that were published.
    """
    known = digests(published).get(study)
    if known not in (None, digest(study)):
        raise StudyError(
            f"{published / DIGESTS}: {study} was published with other settings; where it has run again with these, "
            "remove its line"
        )
    source, out = results / study, published / study
    if not (source / "summary.md").is_file():
        raise StudyError(f"{source}: no summary.md; `make {whole_and_part(study)[0]}` runs the study")
    for page in (source / f"{SUMMARY}.md", *source.glob("ablations/*.md"), *source.glob("distributions/*.md")):
        target = out / (page.relative_to(source) if page.parent.name == "distributions" else page.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, target)
    whole = settings_of(whole_and_part(study)[0])
    is_part = study in whole.pooled_parts
    tables = tables_of(source, TABLES if is_part else TABLES + OF_FIGURES)
    replace_published(published, study, tables | {"distinct": distinct_answers(source)})
    if not is_part:
        return [out]
    return [out, _pool(whole, published)]


def tables_of(source: Path, names: Sequence[str] = TABLES) -> dict[str, Rows]:
    """The rows of a study's tables of these names, with the page that shows each."""
    placed = [(name, SUMMARY, path) for name in names for path in source.glob(f"tables/{name}.csv*")]
    placed += [(_stem(path), "distributions/distributions", path) for path in source.glob("distributions/*.csv*")]
    for path in source.glob("ablations/*.csv*"):
        beside = OF_AN_ABLATION.fullmatch(_stem(path))
        if beside and path.with_name(f"{beside['page']}.csv").is_file():
            placed.append((beside["table"], beside["page"], path))
        else:
            placed.append(("ablations", _stem(path), path))
    tables: dict[str, Rows] = {}
    for table, page, path in sorted(placed, key=lambda one: (one[1] != SUMMARY, one[1])):
        tables.setdefault(table, []).extend({PAGE: page, **row} for row in read_csv(path))
    return tables


def distinct_answers(source: Path) -> Rows:
    """How many different right answers the samples of a problem have, by arm: the mean over problems.

    Intervals are over seeds; of the untrained policy over problems. No row where a problem has one right answer alone.
    """
    file = source / "data/evaluation.jsonl"
    problems = {problem.id: problem for problem in read_problems(file)} if file.is_file() else {}
    if {problem.compared for problem in problems.values()} != {"initials"}:
        return []
    rows: Rows = []
    for path in sorted((source / "eval").glob("*.samples.jsonl")):
        right_by_seed: dict[int, list[list[str]]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            sample = Samples.model_validate_json(line)
            if sample.step is None:
                answers = [response for response in sample.responses if reward_of(response, problems[sample.id]) == 1]
                boxed = [canonical(last_boxed(response) or "") for response in answers]
                right_by_seed.setdefault(sample.seed, []).append(boxed)
        right, distinct = (
            [[count(boxed) for boxed in seed] for seed in right_by_seed.values()]
            for count in (len, lambda boxed: len(set(boxed)))
        )
        found = mean_interval(distinct[0] if len(distinct) == 1 else [mean_interval(seed).mean for seed in distinct])
        values = {"right": mean_interval([value for seed in right for value in seed]).mean}
        values |= {"distinct_mean": found.mean, "distinct_low": found.low, "distinct_high": found.high}
        rows.append({PAGE: SUMMARY, "arm": path.name.partition(".")[0], **{k: f"{v:.9g}" for k, v in values.items()}})
    return rows


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def _pool(whole: Study, published: Path) -> Path:
    """Make the page over a study's parts anew, and its tables."""
    out = published / whole.name / "pooled"
    out.mkdir(parents=True, exist_ok=True)
    parts = [published / name for name in whole.pooled_parts]
    wanted = whole.pooled.tables if whole.pooled else []
    write_pooled(whole, [part for part in parts if has_part(part, wanted)], out)
    page = out / "pooled.md"
    page.write_text(re.sub(r"^!\[.*\n\n", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE), encoding="utf-8")
    tables = {_stem(path): [{PAGE: "pooled/pooled", **row} for row in read_csv(path)] for path in out.glob("*.csv")}
    replace_published(published, whole.name, tables)
    for path in (*out.glob("*.csv"), *out.glob("*.svg")):  # the site draws the figure
        path.unlink()
    return out


def digest(study: str) -> str:
    """What the study's file says beyond the defaults, whichever file it stands in, as 16 hexadecimal digits.

    A part counts by the name that it had when it was a study of its own. What changes no number does not count.
    """
    settings = settings_of(study).model_dump(mode="json", exclude_defaults=True, exclude=PAGES)
    settings["name"] = settings["name"].replace("/", "_")
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def digests(published: Path) -> dict[str, str]:
    """The digests as published, by study; none where nothing is published."""
    if not (published / DIGESTS).is_file():
        return {}
    return {row["study"]: row["digest"] for row in read_csv(published / DIGESTS, ("study", "digest"))}


def main(words: Sequence[str] | None = None) -> None:
    """Publish the studies that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", nargs="+")
    known = digests(RESULTS)
    for study in parser.parse_args(words).study:
        for folder in publish(study, ROOT / "results", RESULTS):
            print(folder.relative_to(ROOT))
        known[study] = digest(study)
    write_csv(RESULTS / DIGESTS, [{"study": name, "digest": known[name]} for name in sorted(known)])
    (ROOT / "docs/claims.md").write_text(claims_page(read_answers([RESULTS])[1], ROOT / "docs"), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except StudyError as error:
        raise SystemExit(f"tailrl: {error}") from None
