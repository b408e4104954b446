# A study of studies/ by its name: `snakemake stress` is short for `snakemake --configfile studies/stress.yaml stress`.
# Snakemake tells a Snakefile no targets, so its own parser reads the command line again. No name of a study is also that
# of a rule (tests/workflow/test_names.py).
import difflib
import os
import signal
import subprocess
import sys
from pathlib import Path

from snakemake.cli import get_argument_parser
from snakemake.exceptions import WorkflowError

from tailrl.config.study import WILDCARD

# What belongs to the workflow lies beside its Snakefile, wherever Snakemake works: `snakemake -s .../Snakefile -d other`.
home = Path(os.path.relpath(workflow.basedir))
if WILDCARD.search(str(home)):
    raise WorkflowError(
        f"{workflow.basedir}: Snakemake takes braces in the workflow's path for wildcards; start it in that folder, "
        "without --directory, or rename the folder"
    )
STUDIES = {
    file.stem: file
    for folder in (home, Path())
    for file in sorted(folder.glob("studies/*.yaml"))
}
# Studies that are run one after another, in this order, and then compared.
COMPARED = {
    name: members
    for name in ("ablate_domain", "ablate_length")
    if (members := [study for study in STUDIES if study.startswith(f"{name}_")])
}
# A part of a study that stands for the study, where no other is named.
PARTS = {"figure1": "paper"}


def targets_in(words):
    """The targets of a command line, in order: a word behind an option may be its value."""
    return list(get_argument_parser().parse_known_args(words)[0].targets)


def named_in(words, configfiles):
    """The name among the targets that stands for studies, and their names; no name where a file is given."""
    known = {**{study: [study] for study in STUDIES}, **COMPARED}
    names = [word for word in dict.fromkeys(words) if word in known]
    if len(names) > 1:
        raise WorkflowError(
            f"one study a call, not {', '.join(names)}: `make {' '.join(names)}` runs them one after another"
        )
    if names and configfiles not in ([], [STUDIES[known[names[0]][-1]].absolute()]):
        raise WorkflowError(
            f"{names[0]} names a study itself; beside --configfile name a rule, such as all, ablations or train_ARM"
        )
    if not names and not configfiles:
        names = [
            study for part, study in PARTS.items() if part in words and study in STUDIES
        ]
    return (names[0], known[names[0]]) if names else (None, [])


def run_before(study, name):
    """Runs one of the studies that a name stands for in a Snakemake of its own, with the options of this one."""
    words = list(sys.argv[1:])
    for place, word in enumerate(words):
        changed = [*words[:place], study, *words[place + 1 :]]
        # An option's value may be the same word; another target changes the targets.
        if word == name and targets_in(changed) != targets_in(words):
            words = changed
    end = words.index("--") if "--" in words else len(words)
    # The last of two equal options counts. Paths of the first may be of the folder where Snakemake was started.
    words[end:end] = [
        "--snakefile",
        workflow.main_snakefile,
        "--directory",
        os.getcwd(),
    ]
    process = subprocess.Popen([sys.executable, "-m", "snakemake", *words])

    # Ctrl-C reaches both processes, and the other one ends its jobs first.
    def pass_on(number, frame):
        if number == signal.SIGTERM:
            process.terminate()

    before = {
        number: signal.signal(number, pass_on)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    code = process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if code:
        raise WorkflowError(
            f"{study}: its Snakemake ended with {code}; no other study was started"
        )


def suggest(words, rules):
    """A line for each word that is none of the rules, and close to one of them or to a study."""
    known = [*rules, *STUDIES, *COMPARED]
    for word in words:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
        if near and word not in known and not Path(word).exists():
            print(
                f"{word}: there is no such target; did you mean {near[0]}?",
                file=sys.stderr,
            )


targets = targets_in(sys.argv[1:])
named, members = named_in(targets, workflow.configfiles)
for member in members[:-1]:
    run_before(member, named)
if named:
    # The second is what Snakemake hands to jobs in other processes, as on a cluster.
    workflow.configfiles = [STUDIES[members[-1]].absolute()]
    workflow.config_settings.configfiles = workflow.configfiles


# The tables of each part that is finished, here or else published.
def finished_parts(pool):
    folders, tables = [], pool.tables
    for part in pool.parts:
        places = (Path("results", part, "tables"), home / "docs/results" / part)
        folders += [
            place
            for place in places
            if all((place / table).is_file() for table in tables)
        ][:1]
    return [str(folder / table) for folder in folders for table in tables]


def part_options(wildcards, input):
    return [
        f"--part={folder}"
        for folder in dict.fromkeys(Path(path).parent for path in input.tables)
    ]
