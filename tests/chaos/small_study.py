"""The small study that is struck: its settings, its folder, and the commands that start it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from statistics import mean
from typing import Any

import hub
from kills import STARTS
from learning import LEARNS, WARM_START, demand_learning
from study_fixture import Workflow, copy_workflow
from victims import MARK, cpu_seconds, jobs, kill_all

ARMS = ("budget", "difficulty")
"""Between them they have all that a run carries from step to step: weights, moments, weights that a stale engine still
waits for, a threshold that follows the lost mass, and one that follows each problem's rewards."""
EXACT = {"engine": "exact", "dtype": "float32"}
CHANGES: dict[str, Any] = LEARNS | {
    "name": "chaos",
    "seeds": [0],
    "policy": {"source": "pretrained", "path": hub.MODEL},
    "training.steps": 16,
    "training.checkpoint_every": 2,
    "arms": {
        "budget": {
            "vocabulary": {"rule": "min_p", "rho": "1e-2", "adapt": "budget", "budget": 0.1},
            "correction": {"sequence": "mis", "sequence_threshold": 2.0, "veto": 1e-4},
            "disturbance": {"staleness": 1},
            "sampler": EXACT,
        },
        "difficulty": {"vocabulary": {"rule": "min_p", "rho": "1e-3", "adapt": "difficulty", "rho_easy": "5e-2"}},
    },
    "ablations": {},
}
ENGINES: dict[str, dict[str, Any]] = {
    "exact": {"arms.difficulty.sampler": EXACT, "evaluation.sampler": EXACT},
    "twin": {
        "arms.difficulty.sampler": {**EXACT, "quantization": "int8", "kv_cache_dtype": "fp8_e4m3"},
        "evaluation.sampler": EXACT,
    },
    "vllm": {},
    "fp8": {"arms.difficulty.sampler": {"kv_cache_dtype": "fp8_e4m3"}},
    "int8": {"arms.difficulty.sampler": {"quantization": "int8"}},
    "int4": {"arms.difficulty.sampler": {"quantization": "int4", "group_size": 32}},
    "moe": {"arms.difficulty.sampler": {"routes": True}, "arms.difficulty.training": {"routing_replay": True}},
}
"""Changes of the study for each engine: all but exact's are of the second arm. twin: a quantised engine's matched
control; moe: a mixture of experts with routing replay."""
MIXTURE = {"policy.experts": 4, "policy.intermediate_size": 64}
"""Changes of the base policy, where it is a mixture: as many parameters meet a token as in the dense one."""
COMMAND = (
    "snakemake --unlock --configfile {study} && "
    "{{ [ -e downloaded ] || {{ snakemake --cores 2 download --configfile {study} && touch downloaded; }}; }} && "
    "exec snakemake --cores 2 {targets} --configfile {study}"
)
"""As docs/how-to/after-a-crash.md says, after a download. exec: the process that is killed alone is Snakemake."""
TRAINING = tuple(f"train_{arm}" for arm in ARMS)
"""Targets of a study that ends with its training."""


