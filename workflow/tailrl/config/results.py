"""Names that a study's results leave no room for, since files of other parts have them."""

RESERVED = {
    "arms": (".manifest",),
    "ablations": ("_claims", "_differences"),
    "distributions.engines": (".csv", ".gz", ".md", ".html", ".svg"),
}
"""Endings of names, by the block whose parts are named: an arm `a.manifest` would write the manifest of an arm `a`."""

FOLDERS = {
    *("ablations", "before", "distributions", "eval", "figures", "finished", "gradients", "logs", "pooled", "tables"),
    *("train", "study_file"),
}
"""Folders of a study's results, which no part of it may be called."""


def whole_and_part(study: str) -> tuple[str, str]:
    """A study's name as that of the whole and that of the part: `causes/1` is part 1 of `causes`; else no part."""
    whole, _, part = study.partition("/")
    return whole, part
