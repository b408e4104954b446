"""Jobs on a machine that pretends to have GPUs: each runs on its own, as many at once as there are."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases_fixture import rest_long
from study_fixture import copy_workflow

# In place of the real command: real jobs, whose training notes its GPUs and does nothing else, not even import torch.
TAILRL = f"""#!{sys.executable}
import json, os, signal, sys, time, types
from pathlib import Path

folder, at_once = Path(os.environ["NOTES"]), int(os.environ["AT_ONCE"])

def note(**values):
    with (folder / "notes").open("a") as file:
        file.write(json.dumps(values) + "\\n")

def train(run, seed, policy, problems, out, wandb):
    note(what="start", seed=seed, gpus=os.environ["CUDA_VISIBLE_DEVICES"])
    (folder / f"{{seed}}").touch()
    end = time.monotonic() + 60
    while len(list(folder.glob("[01]"))) < at_once and time.monotonic() < end:
        time.sleep(0.01)
    killed = folder / "killed"
    if at_once == 1 and not killed.exists():
        killed.touch()
        note(what="end", seed=seed)
        os.kill(os.getpid(), signal.SIGKILL)
    (out / "policy").mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "tokens.npz", "run.json", "manifest.json"):
        (out / name).touch()
    note(what="end", seed=seed)

data = Path("results/changed/data")
match sys.argv[2]:
    case "problems":
        data.mkdir(parents=True, exist_ok=True)
        for name in ("train.jsonl", "evaluation.jsonl", "warm_start.jsonl", "problems.json", "manifest.json"):
            (data / name).touch()
    case "policy":
        (data.parent / "base").mkdir()
    case _:
        nothing = lambda *given: None
        sys.modules["tailrl.training.loop"] = types.SimpleNamespace(train=train)
        sys.modules["tailrl.planning.fits"] = types.SimpleNamespace(check_training=nothing)
        sys.modules["tailrl.evaluation.model_card"] = types.SimpleNamespace(write_card=nothing)
        from tailrl.cli import main
        main()
"""


@pytest.mark.slow  # `unit/runtime/test_devices.py`
@pytest.mark.parametrize("case", rest_long([("4", "")], [("3,5", ""), ("4", ""), ("0,1", "1234")], " ".join))
def test_each_job_has_a_gpu_of_its_own(tmp_path: Path, case: tuple[str, str]) -> None:
    """With two GPUs two jobs run at once, one on each; with one they wait, also for a job that is killed."""
    gpus, allocation = case
    workflow = copy_workflow(tmp_path / "study")
    command, devices = tmp_path / "bin" / "tailrl", gpus.split(",")
    command.parent.mkdir()
    command.write_text(TAILRL)
    command.chmod(0o755)
    environment = workflow.environment() | {"CUDA_VISIBLE_DEVICES": gpus, "TMPDIR": str(tmp_path)}
    environment |= {"PATH": f"{command.parent}{os.pathsep}{workflow.environment()['PATH']}"}
    environment |= {"NOTES": str(tmp_path), "AT_ONCE": str(len(devices))}
    environment |= {"SLURM_JOB_ID": allocation} if allocation else {}
    study = workflow.write_study({"name": "changed", "seeds": [0, 1], "arms": {"naive": {}}, "ablations": {}})
    ended = subprocess.run(
        ["snakemake", "--cores", "4", "train_naive", "--configfile", study],
        cwd=workflow.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    notes: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    started = [line["gpus"] for line in notes if line["what"] == "start"]
    if len(devices) == 2:
        assert [line["what"] for line in notes] == ["start", "start", "end", "end"]
        assert sorted(started) == devices
    else:
        assert [line["what"] for line in notes] == ["start", "end"] * 3, "one is killed and started once more"
        assert started == ["4"] * 3
    logs = list(workflow.folder.glob("results/changed/logs/train/naive/*.log"))
    assert len(logs) == 2
    # Snakemake lets no more jobs start than there are GPUs: none had to wait for one.
    assert not [log for log in logs if "waiting for" in log.read_text()]
