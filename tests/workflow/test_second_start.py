"""A process with an engine that was killed is started once more by its job; one that named bad input is not."""

import os
import subprocess
from pathlib import Path

import pytest
from study_fixture import Workflow, copy_workflow

# In place of the real one. Its arms fail by their names; every call is noted.
TAILRL = """#!/usr/bin/env bash
shift  # job
arm=$(echo "$@" | grep -o 'train/[a-z]*' | tail -1)
echo "$1/${arm#train/}" >> "$CALLS"
echo "$TAILRL_JOB_SERVER" >> "$CALLS.servers"
calls() { grep -c "$1" "$CALLS"; }
case "$1/$arm" in
  problems/*) mkdir -p results/changed/data && touch results/changed/data/{train,evaluation,warm_start}.jsonl \\
    results/changed/data/{problems,manifest}.json; exit ;;
  policy/*) mkdir -p results/changed/base; exit ;;
  train/train/bad) echo "tailrl: bad input" >&2; exit 1 ;;
  train/train/stopped) exit 143 ;;
  train/train/hung) echo "tailrl: the engine hangs" >&2; exit 70 ;;
  train/train/killed) echo "step" >&2; [ "$(calls train/killed)" -gt 1 ] || kill -KILL $$ ;;
  evaluate/*) [ "$(calls evaluate/killed)" -gt 1 ] || kill -KILL $$
    mkdir -p results/changed/eval && touch results/changed/eval/killed.{json,samples.jsonl,manifest.json}; exit ;;
esac
out=results/changed/train/killed/seed0
mkdir -p $out/policy $out/checkpoints/finished-0 && touch $out/{metrics.jsonl,tokens.npz,run.json,manifest.json}
"""


@pytest.fixture
def workflow(tmp_path: Path) -> Workflow:
    return copy_workflow(tmp_path)


@pytest.mark.slow  # `test_devices.py` has a job that is killed and started once more
def test_what_cannot_succeed_is_not_repeated(workflow: Workflow) -> None:
    folder = workflow.folder
    (folder / "bin").mkdir()
    (folder / "bin" / "tailrl").write_text(TAILRL)
    (folder / "bin" / "tailrl").chmod(0o755)
    environment = workflow.environment()
    environment |= {"PATH": f"{folder / 'bin'}{os.pathsep}{environment['PATH']}", "CALLS": str(folder / "calls")}
    arms = ("bad", "hung", "killed", "stopped")
    study = workflow.write_study({"name": "changed", "seeds": [0], "arms": {arm: {} for arm in arms}, "ablations": {}})
    targets = [f"train_{arm}" for arm in arms]

    def snakemake(*targets: str) -> tuple[int, str]:
        ended = subprocess.run(
            ["snakemake", "--cores", "2", *targets, "--configfile", study],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return ended.returncode, ended.stdout + ended.stderr

    code, output = snakemake(*targets)
    assert code == 1, output
    calls = (folder / "calls").read_text().split()
    assert {arm: calls.count(f"train/{arm}") for arm in arms} == {
        "bad": 1, "hung": 2, "killed": 2, "stopped": 1
    }, output  # fmt: skip
    logs = {arm: (folder / f"results/changed/logs/train/{arm}/seed0.log").read_text() for arm in arms}
    again = "tailrl: the process ended with {} and is started once more\n"
    assert logs["bad"] == "tailrl: bad input\n"
    assert logs["hung"] == "tailrl: the engine hangs\n" + again.format(70) + "tailrl: the engine hangs\n"
    assert logs["killed"] == "step\n" + again.format(137) + "step\n"
    assert "tailrl: bad input" in output, "Snakemake shows the sentence"
    killed, other = (folder / f"results/changed/train/{arm}/seed0" for arm in ("killed", "hung"))
    assert (killed / "metrics.jsonl").is_file()
    assert (killed / "checkpoints/finished-0").is_dir(), "Snakemake has not come to the end of what it was asked for"

    # As its job left it that outlived a Snakemake: nobody has seen its end.
    (other / "checkpoints/finished-0").mkdir(parents=True)
    code, output = snakemake("results/changed/eval/killed.json")
    assert code == 0, output
    assert (folder / "calls").read_text().split().count("evaluate/killed") == 2, output
    assert again.format(137) in (folder / "results/changed/logs/evaluate/killed.log").read_text()
    assert not (killed / "checkpoints").exists()
    assert (other / "checkpoints/finished-0").exists(), "of a run that was not asked for"
    offers = (folder / "calls.servers").read_text().splitlines()
    assert len(set(offers)) == 2 and "" not in offers, "each Snakemake offers a server to all its jobs"
