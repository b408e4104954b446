"""Seconds of a step at a policy's real sizes, beside vLLM's bare `generate`, TRL and the floor: one row a call.

    python tests/gpu/gpu_speed.py ours --policy Qwen/Qwen3-0.6B --out results/speed.csv
    python tests/gpu/gpu_speed.py ours --policy small --response 8 --prompts 2 --group 2    # a CPU can do it

`ours` trains DVP with MIS, sampled by vLLM in bfloat16, or by the engine that `--engine` names; `bare` has vLLM alone
sample as many requests; `trl` trains RLOO by TRL's own trainer, with vLLM beside it on a GPU. Weights are random, so
that nothing is fetched, and nearly every response runs to its limit. A call measures one of these in its own process,
whose end frees the GPU's memory, and puts its row behind those of the CSV file. Times are medians over the steps but
the first; a reward is made up. The floor is `tailrl plan`'s, of the machine that `--machine` names.
"""

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_runs import PHASES, byte_tokenizer, train
from shaped import shaped_policy
from table import show

from tailrl.config.load import parse_study
from tailrl.model.policy import save_policy
from tailrl.planning.machine import read_machine
from tailrl.planning.plan import plan_job
from tailrl.planning.shapes import KNOWN, Shape
from tailrl.planning.work import work_of
from tailrl.tasks.problem import Problem, write_problems
from tailrl.tracking import metrics as keys

SMALL = Shape(64, 2, 2, 1, 32, 192, 512, tied=True, normed=True)
PROMPT = 200  # tokens: bytes of a problem's text
Row = dict[str, object]


def run_of(options: argparse.Namespace) -> Any:
    """The arm's job: the sizes that were asked for, with as many steps."""
    exact = options.engine == "exact"
    sampler = {"engine": options.engine, "dtype": "float32" if exact else "bfloat16"}
    arm = {
        "sampler": sampler,
        "vocabulary": {"rule": "min_p", "rho": "e-13"},
        "correction": {"sequence": "mis", "sequence_threshold": 2.0},
    }
    training = {
        "steps": options.steps,
        "prompts": options.prompts,
        "group_size": options.group,
        "max_new_tokens": options.response,
        "token_budget": options.budget,
        "dtype": "float32" if exact or not torch.cuda.is_available() else "bfloat16",
        "activation_checkpointing": torch.cuda.is_available(),
        "checkpoint_every": options.steps + 1,
    }
    policy = {"max_length": PROMPT + options.response + 8}
    return parse_study({"name": "speed", "policy": policy, "arms": {"a": arm}, "training": training}).run("a")


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """A policy of these sizes and as many problems as all steps take, each a text of PROMPT bytes."""
    shape = KNOWN.get(options.policy, SMALL)
    model = shaped_policy(shape, PROMPT + options.response + 8, end=0)
    save_policy(model, byte_tokenizer(), folder / "policy")
    texts = [f"{number} ".ljust(PROMPT, "x") for number in range(options.prompts * options.steps)]
    write_problems([Problem(f"{n}", text, "0") for n, text in enumerate(texts)], folder / "problems.jsonl")


def ours(options: argparse.Namespace, folder: Path) -> Row:
    """Our own loop: medians over its steps but the first."""
    steps = train(folder, run_of(options), "out")
    later = steps[1:] or steps

    def median(name: str) -> float:
        return statistics.median(step[name] for step in later)

    seconds = {phase: round(median(keys.in_group(keys.TIME, phase)), 3) for phase in PHASES}
    tokens = options.prompts * options.group * median(keys.LENGTH)
    return {
        "step": round(median(keys.STEP_SECONDS), 3),
        "rollout_tokens_per_second": round(tokens / seconds["rollout"], 1),
        **seconds,
        "k3": f"{max(step[keys.K3_MASKED] for step in steps):.3g}",
    }


