"""Snapshots: the policy of every n-th step as a Hugging Face folder, evaluated like the last one.

They lie beside the run's checkpoints, where no rule deletes them. Once the run is finished they are among its results,
`snapshots/step-<steps done>`.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tailrl.artifacts.manifest import MANIFEST, files_in, read_digests, write_manifest
from tailrl.model.policy import save_policy, whole_weights
from tailrl.runtime import distributed
from tailrl.runtime.atomic_files import link_tree, whole_folder
from tailrl.runtime.errors import DataError, StorageError, reason


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The snapshots of one run."""

    folder: Path  # of the run's checkpoints
    name: str  # of the run, which excludes snapshots of a run with other settings
    steps: range  # the numbers of steps done after which a policy is kept
    dtype: torch.dtype  # of the kept policies: `Run.policy_dtype`

    def keep(self, step: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the policy, whole or not at all, if `step` is among `steps`.

        Call it before the step's checkpoint: a run that resumes there has the snapshot. Every rank must call, and the
        first writes.

        Raises:
            StudyError: the disk refuses.
        """
        if step not in self.steps:
            return
        weights = whole_weights(model, self.dtype)
        if not distributed.is_first():
            return
        path = self._path(step)
        try:
            # A run resumed from an earlier checkpoint writes the same policy again.
            with whole_folder(path, "writing-snapshot") as aside:
                save_policy(model, tokenizer, aside, weights)
                write_manifest(aside / MANIFEST, files_in(aside))
        except (OSError, StorageError) as error:
            free = shutil.disk_usage(self.folder).free / 1e6
            raise StorageError(
                f"{path}: the policy after step {step} could not be kept ({reason(error)}): {free:.1f} MB are free"
            ) from None

    def checked(self, done: int) -> dict[int, Path]:
        """The snapshots of a run that ended after `done` steps, by step.

        Raises:
            StudyError: a snapshot is missing, or was changed since it was kept.
        """
        found = {step: self._path(step) for step in self.steps if step <= done}
        for step, path in found.items():
            if not path.is_dir():
                raise StorageError(f"{path}: the policy after step {step} is missing")
            read_digests(path, path)
        return found

    def _path(self, step: int) -> Path:
        return self.folder / f"snapshot-{self.name}-{step:08d}"


def put_snapshots(snapshots: Mapping[int, Path], folder: Path) -> None:
    """Link snapshots into a new folder; raises OSError where the disk refuses."""
    folder.mkdir()
    for step, path in snapshots.items():
        target = folder / f"step-{step:08d}"
        link_tree(path, target)
        (target / MANIFEST).unlink()  # the run's manifest has these files


def read_snapshots(folder: Path) -> list[tuple[int, Path]]:
    """Steps done and folder of each snapshot in a run's results, in the order of steps; hidden files are Snakemake's.

    Raises:
        StudyError: the folder is missing, or holds something else.
    """
    found = []
    try:
        for path in sorted(Path(entry.path) for entry in os.scandir(folder) if not entry.name.startswith(".")):
            prefix, _, step = path.name.partition("-")
            if prefix != "step" or not (step.isascii() and step.isdigit()):
                raise DataError(f"{path}: is no snapshot; a snapshot is named step-<steps done>")
            found.append((int(step), path))
    except OSError as error:
        raise StorageError(f"{folder}: no snapshots could be read from it: {reason(error)}") from None
    return found
