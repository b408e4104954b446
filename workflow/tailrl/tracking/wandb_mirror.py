"""Weights & Biases, as a mirror of the file that training writes: `python -m tailrl.tracking.wandb_mirror`.

`tracker` starts it beside a training job; it follows metrics.jsonl. A server may be out of reach, be slow or refuse the
key. So W&B never shares a process with training, which waits for this one only at its end, and no longer than
`FINISH_SECONDS`.

Runs are written offline unless WANDB_MODE says otherwise, and `wandb sync` sends them. They are grouped by study and
arm. A run's id ends with a digest of its first step, whose seconds no two runs share: a run that goes on from a
checkpoint keeps its id, and a seed that is trained again is another run.
"""

import json
import math
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from tailrl.artifacts.metrics import follow_metrics
from tailrl.config.jobs import Run
from tailrl.runtime.errors import reason, say
from tailrl.runtime.seeding import derive_seed
from tailrl.tracking.metrics import K3_UNMASKED, REWARD, STEP

# W&B's pages and `wandb leet` order metrics by name: these copies come first.
AT_A_GLANCE = {"At a glance/reward": REWARD, "At a glance/k3": K3_UNMASKED}
FINISH_SECONDS = 60  # that a mirror may take after a job's last step
POLL_SECONDS = 0.5
# Variables WANDB_... by which a sweep or a launched run would replace the name of ours.
OF_ANOTHER_RUN = ("SWEEP_ID", "SWEEP_PARAM_PATH", "LAUNCH", "LAUNCH_CONFIG_PATH", "RUN_ID", "RESUME")


def run_name(record: Mapping[str, Any]) -> str:
    """A unique name of study, arm and seed, in the few characters that W&B accepts."""
    plain = f"{record['study']}-{record['arm']}-seed{record['seed']}"
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in plain)
    return safe if safe == plain else f"{safe}-{derive_seed(plain):08x}"


def start_run(record: Mapping[str, Any], first: Mapping[str, Any], folder: Path) -> Any:
    """Starts a run in W&B: `record` has study, arm, seed and settings, as run.json; `folder` gets `wandb/`."""
    for name in OF_ANOTHER_RUN:
        os.environ.pop(f"WANDB_{name}", None)
    import wandb

    online = os.environ.get("WANDB_MODE") == "online"
    if not online:
        # An offline run cannot be continued: it is written anew, with all steps.
        for earlier in (folder / "wandb").glob(f"offline-run-????????_??????-{run_name(record)}-????????"):
            shutil.rmtree(earlier, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)  # wandb would write elsewhere
    made = Run.model_validate(record["settings"])
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "tailrl"),
        mode="online" if online else "offline",
        dir=folder,
        id=f"{run_name(record)}-{derive_seed(json.dumps(first, sort_keys=True)):08x}",
        resume="allow" if online else None,
        name=f"{record['arm']}-seed{record['seed']}",
        group=f"{record['study']}/{record['arm']}",
        job_type="train",
        tags=[made.arm, made.estimator, f"vocabulary-{made.vocabulary.rule}", f"correction-{made.correction.sequence}"],
        config={**record["settings"], "seed": record["seed"]},
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True),
    )
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    return run


def mirror_run(record: Mapping[str, Any], points: Iterator[Mapping[str, float | None]], folder: Path) -> Any:
    """The run in W&B with all steps, not finished; None without a step. W&B drops those that its server has already.

    `points` are the run's steps from the first one on; null is a value that is not finite.
    """
    first = next(points, None)
    if first is None:
        return None
    run = start_run(record, first, folder)
    for number, point in enumerate(chain([first], points)):
        if number >= run.starting_step:
            copies = {name: point[key] for name, key in AT_A_GLANCE.items() if key in point}
            shown = {**point, **copies}
            run.log({key: math.nan if value is None else value for key, value in shown.items()}, step=number)
    return run


def main() -> None:
    """Mirrors the run that the first line on standard input names, until the second line: the job's exit code."""
    asked = json.loads(sys.stdin.readline())
    codes: list[int] = []

    def ended() -> bool:
        """Whether the job has ended, or was killed (an empty line); waits up to POLL_SECONDS for it."""
        if not codes and select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            codes.append(int(sys.stdin.readline().strip() or 1))
            signal.alarm(FINISH_SECONDS + 1)  # a killed job cannot end this process
        return bool(codes)

    try:
        run = mirror_run(asked["record"], follow_metrics(Path(asked["metrics"]), ended), Path(asked["folder"]))
        if run is not None:
            run.finish(exit_code=codes[0])
    except Exception as error:
        say(f"W&B: {reason(error)}")
        os._exit(1)  # at an ordinary exit wandb would wait for its server


if __name__ == "__main__":
    main()
