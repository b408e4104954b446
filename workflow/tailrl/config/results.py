"""Where each part of a study puts what it makes: no two may put it in one place."""

from collections.abc import Iterable, Iterator

ENDINGS = {
    "arm": (
        *("train/{}", "logs/train/{}", "benchmarks/train/{}", "logs/evaluate/{}.log", "benchmarks/evaluate/{}.jsonl"),
        *("eval/{}.json", "eval/{}.samples.jsonl", "eval/{}.manifest.json", "eval/{}.parts"),
    ),
    "ablation": (
        *(f"ablations/{{}}.{ending}" for ending in ("md", "html", "csv", "svg")),
        *(f"ablations/{{}}_{ending}" for ending in ("claims.csv", "differences.csv")),
        *(f"ablations/{{}}_{ending}" for ending in ("problems.csv.gz", "rewards.csv.gz")),
        "logs/ablation_{}.log",
    ),
    "engine": ("distributions/{}", "logs/distributions/{}.log", "benchmarks/distributions/{}.jsonl"),
}
"""Files and folders below a study's results, by the kind of part that they are named after. None lies in another."""

FOLDERS = {
    *("ablations", "before", "distributions", "eval", "figures", "finished", "gradients", "logs", "pooled", "tables"),
    *("train", "study_file"),
}
"""Folders of a study's results, which no part of it may be called."""

SHARED = (
    *(f"distributions/{name}.csv" for name in ("distributions", "safe_sets", "probability", "histograms")),
    *(f"distributions/{name}.csv" for name in ("signature", "claims", "flips_by_layer", "flips_by_margin")),
    *("distributions/flips_by_problem.csv.gz", "distributions/equal_mass.csv"),
    *(f"distributions/distributions.{ending}" for ending in ("md", "html", "svg")),
)
"""Those beside them that no part names."""


def whole_and_part(study: str) -> tuple[str, str]:
    """A study's name as that of the whole and that of the part: `causes/1` is part 1 of `causes`; else no part."""
    whole, _, part = study.partition("/")
    return whole, part


def places(kind: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each place that parts of a kind use, below the study's results, with the part's name."""
    for name in names:
        for place in ENDINGS[kind]:
            yield place.format(name), name


def collision(parts: Iterable[tuple[str, str, Iterable[str]]]) -> str | None:
    """A sentence that names two parts which would use one place; None where there are none.

    Args:
        parts: of each kind its key of `ENDINGS`, the words for one part of it, and the parts' names.
    """
    users = dict.fromkeys(SHARED, "the tables of all engines")
    for kind, words, names in parts:
        for place, name in places(kind, names):
            user = f"{words} {name!r}"
            if users.setdefault(place, user) != user:
                return f"{user} and {users[place]} would both write {place}: give one another name"
    return None
