"""What a call of Snakemake says at its end: where to look, and what comes next."""

from collections.abc import Iterable, Sequence


def where_to_look(results: str, made: Iterable[str], ablations: Iterable[str], options: str | None) -> str:
    """The sentence after a call that made all it was asked for.

    Args:
        results: the study's folder.
        made: the files that the call was to make, with those that were there.
        ablations: the names of the study's ablations.
        options: what names the study on a command line, such as ` --configfile a.yaml`; empty for the default study;
            None if the call was for all of the study.
    """
    files = set(made)
    first = [f"{results}/report.html", f"{results}/summary.html"]
    texts = [file for file in files if file.endswith(".md") and f"{file.removesuffix('.md')}.html" not in files]
    pages = sorted([*texts, *(file for file in files if file.endswith(".html"))])
    shown = dict.fromkeys(page for page in (*first, *pages) if page in files)
    if options is not None and first[0] not in files:
        following = f"snakemake --cores all{options}"
    elif options is not None and any(f"{results}/ablations/{name}.md" not in files for name in ablations):
        following = f"snakemake --cores all ablations{options}"
    else:
        following = "snakemake --cores 1 overview"
    return f"look at {', '.join(shown) or results}; next: {following}"


def stopped(jobs: Sequence[str]) -> str:
    """The sentence after Ctrl-C, with the messages of the jobs that ran."""
    what = ", ".join(sorted(job.partition("\n")[0] for job in jobs)) or "no job ran"
    return f"stopped: {what}; the same command goes on, training from its last checkpoint"
