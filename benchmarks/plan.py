"""Memory and CPU time of a training step beside what `tailrl plan` says of it, on sizes that it was not fitted on.

    OMP_NUM_THREADS=1 python benchmarks/plan.py --out docs/results/plan.csv

Policies with random weights, which differ in width, depth, vocabulary, batch and lengths, up to 8,192 tokens, make
two steps of RLOO each (the longest makes one), in a process of their own: responses sampled by transformers in float32,
the update, the weights handed over. Memory is the peak of the resident set over that after all imports; time is CPU
seconds of the last step. Of several processes the median counts (`--repeats 1` is the short form). The
machine's throughputs (products as wide as the policy's, with as many rows as a micro-batch has and as there are
sequences; memory; a token's choice) are measured in the same process, and so is what a step takes however small the
policy is. What of the throughputs a step reaches, and what memory the allocator holds besides, are five numbers: two
each for sampling and update, one for memory, solved for from the two policies marked as fitted. The others are
predicted. It fails where the plan is beyond 0.85 to 1.15 of one's memory, or 0.75 to 1.3 of its time.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import lsq_linear
from table import show

from tailrl.config.jobs import Run
from tailrl.config.load import parse_study
from tailrl.kernels.packing import micro_batches, pack_batch
from tailrl.planning.machine import Machine
from tailrl.planning.memory import peak
from tailrl.planning.plan import plan_job
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work

Size = dict[str, int]
COLUMNS = ("hidden", "layers", "vocabulary", "prompts", "group", "prompt", "response", "budget")
SIZES = {
    name: dict(zip(COLUMNS, values, strict=True))
    for name, values in {
        "wide, fitted": (512, 6, 16_384, 4, 8, 24, 48, 1024),
        "deep, fitted": (256, 16, 8192, 4, 8, 32, 40, 1024),
        "middle": (384, 10, 16_384, 4, 8, 20, 56, 1024),
        "flat": (704, 3, 6144, 8, 4, 28, 36, 768),
        "large vocabulary": (256, 6, 49_152, 8, 4, 32, 24, 512),
        "long": (448, 5, 8192, 4, 4, 16, 128, 2048),
        "8,192 tokens": (128, 4, 2048, 1, 2, 64, 8128, 8192),
        "4,096 tokens": (192, 3, 1024, 2, 2, 1024, 3072, 8192),
    }.items()
}
FITTED = ("wide, fitted", "deep, fitted")
TINY = dict(zip(COLUMNS, (64, 1, 512, 2, 2, 8, 8, 1024), strict=True))
STEPS, LONG = 2, 4096
"""Steps of RLOO; of responses longer than LONG one, which takes a minute and a half."""
LIMITS = {"memory_ratio": (0.85, 1.15), "time_ratio": (0.75, 1.3)}


def shape_of(size: Size) -> Shape:
    hidden = size["hidden"]
    heads = hidden // 64
    return Shape(hidden, size["layers"], heads, heads, 64, 3 * hidden, size["vocabulary"], tied=True)


def run_of(size: Size) -> Run:
    names = {"prompts": "prompts", "group_size": "group", "max_new_tokens": "response", "token_budget": "budget"}
    sampler = {"engine": "transformers", "dtype": "float32"}
    training = {key: size[name] for key, name in names.items()}
    policy = {"source": "scratch", "max_length": 256 + size["prompt"] + size["response"]}
    study = {"name": "plan", "policy": policy, "arms": {"naive": {"sampler": sampler}}, "training": training}
    return parse_study(study).run("naive")


def work_of(size: Size) -> Work:
    """The step's work. All responses are equally long: whole ones alone fill a micro-batch."""
    prompts = [(place,) * size["prompt"] for place in range(size["prompts"]) for _ in range(size["group"])]
    batches = micro_batches(prompts, [size["response"]] * len(prompts), size["budget"])
    packed = (pack_batch([prompts[i] for i in batch], [[1] * size["response"]] * len(batch)) for batch in batches)
    return Work(
        prompts=size["prompts"],
        group=size["group"],
        prompt=size["prompt"],
        response=size["response"],
        budget=max(len(batch.tokens_P) for batch in packed),
        longest=size["response"],
    )


# --- measured, in a process of its own -------------------------------------------------------------------