def bare(options: argparse.Namespace, folder: Path) -> Row:
    """vLLM's own `generate` of a step's requests, without our processor and records."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    # On a CPU a share is of the machine's memory, which other programs use too: there the cache has a size of its own.
    on_gpu = torch.cuda.is_available()
    engine = LLM(
        str(folder / "policy"),
        trust_remote_code=False,
        dtype="bfloat16",
        max_model_len=PROMPT + options.response + 8,
        gpu_memory_utilization=0.9 if on_gpu else 0.1,
        kv_cache_memory_bytes=None if on_gpu else 2**30,
        enforce_eager=not on_gpu,  # on a CPU compiling takes minutes
        seed=0,
    )
    sampling = SamplingParams(n=options.group, temperature=1.0, max_tokens=options.response)

    def step(number: int) -> tuple[float, int]:
        prompts = [{"prompt_token_ids": [2 + (number + place) % 200] * PROMPT} for place in range(options.prompts)]
        begun = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begun, sum(len(one.token_ids) for output in outputs for one in output.outputs)

    found = [step(number) for number in range(options.steps)]
    seconds = statistics.median(seconds for seconds, _ in found[1:] or found)
    rates = [tokens / seconds for seconds, tokens in found[1:] or found]
    return {"rollout": round(seconds, 3), "rollout_tokens_per_second": round(statistics.median(rates), 1)}


def trl(options: argparse.Namespace, folder: Path) -> Row:
    """A step of TRL's RLOO trainer on the same sizes, its rollout with vLLM on a GPU."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import RLOOConfig, RLOOTrainer

    from tailrl.model.policy import load_tokenizer

    gpu, responses = torch.cuda.is_available(), options.prompts * options.group
    settings = RLOOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=options.micro or responses,
        gradient_accumulation_steps=responses // (options.micro or responses),
        num_generations=options.group,
        max_completion_length=options.response,
        max_steps=options.steps,
        learning_rate=1e-6,
        beta=0.0,
        report_to="none",
        save_strategy="no",
        use_cpu=not gpu,
        bf16=gpu,
        gradient_checkpointing=gpu,
        use_vllm=gpu,
        vllm_mode="colocate",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        # By its folder: a model that is loaded for our trainer has attention over packed rows, which TRL's has not.
        model_init_kwargs={"dtype": "float32"},
        seed=0,
    )
    ends: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Notes when each step ended."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text)) % 2) for text in completions]

    texts = [f"{number} ".ljust(PROMPT, "x") for number in range(options.prompts * options.steps)]
    trainer = RLOOTrainer(
        model=str(folder / "policy"),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=load_tokenizer(folder / "policy"),
        callbacks=[Watch()],
    )
    begun = time.perf_counter()
    trainer.train()
    spans = [end - start for start, end in zip([begun, *ends], ends, strict=False)]
    return {"step": round(statistics.median(spans[1:] or spans), 3)}


MEASURES: dict[str, Callable[[argparse.Namespace, Path], Row]] = {"ours": ours, "bare": bare, "trl": trl}
COLUMNS = ("measure", "policy", "engine", "responses", "tokens", "device", "step", *PHASES)
LAST = ("rollout_tokens_per_second", "k3", "floor_step", "floor_rollout")


def floor(options: argparse.Namespace) -> Row:
    """The plan's floor of the step and of its rollout, seconds."""
    machine = read_machine(options.machine, None)
    run = run_of(options)
    work = work_of(run.training, PROMPT, None, 1)
    job = plan_job(KNOWN.get(options.policy, SMALL), run, work, machine, 1)
    seconds = {phase: one.floor(machine) for phase, one in job.phases.items()}
    return {"floor_step": f"{sum(seconds.values()):.3g}", "floor_rollout": f"{seconds['rollout']:.3g}"}


def parser() -> argparse.ArgumentParser:
    """What a call may say."""
    parsing = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parsing.add_argument("measure", choices=MEASURES)
    parsing.add_argument("--policy", choices=[*KNOWN, "small"], default="small", help="whose sizes")
    parsing.add_argument("--engine", choices=["vllm", "exact", "transformers"], default="vllm", help="of ours")
    parsing.add_argument("--prompts", type=int, default=8)
    parsing.add_argument("--group", type=int, default=64, help="responses to each prompt")
    parsing.add_argument("--response", type=int, default=512, help="tokens at most")
    parsing.add_argument("--budget", type=int, default=16_384, help="tokens of a micro-batch")
    parsing.add_argument("--micro", type=int, default=0, help="responses of a micro-batch of TRL's; 0: all")
    parsing.add_argument("--steps", type=int, default=3)
    parsing.add_argument("--machine", default="h100", help="whose floor, as `tailrl plan` takes it")
    parsing.add_argument("--out", type=Path, help="the CSV file that gets the row")
    return parsing


def main() -> None:
    options = parser().parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {
        "measure": options.measure,
        "policy": options.policy,
        "engine": options.engine if options.measure == "ours" else "",
        "responses": options.prompts * options.group,
        "tokens": options.response,
        "device": device,
    }
    with tempfile.TemporaryDirectory() as folder:
        prepare(options, Path(folder))
        found = MEASURES[options.measure](options, Path(folder))
    row = {**dict.fromkeys((*COLUMNS, *LAST), ""), **about, **floor(options), **found}
    earlier: list[Row] = []
    if options.out and options.out.exists():
        with options.out.open(encoding="utf-8", newline="") as file:
            earlier = [dict(one) for one in csv.DictReader(file)]
    show([*earlier, row], options.out)


if __name__ == "__main__":
    main()