class SmallStudy:
    """A study in a folder of its own."""

    def __init__(self, folder: Path, engine: str, address: str, targets: Sequence[str] = ()) -> None:
        """A new folder with a copy of the workflow.

        Args:
            folder: it must not exist.
            engine: of `ENGINES`; the evaluation is vLLM's in bfloat16, except in the studies exact and twin.
            address: of the hub.
            targets: of Snakemake; none: the whole study.
        """
        folder.mkdir()
        self.folder = folder
        self.address = address
        self.targets = targets
        self.workflow: Workflow = copy_workflow(folder)
        self.study = self.workflow.write_study(CHANGES | ENGINES[engine])
        self.environment: dict[str, str] = {}

    @property
    def results(self) -> Path:
        return self.folder / "results" / "chaos"

    def runs(self) -> list[Path]:
        return [self.results / "train" / arm / "seed0" for arm in ARMS]

    def start(self) -> "subprocess.Popen[bytes]":
        """The one command; its output goes to a file that the next start writes over."""
        environment = self.workflow.environment() | {
            MARK: str(self.folder),
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(self.folder / "hub"),
            "NO_PROXY": "127.0.0.1",
        }
        # Where this is set, every process compiles the copied package again.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with (self.folder / "output").open("wb") as output:
            return subprocess.Popen(
                ["bash", "-c", COMMAND.format(study=self.study, targets=" ".join(self.targets))],
                cwd=self.folder,
                env=environment | self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def begin_anew(self) -> None:
        """Remove everything that a finished study has left; of one that ends with its training, the training alone."""
        if self.targets:
            for left in ("train", "wandb"):
                shutil.rmtree(self.results / left)
            return
        shutil.rmtree(self.results)
        shutil.rmtree(self.folder / "hub")
        (self.folder / "downloaded").unlink()

    def copied(self, folder: Path) -> "SmallStudy":
        """This finished study in a new folder, begun anew, with what Python has compiled and Snakemake has noted."""
        shutil.copytree(self.folder, folder, symlinks=True)
        other = copy(self)
        other.folder, other.workflow = folder, Workflow(folder)
        other.begin_anew()
        return other

    def fail(self) -> None:
        """Ends the script with the study's last words, its own sentence first."""
        words = (self.folder / "output").read_text(errors="replace")
        said = [line.strip() for line in words.splitlines() if line.strip().startswith("tailrl: ")]
        sys.exit(f"the study failed by itself: {said[-1] if said else 'no sentence'}\n{words[-10_000:]}")

    def finish(self) -> dict[str, float]:
        """Let the study come to its end, where its runs must have learned.

        Returns:
            The mean CPU seconds of each stage of a job, and the seconds until the first job, under `kills.STARTS`.
        """
        begun, process = time.monotonic(), self.start()
        first_job: float | None = None
        used: dict[tuple[str, int], list[float]] = {}
        try:
            while process.poll() is None:
                for job in jobs(self.folder):
                    first_job = first_job or time.monotonic() - begun
                    if (cpu := cpu_seconds(job.process)) is not None:
                        used.setdefault((job.stage, job.process), [cpu, cpu])[1] = cpu
                time.sleep(0.1)
        finally:
            kill_all(self.folder)
        if process.returncode:
            self.fail()
        shares = demand_learning(self.results, self.runs())
        print("steps with a gradient:", {run: f"{share:.0%}" for run, share in shares.items()}, flush=True)
        spans = defaultdict(list)
        for (stage, _), (first, last) in used.items():
            # A process that starts is seen when it has used next to nothing.
            spans[stage].append(last - first)
        seconds = {stage: mean(times) for stage, times in spans.items()}
        print(
            "undisturbed, in seconds: " + ", ".join(f"{stage} {cpu:.1f}" for stage, cpu in seconds.items()), flush=True
        )
        print(f"of CPU time; in all {time.monotonic() - begun:.1f} by the clock", flush=True)
        return seconds | {STARTS: first_job or 0.0}


def end_with_the_study() -> None:
    """From now on a signal that ends the script is an exception, so that the study's processes are ended too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def make_base(folder: Path, engine: str) -> Path:
    """Make the model that the hub serves to this engine's study: a policy with its warm start; returns its folder.

    The study that is struck downloads it, so that no warm start has to be waited for in each.
    """
    folder.mkdir()
    workflow = copy_workflow(folder)
    mixture = MIXTURE if engine == "moe" else {}
    study = workflow.write_study(LEARNS | WARM_START | mixture | {"name": "base"})
    made = workflow.run("snakemake", "--cores", "2", "results/base/base", "--configfile", study)
    if made.returncode:
        sys.exit(f"the model for the hub could not be made:\n{(made.stdout + made.stderr)[-10_000:]}")
    served = folder / "served"
    served.mkdir()
    for file in (folder / "results" / "base" / "base").iterdir():
        # As a model on the hub is: without what says how this one was made.
        if file.name not in ("manifest.json", "warm_start.json", ".snakemake_timestamp"):
            os.link(file, served / file.name)
    return served
