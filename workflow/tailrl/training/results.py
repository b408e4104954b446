"""The results of a finished run: written whole beside its checkpoints, then linked to where the rule expects them.

Snakemake deletes the outputs of a job whose end it has not seen. A job whose Snakemake alone is killed goes on, and its
run would be trained twice. Therefore the results have a second name (a hard link, which costs no space) where no rule
looks, and `give` restores them. The Snakefile removes it at the end of a study.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from tailrl.artifacts.manifest import MANIFEST, files_in, write_manifest
from tailrl.artifacts.metrics import metrics_line
from tailrl.artifacts.records import RunRecord, write_record
from tailrl.artifacts.tokens import write_tokens
from tailrl.config.jobs import Run
from tailrl.config.source_files import at_start, job_files
from tailrl.model.policy import save_policy, whole_weights
from tailrl.runtime import distributed
from tailrl.runtime.atomic_files import link, link_tree, sync, whole_folder
from tailrl.runtime.errors import StorageError, reason
from tailrl.runtime.provenance import provenance
from tailrl.training.snapshots import Snapshots, put_snapshots
from tailrl.training.state import RunState


def write_results(
    state: RunState,
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
    seed: int,
    found: Mapping[str, Any],
    folder: Path,
    snapshots: Snapshots,
) -> None:
    """Write `metrics.jsonl`, `tokens.npz`, `run.json`, `policy/`, any `snapshots/`, and their manifest.

    The folder is there whole or not at all. Every rank must call, and the first writes.

    Args:
        state: after the last step.
        tokenizer: saved with the policy.
        run: the arm's settings.
        seed: of the run.
        found: further entries of `run.json`.
        folder: of the results; written whole or not at all, also through a power cut.
        snapshots: of the run.

    Raises:
        StudyError: kept metrics, tokens or snapshots are damaged, or the disk refuses.
    """
    weights = whole_weights(state.model, getattr(torch, run.policy_dtype))
    if not distributed.is_first():
        return
    record = run_record(
        run,
        seed,
        ranks=distributed.count(),
        startup_seconds=round(state.startup_seconds, 3),
        wall_seconds=round(state.wall_seconds, 3),
        resumed_at_steps=state.resumed,
        **found,
    )
    policies = snapshots.checked(state.step)

    def save_policies(aside: Path) -> None:
        save_policy(state.model, tokenizer, aside / "policy", weights)
        if run.training.snapshot_every is not None:
            put_snapshots(policies, aside / "snapshots")

    needed = sum(weight.nbytes for weight in weights.values())
    write_run(folder, run, record, state.metrics.read(), state.tokens.joined(), save_policies, needed)


def run_record(run: Run, seed: int, **entries: Any) -> RunRecord:
    """The record of a run on this machine, with the entries that differ between trainers."""
    return RunRecord(
        study=run.study,
        arm=run.arm,
        seed=seed,
        settings=run.model_dump(mode="json"),
        **provenance(),
        threads=torch.get_num_threads(),
        **entries,
    )


def write_run(
    folder: Path,
    run: Run,
    record: RunRecord,
    metrics: Sequence[Mapping[str, float]],
    tokens: Mapping[str, NDArray[np.generic]],
    save_policies: Callable[[Path], None],
    needed: int,
) -> None:
    """Write the files of a finished run and their manifest: the folder is there whole or not at all.

    Args:
        folder: of the results.
        run: the arm's settings.
        record: what `run.json` holds.
        metrics: of all steps.
        tokens: the arrays of `tokens.npz`.
        save_policies: writes `policy/`, and any `snapshots/`, into a folder.
        needed: bytes of the policies, for the sentence on a full disk.

    Raises:
        StudyError: the disk refuses.
    """
    try:
        with whole_folder(folder, "writing-results") as aside:
            (aside / "metrics.jsonl").write_text("".join(map(metrics_line, metrics)), encoding="utf-8")
            write_tokens(aside, tokens)
            save_policies(aside)
            write_record(aside, record)
            inputs = {name: record.fingerprint[name] for name in ("problems", "base policy")}
            sources = at_start(job_files("train", run))
            write_manifest(aside / MANIFEST, files_in(aside), inputs=inputs, sources=sources, steps=len(metrics))
    except Exception as error:  # OSError, and each library that writes a policy raises its own kind
        needed += sum(array.nbytes for array in tokens.values())
        raise StorageError(
            f"{folder}: the results could not be written ({reason(error)}): they need up to {needed / 1e6:.1f} MB, and "
            f"{shutil.disk_usage(folder.parent).free / 1e6:.1f} MB are free; the checkpoints are kept"
        ) from None


def give(folder: Path, out: Path) -> None:
    """Link results of `write_results` to where a rule expects them, replacing what has these names.

    See `atomic_files.link_tree`.
    """
    for source in sorted(folder.iterdir()):
        target = out / source.name
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        if source.is_dir():
            link_tree(source, target)
        else:
            link(source, target)
    sync(out)
