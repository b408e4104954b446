"""The mission's own path, cut down for two cores: studies/gpu.yaml through every stage, with the real vLLM.

Data of the published schemas, a chat-templated policy, three arms, AIME25's avg@32 by lm-eval, the report.
"""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from rehearsal_fixture import AIME_PROBLEMS, CUT, GPU, LOCAL, SAMPLES, write_rehearsal
from study_fixture import ROOT, Workflow, copy_workflow

from tailrl.config.load import parse_study

ARMS = ("naive", "dvp", "dvp_mis")
WHOLE, FINISHED = 640, 4  # tokens of the vocabulary, steps
BOXED = re.compile(r"\\boxed\{(\d+)\}(?!.*\\boxed)", re.DOTALL)


def test_the_rehearsal_can_take_every_key_of_the_study(tmp_path: Path) -> None:
    """What is cut is there to be cut; all else, a key that is new too, is rehearsed as it stands."""
    study = yaml.safe_load((ROOT / GPU).read_text(encoding="utf-8"))
    for key in CUT:
        block: Any = study
        for part in key.split("."):
            assert part in block, f"{GPU} has no {key}"
            block = block[part]
    (tmp_path / "studies").mkdir()
    (tmp_path / GPU).write_text((ROOT / GPU).read_text(encoding="utf-8"), encoding="utf-8")
    written = Workflow(tmp_path).write_study(LOCAL | CUT, GPU, "rehearsal.yaml")
    cut = parse_study(yaml.safe_load((tmp_path / written).read_text(encoding="utf-8")))
    assert (tuple(cut.arms), cut.task.name, cut.evaluation.task.name) == (ARMS, "dapo_math", "aime25")
    assert (cut.policy.source, cut.evaluation.samples) == ("pretrained", SAMPLES)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workflow = copy_workflow(tmp_path_factory.mktemp("rehearsal"))
    study = write_rehearsal(workflow)
    ended = workflow.run("snakemake", "--cores", "2", "--configfile", study)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-5000:]
    return workflow.folder / "results" / LOCAL["name"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.vllm
def test_the_data_becomes_problems(results: Path) -> None:
    train, held_out = (lines(results / f"data/{name}.jsonl") for name in ("train", "evaluation"))
    assert len(train) == 50 and len({problem["id"] for problem in train}) == 50, "DAPO-Math repeats its problems"
    assert [problem["id"] for problem in held_out] == [str(number) for number in range(AIME_PROBLEMS)]
    assert all("Answer:" not in problem["prompt"] and "\\boxed{}" in problem["prompt"] for problem in train)
    counts = json.loads((results / "data/problems.json").read_text(encoding="utf-8"))
    assert {(block["removed_because_evaluated"], len(block["skipped"])) for block in counts.values()} == {(0, 0)}


@pytest.mark.slow
@pytest.mark.vllm
def test_every_arm_is_trained_as_the_study_says(results: Path) -> None:
    weights = [(results / "base/model.safetensors").read_bytes()]
    for arm in ARMS:
        folder = results / f"train/{arm}/seed0"
        steps = lines(folder / "metrics.jsonl")
        assert len(steps) == FINISHED and sum(step["train/grad_norm"] for step in steps) > 0
        assert 0 < fmean(step["reward/mean"] for step in steps) < 1
        for step in steps:
            assert step["response/stopped_fraction"] > 0.9, "the policy ends its turn"
            assert 0 < step["rollout_corr_unmasked/k3_kl"] < 0.01, "bfloat16 on both sides"
            kept = step["dvp/kept_vocab_per_token_train"]
            assert kept == WHOLE if arm == "naive" else kept < WHOLE
        training = json.loads((folder / "run.json").read_text(encoding="utf-8"))["settings"]["training"]
        assert (training["dtype"], training["activation_checkpointing"]) == ("bfloat16", True)
        weights += [
            (folder / f"{policy}/model.safetensors").read_bytes() for policy in ("policy", "snapshots/step-00000002")
        ]
    assert len({*weights}) == len(weights)


@pytest.mark.slow
@pytest.mark.vllm
def test_aime25_is_scored_by_lm_eval(results: Path) -> None:
    """Every score anew from the responses, by a rule of the test's own."""
    for arm in ("base", *ARMS):
        record = json.loads((results / f"eval/{arm}.json").read_text(encoding="utf-8"))
        assert (record["task"], record["samples_per_problem"]) == ("aime25", SAMPLES)
        policies = record["policies"] + record.get("snapshots", [])
        assert len(policies) == (1 if arm == "base" else 2)
        samples = lines(results / f"eval/{arm}.samples.jsonl")
        for policy in policies:
            own = [sample for sample in samples if sample.get("step") == policy.get("step")]
            scores = {
                sample["id"]: [
                    int((box := BOXED.search(response)) is not None and int(box[1]) == int(sample["answer"]))
                    for response in sample["responses"]
                ]
                for sample in own
            }
            assert {len(correct) for correct in scores.values()} == {SAMPLES} and len(scores) == AIME_PROBLEMS
            assert {problem["id"]: problem["correct"] for problem in policy["per_problem"]} == scores
            assert policy["avg_at_k"] == pytest.approx(fmean(map(fmean, scores.values())))
            assert 0 < policy["avg_at_k"] < 1
    responses = {(results / f"eval/{arm}.samples.jsonl").read_text(encoding="utf-8") for arm in ("base", *ARMS)}
    assert len(responses) == 1 + len(ARMS), "each evaluation had its own policy"


@pytest.mark.slow
@pytest.mark.vllm
def test_the_report_shows_it(results: Path) -> None:
    summary = (results / "summary.md").read_text(encoding="utf-8")
    table = summary.partition("## Held-out score")[2].partition("\n## ")[0]
    assert f"avg@{SAMPLES}" in table and all(f"| {arm} |" in table for arm in ("base", *ARMS))
    for file in ("summary.html", "figures/figure1.svg"):
        assert (results / file).stat().st_size > 0, file
