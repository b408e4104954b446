"""The results of a finished run: written whole beside its checkpoints, then given to the rule as hard links.

Snakemake deletes the outputs of a job whose end it has not seen. Trained twice would be every run whose Snakemake was
killed alone, since the job goes on to its end. So the results have a second name where no rule looks, which costs no
space, and `give` puts them back; the Snakefile removes it when Snakemake has come to the end of a study.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from tailrl.config.jobs import Run
from tailrl.model.policy import save_policy, whole_weights
from tailrl.runtime import distributed
from tailrl.runtime.atomic_files import checksum, link, link_tree, sync, whole_folder
from tailrl.runtime.errors import StudyError, reason
from tailrl.runtime.provenance import provenance
from tailrl.tracking.tracker import json_line
from tailrl.training.snapshots import Snapshots
from tailrl.training.state import RunState

CHECKSUMS = "checksums.json"
"""Of the results' files, beside them; no result itself."""


def write_results(
    state: RunState,
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
    seed: int,
    found: dict[str, object],
    folder: Path,
    snapshots: Snapshots,
) -> None:
    """Write `metrics.jsonl`, `tokens.npz`, `run.json` and `policy/` of a run: the folder is there whole, or not at all.

    Where the study has snapshots, `snapshots/` too.

    Every rank must ask, and the first writes.

    Args:
        state: after the last step.
        tokenizer: goes with the policy.
        run: the arm's settings.
        seed: of the run.
        found: what else the record is to hold.
        folder: is made; after a power cut too it holds everything, since all of it is brought to the disk first.
        snapshots: what was kept on the way.

    Raises:
        StudyError: metrics or tokens that were kept are damaged, or the disk refuses.
    """
    weights = whole_weights(state.model)
    if not distributed.is_first():
        return
    record = _record(state, run, seed) | found
    lines = "".join(map(json_line, state.metrics.read()))
    tokens = state.tokens.joined()
    try:
        with whole_folder(folder, "writing-results") as aside:
            (aside / "metrics.jsonl").write_text(lines, encoding="utf-8")
            np.savez_compressed(aside / "tokens.npz", allow_pickle=False, **tokens)
            save_policy(state.model, tokenizer, aside / "policy", weights)
            if run.training.snapshot_every is not None:
                snapshots.put(aside / "snapshots", state.step)
            (aside / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            digests = {str(file.relative_to(aside)): checksum(file) for file in _files(aside)}
            (aside / CHECKSUMS).write_text(json.dumps(digests), encoding="utf-8")
    except Exception as error:  # the system's, and each of those that write a policy has a kind of its own
        needed = sum(weight.nbytes for weight in weights.values()) + sum(array.nbytes for array in tokens.values())
        free = shutil.disk_usage(folder.parent).free
        raise StudyError(
            f"{folder}: the results could not be written ({reason(error)}): they need up to {needed / 1e6:.1f} MB, and "
            f"{free / 1e6:.1f} MB are free; the checkpoints are kept"
        ) from None


def _record(state: RunState, run: Run, seed: int) -> dict[str, object]:
    """What every run writes down about itself."""
    return {
        "study": run.study,
        "arm": run.arm,
        "seed": seed,
        "settings": run.model_dump(mode="json"),
        **provenance(),
        "threads": torch.get_num_threads(),
        "ranks": distributed.count(),
        "startup_seconds": round(state.startup_seconds, 3),
        "wall_seconds": round(state.wall_seconds, 3),
        "resumed_at_steps": state.resumed,
    }


def give(folder: Path, out: Path) -> None:
    """Put results that `write_results` wrote where a rule expects them; what lies there under these names goes.

    The files are the same ones under a second name, see `files.link_tree`.
    """
    for source in sorted(folder.iterdir()):
        if source.name == CHECKSUMS:
            continue
        target = out / source.name
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        if source.is_dir():
            link_tree(source, target)
        else:
            link(source, target)
    sync(out)


def check(folder: Path) -> None:
    """Of results that an earlier process wrote: a file has a second name, by which something may have changed it.

    Raises:
        StudyError: a file is not as it was written.
    """
    try:
        digests = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        names = digests.keys() | {str(file.relative_to(folder)) for file in _files(folder)}
        files = {name: folder / name for name in sorted(names)}
        damaged = [file for name, file in files.items() if not file.exists() or checksum(file) != digests.get(name)]
    except (OSError, ValueError, AttributeError):
        damaged = [folder / CHECKSUMS]
    if damaged:
        raise StudyError(
            f"{damaged[0]}: damaged, and with it the results of a finished run; remove {folder} to train it again"
        )


def _files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != CHECKSUMS]