def measured(size: Size) -> dict[str, float]:
    """Peak MiB and CPU seconds of a step, and the machine's throughputs at these sizes."""
    import torch

    import tailrl.rollout.transformers
    import tailrl.training.step  # noqa: F401 - what imports take is no part of a step's memory

    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = _resident_peak()
    take_steps(TINY)
    reserve = _resident_peak() - before
    rollout, update = take_steps(size)[-1]
    highest = _resident_peak() - before
    return {"mib": highest / 2**20, "rollout": rollout, "update": update, "reserve": reserve, **throughputs(size)}


def take_steps(size: Size) -> list[tuple[float, float]]:
    """CPU seconds of sampling and of the rest, of each step of a policy with random weights."""
    import torch
    from shaped import shaped_policy

    from tailrl.model.policy import named_weights
    from tailrl.rollout import Decoding, make_sampler
    from tailrl.rollout.types import Request
    from tailrl.training.optimizer import make_optimizer
    from tailrl.training.samples import Sample
    from tailrl.training.step import update
    from tailrl.training.stopwatch import Stopwatch

    run, shape = run_of(size), shape_of(size)
    # Its end token is never drawn: every response is as long as it may be.
    model = shaped_policy(shape, size["prompt"] + size["response"], end=shape.vocabulary)
    optimizer = make_optimizer(model, run.training)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        sampler = make_sampler(run.sampler, Path(folder), size["prompt"] + size["response"], 0, model)
    sampler.load_weights(named_weights(model))
    seconds: list[tuple[float, float]] = []
    for step in range(1 if size["response"] > LONG else STEPS):
        prompts = torch.randint(2, shape.vocabulary, (size["prompts"], size["prompt"])).tolist()
        requests = [
            Request(tuple(prompt), 1000 * step + size["group"] * place + member)
            for place, prompt in enumerate(prompts)
            for member in range(size["group"])
        ]
        begun = time.process_time()
        rollouts = sampler.generate(requests, Decoding(1.0, size["response"]))
        sampled = time.process_time()
        samples = [
            Sample(rollout, 1.0 if index % 2 else -1.0, request.threshold, request.seed)
            for index, (rollout, request) in enumerate(zip(rollouts, requests, strict=True))
        ]
        update(model, optimizer, samples, run, step, Stopwatch())
        sampler.load_weights(named_weights(model))
        seconds.append((sampled - begun, time.process_time() - sampled))
    return seconds


def throughputs(size: Size) -> dict[str, float]:
    """What the machine does at these widths: fields of `Machine`."""
    import torch

    from tailrl.rollout.sampling import draw

    shape, work = shape_of(size), work_of(size)
    matrix = torch.randn(shape.hidden, shape.intermediate)

    def products(rows: int) -> float:
        inputs = torch.randn(rows, shape.hidden)
        return 2 * inputs.numel() * shape.intermediate / _least(lambda: inputs @ matrix)

    rows = int(work.sequences)
    logits, threshold = torch.randn(rows, shape.vocabulary), torch.zeros(rows, 1)
    drawn = _least(lambda: draw(logits, "full", threshold, range(rows), [0] * rows))
    large, copy = torch.ones(16 * 2**20), torch.empty(16 * 2**20)
    return {
        "matmul": products(work.batch),
        "decode_matmul": products(rows),
        "draw": drawn / logits.numel(),
        "bandwidth": 8 * large.numel() / _least(lambda: copy.copy_(large)),
    }


