"""Two ranks with a real vLLM each, or one together, sample what one process samples, and learn the same from it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases_fixture import rest_long
from moe_fixture import SETTINGS, mixture
from run_fixture import TIMED
from step_fixture import DVP, run_of
from transformers import PreTrainedTokenizerFast

from tailrl.config.sampler import SamplerSettings
from tailrl.model.policy import save_policy
from tailrl.rollout.vllm import quantization
from tailrl.tasks.problem import Problem, write_problems

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TRAIN = """
import sys, zlib
from pathlib import Path
import numpy as np
from tailrl.config.jobs import Run
from tailrl.config.load import parse_settings
from tailrl.training import loop, step

def rewards(rollouts, *_):
    return np.array([zlib.crc32(str(rollout.tokens).encode()) % 2 for rollout in rollouts], dtype=np.float32)

step.rewards = rewards
folder, policy, out = map(Path, sys.argv[1:])
loop.train(parse_settings(Run, str(folder / "run.json")), 5, policy, folder / "problems.jsonl", folder / out, folder)
"""
LAUNCH = "import sys\nfrom tailrl.runtime.launch import launch\nlaunch(2, sys.argv[1:])\n"


ENGINES: dict[str, dict[str, Any]] = {
    "an engine each": {},
    "one engine": {"dtype": "float32", "tensor_parallel": 2},
    "an fp8 cache each": {"kv_cache_dtype": "fp8_e4m3"},
    "int8 each": {"quantization": "int8"},
    "int4 each": {"quantization": "int4", "group_size": 32},
    "experts replayed": {"routes": True},
}
"""What the engine of two ranks has besides its defaults; that of one rank has no `tensor_parallel`."""


@pytest.mark.parametrize("name", rest_long(["one engine"], ENGINES))
def test_two_ranks_sample_as_one(
    tmp_path: Path, policy_folder: Path, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], name: str
) -> None:
    """An engine of their own samples the same to the bit; of one that they share slices add up in another order."""
    if words := quantization.missing_instructions(SamplerSettings.model_validate(ENGINES[name])):
        pytest.skip(words)
    write_problems(problems[:8], tmp_path / "problems.jsonl")
    results: list[tuple[list[dict[str, Any]], dict[str, np.ndarray]]] = []
    replay, together = name == "experts replayed", ENGINES[name].get("tensor_parallel", 1)
    if replay:
        policy_folder = tmp_path / "policy"
        save_policy(mixture(tokenizer), tokenizer, policy_folder)
    for out, launcher, sharing in (("one", [], 1), ("two", [sys.executable, "-c", LAUNCH], together)):
        run = run_of({"vocabulary": DVP}, temperature=1.0, keep_tokens_every=1)
        sampler = run.sampler.model_copy(update=ENGINES[name] | {"tensor_parallel": sharing})
        training = run.training.model_copy(update={"routing_replay": replay})
        run = run.model_copy(
            update={"sampler": sampler, "training": training} | ({"policy": SETTINGS} if replay else {})
        )
        (tmp_path / "run.json").write_text(run.model_dump_json(), encoding="utf-8")
        command = [*launcher, sys.executable, "-c", TRAIN, str(tmp_path), str(policy_folder), out]
        subprocess.run(command, timeout=600, check=True)
        lines = (tmp_path / out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        with np.load(tmp_path / out / "tokens.npz") as arrays:
            results.append(([json.loads(line) for line in lines], dict(arrays)))
    (one, tokens), (two, other_tokens) = results
    # An expert's rows come from the whole micro-batch: with fewer, sums round otherwise, and so do the next weights.
    alike = together == 1 and not replay
    rounding = 1e-9 if alike else 1e-5
    assert [line["train/grad_norm"] > 0 for line in one] == [True] * 3
    for before, after in zip(one, two, strict=True):
        for name, value in before.items():
            if not name.startswith(TIMED):
                assert after[name] == (None if value is None else pytest.approx(value, rel=1e-4, abs=rounding)), name
    if alike:
        assert np.array_equal(tokens["logp_infer"], other_tokens["logp_infer"])
    else:
        assert not np.array_equal(tokens["logp_infer"], other_tokens["logp_infer"]), "two parts round as one whole"
        np.testing.assert_allclose(tokens["logp_infer"], other_tokens["logp_infer"], atol=1e-4, rtol=0)
