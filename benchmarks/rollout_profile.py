"""Where the exact engine's time goes, and what its matrix products would take alone, in float32 and in bfloat16.

    export OMP_NUM_THREADS=1 PYTHONPATH=workflow/scripts
    python benchmarks/rollout_profile.py --out docs/results/rollout_profile.csv

On the policies and requests of `rollout.py`. Parts are PyTorch's operators by their own time, in one call that samples.
The last two rows of a policy are its matrix products alone, as many and as large, in one number format each. No engine
in that format can be faster than they are.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import smollm2
import torch
from rollout import BASE, ENGINES, LOADS, Load, make_requests
from table import show
from torch.autograd.profiler_util import EventList
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from tailrl.config.sampler import SamplerSettings
from tailrl.kernels.batch_invariant import rounded_up
from tailrl.model.forward import row_multiple
from tailrl.model.policy import load_policy, named_weights
from tailrl.rollout import Decoding, make_sampler
from tailrl.rollout.kv_cache import SEQUENCES_IN_FLIGHT

PARTS = {
    "matrix products": ("aten::mm", "aten::addmm"),
    "attention": ("aten::bmm", "aten::_softmax"),
    "writing keys and values": ("aten::_index_put_impl_", "aten::index_select"),
}
REST = "all other operators"


def parts(events: EventList) -> dict[str, tuple[int, float]]:
    """Calls and seconds of each part."""
    calls: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    names = {operator: part for part, operators in PARTS.items() for operator in operators}
    for event in events:
        part = names.get(event.key, REST)
        calls[part] += event.count
        seconds[part] += event.self_cpu_time_total / 1e6
    return {part: (calls[part], seconds[part]) for part in (*PARTS, REST)}


def floor(model: PreTrainedModel, rows: int, steps: int, dtype: torch.dtype) -> tuple[int, float]:
    """Calls and seconds of every linear layer and the head, on so many rows, so many times."""
    weights = [module.weight.detach().to(dtype) for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {size: torch.randn(rows, size).to(dtype) for size in {weight.shape[1] for weight in weights}}
    for weight in weights:
        linear(inputs[weight.shape[1]], weight)
    start = time.perf_counter()
    for _ in range(steps):
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)
    return steps * len(weights), time.perf_counter() - start


@torch.inference_mode()
def measure(policy: str, load: Load, folder: Path) -> list[dict[str, object]]:
    """The rows of one policy, all with one thread."""
    load.make_policy(folder)
    model = load_policy(folder)
    requests = make_requests(load, model.config.vocab_size, None)
    decoding = Decoding(1.0, load.new_tokens, "full")
    sampler = make_sampler(SamplerSettings.model_validate(ENGINES[BASE]), folder, load.prompt + load.new_tokens, 0)
    sampler.load_weights(named_weights(model))
    sampler.generate(requests, decoding)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        sampler.generate(requests, decoding)
    found = parts(profiled.key_averages())
    rows = rounded_up(min(len(requests), SEQUENCES_IN_FLIGHT), row_multiple(model))
    steps = load.new_tokens * len(requests) // rows
    for dtype in (torch.float32, torch.bfloat16):
        found[f"products alone, {str(dtype).removeprefix('torch.')}"] = floor(model, rows, steps, dtype)
    return [
        {"policy": policy, "part": part, "calls": calls, "seconds": round(seconds, 3)}
        for part, (calls, seconds) in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write a CSV file")
    arguments = parser.parse_args()
    found: list[dict[str, object]] = []
    for policy, load in LOADS.items():
        if policy != "SmolLM2-135M" or smollm2.is_installed():
            with tempfile.TemporaryDirectory() as folder:
                found += measure(policy, load, Path(folder))
    show(found, arguments.out)


if __name__ == "__main__":
    main()