def _resident_peak() -> int:
    """Bytes of the resident set at its highest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _least(call: Callable[[], object], seconds: float = 0.3) -> float:
    """CPU seconds of a call, the least of those within some time."""
    least, until = float("inf"), time.process_time() + seconds
    while time.process_time() < until:
        begun = time.process_time()
        call()
        least = min(least, time.process_time() - begun)
    return least


# --- predicted -------------------------------------------------------------------------------------------


def machine_of(found: Mapping[str, float], fitted: Mapping[str, float]) -> Machine:
    stated = {name: found[name] for name in ("matmul", "decode_matmul", "draw", "bandwidth", "reserve")}
    return Machine.model_validate({"name": "one core", "gpu": False, **stated, **fitted})


def predicted(size: Size, machine: Machine) -> dict[str, float]:
    """Peak MiB and CPU seconds as the plan has them."""
    shape, run, work = shape_of(size), run_of(size), work_of(size)
    job = plan_job(shape, run, work, machine, 1)
    rollout = job.phases["rollout"].seconds
    return {"mib": peak(job.parts) / 2**20, "rollout": rollout, "update": job.step - rollout}


def fit(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The five numbers at which the plan says of the fitted policies what was measured."""
    bare = {"train_share": 1.0, "passes": 0.0, "decode_share": 1.0, "launch": 0.0, "slack": 1.0}

    def by(quantity: str, changed: dict[str, float]) -> list[float]:
        return [predicted(SIZES[name], machine_of(found[name], bare | changed))[quantity] for name in FITTED]

    def solve(
        quantity: str, one: Sequence[float], other: Sequence[float], rest: Sequence[float], least: float
    ) -> tuple[float, float]:
        """Factors x from `least` and y from 0 at which x one + y other + rest is what was measured, relatively."""
        wanted = np.array([found[name][quantity] for name in FITTED])
        columns, target = np.array([one, other]).T / wanted[:, None], 1 - np.array(rest) / wanted
        x, y = lsq_linear(columns, target, bounds=([least, 0.0], np.inf)).x
        return float(x), float(y)

    def difference(after: Sequence[float], before: Sequence[float]) -> list[float]:
        return [a - b for a, b in zip(after, before, strict=True)]

    fitted: dict[str, float] = {}
    # Products take a time that goes as one over the share of the rate; the others are linear as they stand.
    for quantity, share, linear in (("update", "train_share", "passes"), ("rollout", "decode_share", "launch")):
        plain, halved, more = by(quantity, {}), by(quantity, {share: 0.5}), by(quantity, {linear: 1.0})
        products = difference(halved, plain)
        # At most the whole rate is reached: at least once the products' time passes.
        x, y = solve(quantity, products, difference(more, plain), difference(plain, products), 1.0)
        fitted |= {share: 1 / x, linear: y}
    plain, more = by("mib", {}), by("mib", {"slack": 2.0})
    x, _ = solve("mib", difference(more, plain), [0.0, 0.0], plain, 0.0)
    return fitted | {"slack": 1 + x}


def rows_of(found: Mapping[str, Mapping[str, float]], fitted: Mapping[str, float]) -> list[dict[str, object]]:
    rows = []
    for name, size in SIZES.items():
        machine = machine_of(found[name], fitted)
        plan, seen = predicted(size, machine), found[name]
        seconds, planned = seen["rollout"] + seen["update"], plan["rollout"] + plan["update"]
        rows.append(
            {
                "policy": name,
                **size,
                "parameters": shape_of(size).parameters,
                "mib": round(seen["mib"]),
                "mib_planned": round(plan["mib"]),
                "memory_ratio": round(plan["mib"] / seen["mib"], 3),
                "rollout_cpu_seconds": round(seen["rollout"], 3),
                "rollout_planned": round(plan["rollout"], 3),
                "update_cpu_seconds": round(seen["update"], 3),
                "update_planned": round(plan["update"], 3),
                "time_ratio": round(planned / seconds, 3),
                "gflops": round(seen["matmul"] / 1e9, 1),
                "decode_gflops": round(seen["decode_matmul"] / 1e9, 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write a CSV file")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each policy")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measured(SIZES[arguments.only])))
        return
    found: dict[str, dict[str, float]] = {}
    for name in SIZES:
        command = [sys.executable, __file__, "--only", name]
        runs: list[dict[str, float]] = []
        for _ in range(arguments.repeats):
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            runs.append(json.loads(output.splitlines()[-1]))
        found[name] = {quantity: float(np.median([run[quantity] for run in runs])) for quantity in runs[0]}
    fitted = fit(found)
    print("fitted: " + ", ".join(f"{name} {value:.3g}" for name, value in fitted.items()))
    rows = rows_of(found, fitted)
    show(rows, arguments.out)
    off = [
        f"{row['policy']}: {column} {row[column]}"
        for row in rows
        for column, (least, most) in LIMITS.items()
        if row["policy"] not in FITTED and not least <= float(str(row[column])) <= most
    ]
    if off:
        sys.exit("off: " + "; ".join(off))


if __name__ == "__main__":
    main()
