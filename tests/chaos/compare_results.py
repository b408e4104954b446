"""Compares what two results folders of one study have computed, to the bit: of two checkouts, say.

    python tests/chaos/compare_results.py BEFORE AFTER

It prints a line for each file. It ends with 1 where a value of BEFORE differs in AFTER or is not there. What AFTER has
besides is listed and is no difference. Of run.json only what the run computes counts (`COMPUTED`).
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from outcome import content, tensors

WEIGHTS, RECORD, MANIFEST = "*.safetensors", "run.json", "manifest.json"
COMPARED = (
    f"base/{WEIGHTS}",
    f"train/*/seed*/policy/{WEIGHTS}",
    "train/*/seed*/tokens.npz",
    "train/*/seed*/metrics.jsonl",
    f"train/*/seed*/{RECORD}",
    "eval/*.json",
    "eval/*.samples.jsonl",
    "data/*.jsonl",
)
"""The files, by their paths in a results folder. BEFORE must have some of each kind."""
COMPUTED = ("sampler_self_test", "stopped")
"""Fields of run.json that a run computes. The others say how, where and from what."""
IGNORED = ("lm_eval_version",)
"""Fields of an evaluation that no policy has a part in."""
SHOWN = 5
"""Differing values that a line names."""


def values(file: Path) -> dict[str, Any]:
    """Every value that a file holds, by its dotted name: a tensor, an array, or a number, text or null as JSON."""
    try:
        if file.suffix == ".safetensors":
            return dict(tensors(file))
        if file.suffix == ".npz":
            arrays = content(file)
            assert isinstance(arrays, dict)
            return arrays
        if file.name == "metrics.jsonl":
            found = content(file)
        else:
            with file.open(encoding="utf-8") as opened:
                found = [json.loads(line) for line in opened] if file.suffix == ".jsonl" else json.load(opened)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        sys.exit(f"{file}: cannot be read: {error}")
    return {name: value for name, value in _flat(found) if name not in IGNORED}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of JSON by their dotted names; a list has its length too, so that a longer one differs."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        yield f"{name}.length" if name else "length", str(len(value))
        for place, inner in enumerate(value):
            yield from _flat(inner, f"{name}.{place}" if name else str(place))
    else:
        yield name, json.dumps(value)  # as text: NaN is equal to itself, and -0.0 is not 0.0


def compare_folders(before: Path, after: Path) -> bool:
    """Prints a line for each file; returns whether all that BEFORE has computed is the same in AFTER."""
    same = True
    for pattern in COMPARED:
        found = ((folder, file) for folder in (before, after) for file in folder.glob(pattern))
        # A manifest has digests of source files, which differ between two commits.
        names = {str(file.relative_to(folder)) for folder, file in found if not file.name.endswith(MANIFEST)}
        if not any((before / name).exists() for name in names):
            sys.exit(f"{before}: holds no {pattern}")
        for name in sorted(names):
            if not (before / name).exists():
                print(f"{name}: only after")
            elif not (after / name).exists():
                print(f"{name}: only before")
                same = False
            else:
                same &= _compare(name, values(before / name), values(after / name))
    return same


def _compare(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Prints where a file differs; returns whether what the run computes is the same."""
    is_record = Path(name).name == RECORD
    differing = [key for key in before if key not in after or before[key] != after[key]]
    added = [key for key in after if key not in before]
    words = [f"differs in {_listed(differing, all_of_them=is_record)}"] if differing else ["same"]
    words += [f"only after: {_listed(added, all_of_them=is_record)}"] if added else []
    print(f"{name}: {'; '.join(words)}")
    return not any(key.partition(".")[0] in COMPUTED for key in differing) if is_record else not differing


def _listed(names: list[str], all_of_them: bool) -> str:
    shown = names if all_of_them else names[:SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if not compare_folders(arguments.before, arguments.after):
        sys.exit("what the runs computed differs")
    print("what the runs computed is the same")


if __name__ == "__main__":
    main()
