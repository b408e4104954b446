"""Every family of models under the real vLLM, in one process with the trainer: what is measured, refused, and why.

    python benchmarks/model_families.py --out docs/results/families.csv [--older FOLDER ...]

A tiny model with random weights is loaded, handed over twice and sampled in float32, and the trainer scores its tokens.
It is made once before the engine and once after it. `--older` names folders that hold another transformers each: it
reads the policy that was written, and its logits are compared with ours.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from families import PACKED, REFUSED, tiny_config, write_family
from table import write_csv
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrl.config.sampler import SamplerSettings
from tailrl.kernels.packing import pack_batch
from tailrl.model.files import add_older_keys
from tailrl.model.forward import head_weight, hidden_states
from tailrl.model.policy import load_policy
from tailrl.objective import kl_estimates
from tailrl.objective.disturbance import UNDISTURBED
from tailrl.rollout import Decoding, make_sampler
from tailrl.rollout.types import Request, Rollout
from tailrl.rollout.vllm.engine import VllmSampler
from tailrl.runtime.errors import StudyError, one_line
from tailrl.training.weight_sync import WeightSync

ORDERS = ("trainer first", "engine first")
LENGTH = 64
ROPE_THETA = 54_321.0  # no library's default

READ = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
with torch.no_grad():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False, use_safetensors=True)
    tokens = torch.arange(3, 43)[None]
    print(json.dumps(model(tokens).logits[0].double().tolist()))
    try:
        print(json.dumps(model.double()(tokens).logits[0].tolist()))
    except RuntimeError:  # a part of it computes in float32 alone
        print("null")
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """One hand-over, sampled and scored: the engine's model, tokens, k3 in nats, the largest |Δ| in nats."""

    served_by: str
    tokens: int
    k3: float
    largest: float


@dataclass(slots=True)
class Family:
    """A family's line: measured or refused, and why; numbers of both orders; largest |Δ logits| by transformers."""

    family: str
    verdict: str
    served_by: str = ""
    tokens: int = 0
    k3: dict[str, float] = field(default_factory=dict)
    largest: float = 0.0
    older: dict[str, str] = field(default_factory=dict)


def write_policy(name: str, folder: Path) -> Path:
    """A tiny model whose distribution has peaks, as a study writes its policies."""
    torch.manual_seed(0)
    config = tiny_config(name)
    rope = getattr(config, "rope_parameters", None) or {}
    for one in [part for part in rope.values() if isinstance(part, dict)] or [rope] * bool(rope):
        one["rope_theta"] = ROPE_THETA
    if getattr(config, "sliding_window", None):
        config.sliding_window = LENGTH  # the most that packed rows take
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.25)
    model.save_pretrained(folder)
    add_older_keys(folder)
    return folder


@torch.no_grad()
def scores(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> np.ndarray:
    """The trainer's log-probs of all sampled tokens, nats, float64 [T]."""
    batch = pack_batch([rollout.prompt_tokens for rollout in rollouts], [rollout.tokens for rollout in rollouts])
    hidden_TH = hidden_states(model, batch.tokens_P, batch.packing)[batch.predict_T]
    logp_TV = (hidden_TH @ head_weight(model).T).double().log_softmax(-1)
    return logp_TV.gather(-1, batch.targets_T[:, None]).squeeze(-1).numpy()


def handed_over(folder: Path, order: str) -> Scored:
    """Load, hand over twice, sample and score; raises StudyError where the project refuses the model."""
    model = load_policy(folder) if order == ORDERS[0] else None
    sampler = make_sampler(SamplerSettings(dtype="float32"), folder, LENGTH, seed=0)
    assert isinstance(sampler, VllmSampler)
    try:
        model = model or load_policy(folder)
        sync = WeightSync(sampler, UNDISTURBED)
        sync(model)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.9)
        sync(model)
        rng = np.random.default_rng(0)
        prompts = [tuple(rng.integers(3, 97, length).tolist()) for length in rng.integers(2, 20, 16)]
        requests = [Request(prompt, seed, 0.0) for seed, prompt in enumerate(prompts)]
        sampler.self_test(requests[:4], Decoding(1.0, 8))
        rollouts = sampler.generate(requests, Decoding(1.0, 24))
        delta_T = scores(model, rollouts) - np.concatenate([rollout.logp_sampler_T for rollout in rollouts])
        runner = sampler.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        k3 = float(np.mean(kl_estimates.k3(delta_T)))
        return Scored(type(runner.get_model()).__name__, len(delta_T), k3, float(np.abs(delta_T).max()))
    finally:
        sampler.llm.llm_engine.engine_core.shutdown()


def read_by(older: Path, folder: Path) -> str:
    """The largest |Δ logits| where another transformers reads the policy; its own words where it cannot.

    In float32; where its bits differ and both compute in float64, in that, since versions order their sums differently.
    """
    older_environment = {**os.environ, "PYTHONPATH": str(older), "HF_HUB_OFFLINE": "1"}
    logits = []
    for environment in (older_environment, {**os.environ}):
        read = subprocess.run(
            [sys.executable, "-c", READ, str(folder)], env=environment, capture_output=True, text=True
        )
        if read.returncode:
            (*_, error) = re.findall(r"^\w*Error: .*", read.stderr, re.MULTILINE)  # advice may follow it
            return f"refused: {one_line(error.partition('. ')[0])}"
        logits.append([json.loads(line) for line in read.stdout.splitlines()[-2:]])
    (single_TV, double_TV), (our_single_TV, our_double_TV) = logits
    if single_TV != our_single_TV and double_TV and our_double_TV:
        single_TV, our_single_TV = double_TV, our_double_TV
    delta_TV = np.array(single_TV) - np.array(our_single_TV)
    return f"{np.abs(delta_TV).max():.1e}"


def measured(name: str, folder: Path, older: Sequence[Path]) -> Family:
    """A family that trains on packed rows, under vLLM in both orders."""
    write_policy(name, folder)
    found = {order: handed_over(folder, order) for order in ORDERS}
    first = found[ORDERS[0]]
    return Family(
        family=name,
        verdict="measured",
        served_by=first.served_by,
        tokens=first.tokens,
        k3={order: scored.k3 for order, scored in found.items()},
        largest=max(scored.largest for scored in found.values()),
        older={path.name: read_by(path, folder) for path in older},
    )


def refused(name: str, folder: Path) -> Family:
    """A family that does not, with the sentence that refuses it."""
    try:
        load_policy(write_family(name, folder))
    except StudyError as error:
        return Family(name, str(error).removeprefix(f"{folder}: "))
    raise StudyError(f"{name} is listed as refused, and was loaded")


def lines(names: Sequence[str], older: Sequence[Path]) -> Iterator[dict[str, object]]:
    """The table's lines, as they are measured."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            row = asdict(measured(name, path, older) if name in PACKED else refused(name, path))
            k3, versions = row.pop("k3"), row.pop("older")
            row["largest"] = f"{row['largest']:.1e}" if k3 else ""
            numbers = {f"k3, {order}": f"{k3[order]:.1e}" if k3 else "" for order in ORDERS}
            yield row | numbers | {f"logits, {path.name}": versions.get(path.name, "") for path in older}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--older", type=Path, nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[*PACKED, *REFUSED])
    arguments = parser.parse_args()
    rows = []
    for row in lines(arguments.only, arguments.older):
        print(row, flush=True)
        rows.append(row)
    write_csv(rows, arguments.out)


if __name__ == "__main__":
    main()
