"""SmolLM2-135M in the paper's arms on one GPU, in calls that go on from one another: curves, tokens a second, phases.

    export PYTHONPATH=workflow:workflow/scripts:benchmarks
    python tests/gpu/gpu_study.py results/gpu_study --seconds 500
    python tests/gpu/gpu_study.py results/gpu_small --small    # our own policy, under a floor
    python tests/gpu/gpu_study.py results/rehearsal --rehearse    # on a CPU, a tiny policy with random weights

What trains is `tailrl job train` with the settings of studies/smollm2.yaml and 200 steps: the engine is transformers in
bfloat16, since vLLM need not be there, the trainer computes in float32 over the fused log-probs; one arm more has it
compute in bfloat16 too, and one more samples with the exact engine, which its own self-test may refuse on a GPU. A call
ends a job that is not finished when its time is up, and ends with 75 itself; the next one goes on from the job's last
checkpoint. Nothing is fetched: the model comes from its package (workflow/scripts/smollm2.py), or from a folder.

With `--small` our own small policy trains for 100 steps at a rate of 1e-4: naive in bfloat16, and with the exact engine
naive, its twin (int4 weights, fp8 cache), and naive, matched control and DVP under a floor of 7 %.

When all arms are finished or refused, `curves.csv` has a row for each arm and step, and `phases.csv` one for each arm:
the medians, over its steps, of tokens a second and of the seconds of each phase.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_runs import byte_tokenizer
from gpu_speed import SMALL as TINY
from shaped import shaped_policy
from table import show

from tailrl.artifacts.metrics import read_steps
from tailrl.config.load import merged, parse_study, read_config, read_study
from tailrl.config.study import Study
from tailrl.model.policy import save_policy
from tailrl.tasks.prepare import write_all_problems
from tailrl.tracking import metrics as keys
from tailrl.training.base_policy import write_base_policy

ROOT = Path(__file__).parents[2]
UNFINISHED = 75  # EX_TEMPFAIL: call again
SEED = 0
TAILRL = (sys.executable, "-c", "from tailrl.cli import main; main()", "job")

ENGINE = {"sampler": {"engine": "transformers"}}
SAFE = {"vocabulary": {"rule": "min_p", "rho": "e-13"}}
MIS = {"correction": {"sequence": "mis", "sequence_threshold": 2.0, "veto": 1e-4}}
EXACT = {"engine": "exact", "dtype": "float32"}
FLOOR = {"sampler": EXACT, "disturbance": {"floor": 0.07}}
SMALL: dict[str, dict[str, Any]] = {
    "naive": ENGINE,
    "exact": {"sampler": EXACT},
    "twin": {"sampler": EXACT | {"quantization": "int4", "group_size": 32, "kv_cache_dtype": "fp8_e4m3"}},
    "floor": FLOOR,
    "floor_control": FLOOR | {"disturbance": {"floor": 0.07, "side": "both"}},
    "floor_dvp": FLOOR | {"vocabulary": {"rule": "min_p", "rho": "0.34/V"}},
}
ARMS: dict[str, dict[str, Any]] = {
    "naive": ENGINE,
    "dvp": ENGINE | SAFE,
    "dvp_mis": ENGINE | SAFE | MIS,
    "naive_bfloat16": ENGINE | {"training": {"dtype": "bfloat16"}},
    "exact": {"sampler": EXACT},
}
SIZES = {"steps": 200, "prompts": 16, "token_budget": 8192, "checkpoint_every": 10, "dtype": "float32"}
REHEARSED = {"steps": 3, "prompts": 2, "group_size": 2, "max_new_tokens": 6, "checkpoint_every": 1}
CURVES = (
    *(keys.STEP, keys.REWARD, keys.K3_MASKED, keys.K3_UNMASKED, keys.REJECTED),
    *(keys.ENTROPY, keys.GRADIENT_NORM, keys.LENGTH),
)
PHASES = (*keys.PHASES, "step")


def small_study() -> Study:
    """The arms of SMALL with all else as in the first part of studies/causes.yaml."""
    base = read_study(ROOT / "studies/causes.yaml").each()["causes/1"].model_dump(exclude_unset=True)
    return parse_study({**base, "name": "gpu_small", "arms": SMALL})


def study_of(policy: Path, rehearse: bool) -> Study:
    """The study that is trained; a rehearsal has one arm and hardly any steps."""
    base = read_config(ROOT / "studies/smollm2.yaml")
    arms = {"dvp_mis": ARMS["dvp_mis"]} if rehearse else ARMS
    changes = {"name": "gpu_study", "policy": {"path": str(policy)}, "training": REHEARSED if rehearse else SIZES}
    return parse_study(merged({**base, "arms": arms}, changes))


def prepare(study: Study, out: Path) -> None:
    """The problems and the base policy, as the workflow's first two jobs make them; nothing where they are there."""
    if not (out / "data").is_dir():
        write_all_problems(study.problems(), out / "data")
    if not (out / "base").is_dir():
        write_base_policy(study.policy, out / "data/warm_start.jsonl", out / "base")


