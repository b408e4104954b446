"""Publishes studies that have run from a clean tree: `make publish STUDY=moe`, or a part of one, STUDY=causes/1.

Their files are copied from results/ into docs/results/. The digest of each study's file, the pages over the parts of a
study, the page of claims and all that `make pages` writes are made anew.
"""

import argparse
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from findings.lookups import RESULTS, ROOT, settings_of
from tailrl.artifacts.tables import read_csv, write_csv
from tailrl.config.results import whole_and_part
from tailrl.reports.overview.all_studies import claims_page
from tailrl.reports.overview.evidence import read_answers
from tailrl.reports.parts.page import write_pooled
from tailrl.runtime.errors import StudyError

TABLES = (
    *("arms", "claims", "course", "differences", "evaluation", "first_k3", "flips", "k3_ratios", "policies"),
    "responses",
)
WANTED = (
    "summary.md",
    *(f"tables/{name}.csv" for name in (*TABLES, "survival", "time")),
    # Scores by problem and rewards by step, with which intervals and collapses can be made again.
    *("tables/problems.csv.gz", "tables/rewards.csv.gz", "figures/evaluation.svg", "figures/survival.svg"),
    *("tables/figure1.csv", "figures/figure1.svg"),  # scores on the way, of a study that keeps snapshots
    "ablations/*",
    *(f"distributions/*.{kind}" for kind in ("csv", "csv.gz", "md", "svg")),
)
"""What is published of a study where it is there; no HTML, which holds what the others do."""
OWN_FOLDER = "distributions"
"""Its files keep their folder, since they have names of the study's own files."""
PAGES = {"endpoint", "makes", "parts", "pooled"}
"""Settings of a study's pages."""
DIGESTS = "studies.csv"
"""The digest of every published study's settings, which do not change any more."""


def publish(study: str, results: Path, published: Path) -> list[Path]:
    """Copies the files of a study or of one of its parts into one folder, over those before.

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
    out.mkdir(parents=True, exist_ok=True)
    for path in (path for pattern in WANTED for path in sorted(source.glob(pattern)) if path.suffix != ".html"):
        target = out / OWN_FOLDER if path.parent.name == OWN_FOLDER else out
        target.mkdir(exist_ok=True)
        shutil.copy(path, target)
    whole = settings_of(whole_and_part(study)[0])
    if study not in whole.pooled_parts:
        return [out]
    page = published / whole.name / "pooled"
    page.mkdir(exist_ok=True)
    write_pooled(whole, [folder for name in whole.pooled_parts if (folder := published / name).is_dir()], page)
    return [out, page]


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
