"""Result files: those of a small whole study, one of them damaged, with a manifest that vouches for the damage."""

import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from artifacts_fixture import vouch_again
from bad_results import EVALUATION, HOME, METRICS, RUN, STUDY, TOKENS, write_small
from kinds import Case, Kind
from mutations import mutated, mutated_bytes, to_json

from tailrl.artifacts.published import read_published
from tailrl.artifacts.results import read_results
from tailrl.artifacts.tables import write_csv
from tailrl.artifacts.tokens import read_token_arrays
from tailrl.reports import arm_pairs
from tailrl.reports.overview.all_studies import claims_page
from tailrl.reports.overview.evidence import read_answers
from tailrl.reports.overview.summary import summarize
from tailrl.reports.overview.verdicts import judge
from tailrl.reports.scores.numbers import compare_arms, gains_over_base

MANIFESTS = (f"{HOME}/manifest.json", "eval/a.manifest.json")
CLAIMS = "tables/claims.csv"
JSON = (RUN, RUN, METRICS, METRICS, EVALUATION, EVALUATION, *MANIFESTS)
TYPES = ("int8", "int32", "int64", "uint64", "float16", "float32", "float64", "bool", "complex64", "S5", "U5", "M8[s]")


def prepare(folder: Path) -> None:
    write_small(folder)
    published = read_published(Path(__file__).parents[2] / "docs" / "results", "claims")["stress"]
    (folder / "tables").mkdir()
    write_csv(folder / CLAIMS, [{name: row[name] for name in row if name != "page"} for row in published[:5]])


def cases(rng: Random) -> Iterator[Case]:
    """Values of JSON, arrays, and bytes of all files; half of the damaged text is in the middle of its values."""
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        prepare(folder)
        data = {name: (folder / name).read_bytes() for name in {*JSON, TOKENS, CLAIMS}}
    known = {name: _parsed(name, data[name]) for name in JSON}
    with np.load(io.BytesIO(data[TOKENS])) as file:
        arrays = dict(file)
    while True:
        name = rng.choice((*JSON, TOKENS, CLAIMS))
        if name == TOKENS and rng.random() < 0.5:
            yield name, _arrays(arrays, rng)
        elif name in known and rng.random() < 0.7:
            yield name, to_json(mutated(known[name], rng), lines=name == METRICS)
        else:
            yield name, mutated_bytes(data[name], rng)


def _parsed(name: str, data: bytes) -> Any:
    return [json.loads(line) for line in data.splitlines()] if name == METRICS else json.loads(data)


def _arrays(arrays: dict[str, Any], rng: Random) -> bytes:
    """The tokens with an array of another type, length, shape or content, or without one."""
    changed = dict(arrays)
    name = rng.choice(list(changed))
    old = changed.pop(name)
    way = rng.randrange(5)
    with np.errstate(all="ignore"):
        if way == 0:
            changed[name] = old.astype(rng.choice(TYPES))
        elif way == 1:
            changed[name] = rng.choice((old[:1], np.resize(old, 7), old[:0], old[None], np.array(3), old[:, None]))
        elif way == 2:
            changed[name] = np.full(old.shape, rng.choice((np.nan, np.inf, -np.inf, 1e38, -1, 2**31 - 1, 0)))
        elif way == 3:
            changed[_other(name, rng)] = old
    file = io.BytesIO()
    np.savez(file, **changed)
    return file.getvalue()


def _other(name: str, rng: Random) -> str:
    return rng.choice((name.upper(), name + "_", "x", "../x", ""))


def read(folder: Path, name: str) -> None:
    """As a report does, up to its words, and as the page over all studies reads a table of claims."""
    if name == CLAIMS:
        claims_page(read_answers([folder.parent])[1], folder)
        return
    if name not in MANIFESTS:
        vouch_again(folder / name)
    results = read_results(STUDY, folder, STUDY.arms)
    if name == TOKENS:
        read_token_arrays(folder / HOME)
    compared = compare_arms(results, arm_pairs.references(results))
    summarize(STUDY, results, judge(results), gains_over_base(results), compared)


KIND = Kind("results", prepare, cases, read)