def train(study: Study, arm: str, out: Path, until: float) -> bool | None:
    """One arm's job, ended when the time is up; whether it is finished, None where it refused to run."""
    folder = out / arm
    if (folder / "run.json").is_file():
        return True
    if (folder / "refused").is_file():
        return None
    arguments = {
        "--settings": study.run(arm).model_dump_json(),
        "--seed": SEED,
        "--policy": out / "base",
        "--problems": out / "data/train.jsonl",
        "--out": folder,
        "--wandb": out,
    }
    job = subprocess.Popen([*TAILRL, "train", *(str(part) for pair in arguments.items() for part in pair)])
    try:
        code = job.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        job.terminate()
        job.wait()
        return False
    if code == 1:  # it has said why, and would say so again
        (folder / "refused").touch()
        return None
    return code == 0


def steps_of(folder: Path) -> list[dict[str, float]]:
    """Those of a finished job, a record a step, without the values that were not finite."""
    return [{key: value for key, value in step.items() if value is not None} for step in read_steps(folder)]


def write_curves(runs: Mapping[str, Sequence[Mapping[str, float]]], file: Path) -> None:
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(["arm", *CURVES])
        for arm, steps in runs.items():
            writer.writerows([arm, *(step.get(name) for name in CURVES)] for step in steps)


def phases(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, object]]:
    """A row for each arm: medians over its steps but the first, which compiles and fills caches."""
    rows: list[dict[str, object]] = []
    for arm, steps in runs.items():
        later = steps[1:] or steps

        def median(name: str, later: Sequence[Mapping[str, float]] = later) -> float:
            return round(statistics.median(step[name] for step in later), 4)

        speed = {"tokens_per_second": median(keys.TOKENS_PER_SECOND)}
        rows.append(
            {
                "arm": arm,
                "steps": len(steps),
                **speed,
                **{name: median(keys.in_group(keys.TIME, name)) for name in PHASES},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="where jobs and tables lie, from call to call")
    parser.add_argument("--seconds", type=float, default=500, help="of this call, after which a job is ended")
    parser.add_argument("--policy", type=Path, help="a Hugging Face folder; without it the package's model")
    parser.add_argument("--small", action="store_true", help="our own small policy, with a floor")
    parser.add_argument("--rehearse", action="store_true", help="one arm, three steps: a CPU can do it")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    policy = arguments.policy or arguments.out / "model"
    if not (arguments.small or arguments.policy or policy.is_dir()):
        if arguments.rehearse:
            save_policy(shaped_policy(TINY, length=256, end=0), byte_tokenizer(), policy)
        else:
            from smollm2 import save

            save(policy, shots="words")
    study = small_study() if arguments.small else study_of(policy, arguments.rehearse)
    prepare(study, arguments.out)
    states = {arm: train(study, arm, arguments.out, until) for arm in study.arms}
    if False in states.values():
        waiting = [arm for arm, state in states.items() if state is False]
        print(f"not finished: {', '.join(waiting)}; call again", file=sys.stderr)
        sys.exit(UNFINISHED)
    runs = {arm: steps_of(arguments.out / arm) for arm, state in states.items() if state}
    write_curves(runs, arguments.out / "curves.csv")
    show(phases(runs), arguments.out / "phases.csv")


if __name__ == "__main__":
    main()
