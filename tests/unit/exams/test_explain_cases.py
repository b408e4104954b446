"""What counts as right when a folder of logs of known cause is explained, and where the prompts are from."""

import json
from pathlib import Path
from typing import Any

import yaml

from exams.explain.cases import CASES, is_near, write_prompts
from tailrl.explanation.catalogue import catalogue

PLANTED: dict[str, dict[str, Any]] = yaml.safe_load(CASES.read_text(encoding="utf-8"))


def test_each_case_names_hypotheses_of_the_catalogue() -> None:
    known = {hypothesis.name for hypothesis in catalogue()}
    named = {
        name for case in PLANTED.values() for side in ("sampler", "trainer", "both") for name in case.get(side, {})
    }
    assert named <= known


def test_an_answer_is_near_with_the_same_hypotheses_and_numbers_within_a_tenth() -> None:
    planted = {"repetition_penalty": 1.1, "log_softmax_16": "bfloat16"}
    assert is_near({"repetition_penalty": 1.18, "log_softmax_16": "bfloat16"}, planted)
    assert not is_near({"repetition_penalty": 1.25, "log_softmax_16": "bfloat16"}, planted)
    assert not is_near({"repetition_penalty": 1.1, "log_softmax_16": "float16"}, planted)
    assert not is_near({"repetition_penalty": 1.1}, planted)
    assert not is_near({**planted, "temperature": 0.9}, planted)
    assert is_near({"begin_doubled": 0.0}, {"begin_doubled": 0})


def test_prompts_are_those_of_the_folder_s_logs_each_once(tmp_path: Path) -> None:
    """A dump of NeMo-RL has whole sequences with a mask."""
    dump = tmp_path / "c01_some_case"
    dump.mkdir()
    rows = []
    for prompt in ([5, 6], [5, 6], [7, 8, 9]):
        ids = [*prompt, 11, 12]
        mask = [0] * len(prompt) + [1, 1]
        numbers = [0.0] * len(prompt) + [-1.0, -2.0]
        row = {"token_ids": [ids], "token_loss_mask": [mask], "sample_loss_mask": [1.0], "input_lengths": [len(ids)]}
        row |= {"generation_logprobs": [numbers], "prev_logprobs": [numbers], "advantages": [[0.0] * len(ids)]}
        rows.append({**row, "rewards": [1.0], "content": ["x"], "idx": 0})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (dump / "train_data_step3.jsonl").write_text(lines, encoding="utf-8")
    file = write_prompts(tmp_path, tmp_path / "made" / "prompts.jsonl")
    written = [json.loads(line)["prompt_ids"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert written == [[5, 6], [7, 8, 9]]
