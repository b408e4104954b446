"""The checks of `gpu_check.py` on a policy: packed rows, the exact engine, training, a resumed run.

tailrl is imported within the checks, so that a missing package costs its own rows alone.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
from gpu_rows import LENGTHS, LOG_RHO, SPREAD, Found, MissingError, RefusedError, Sizes, whole_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

STEPS, STOPPED_AT = 3, 1
TRANSFORMERS = {"engine": "transformers"}
EXACT = {"engine": "exact", "dtype": "float32"}
PHASES = ("rollout", "forward", "backward", "optimizer", "weights")
LONGEST = 2048  # prompt and response, tokens


def make_policy(sizes: Sizes, seed: int = 0) -> "PreTrainedModel":
    """A Llama, or a Qwen3-MoE, with random weights, in float32 on the CPU; its distributions have peaks."""
    from shaped import shaped_policy

    from tailrl.planning.shapes import Shape

    heads = max(2, sizes.hidden // 64)
    widths = sizes.hidden, sizes.layers, heads, heads // 2, 64, 3 * sizes.hidden, sizes.policy_vocabulary
    mixture = {"normed": True, "experts": sizes.experts, "chosen": 2} if sizes.experts else {}
    model = shaped_policy(Shape(*widths, tied=False, **mixture), length=LONGEST, end=0, seed=seed)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=SPREAD / sizes.hidden**0.5)
    return model


def packed(dtype: torch.dtype, limit: float, device: str, sizes: Sizes) -> Found:
    """The policy's forward on a packed row, by whatever attention this device takes."""
    from tailrl.kernels.packing import pack
    from tailrl.model.forward import hidden_states

    model = make_policy(sizes).to(device, dtype)
    lengths = [min(LONGEST, sizes.stretch * length) for length in LENGTHS]
    tokens_P = torch.randint(2, sizes.policy_vocabulary, (sum(lengths),), device=device)
    with torch.no_grad(), whole_float32():
        found_PH = hidden_states(model, tokens_P, pack(lengths, device=device))
        model.set_attn_implementation("eager")
        alone = [model.double().base_model(row[None]).last_hidden_state[0] for row in tokens_P.split(lengths)]
    expected_PH = torch.cat(alone)
    error = ((found_PH - expected_PH).norm() / expected_PH.norm()).item()
    what = f"last hidden states of {len(lengths)} ragged sequences in one row with each alone in float64, relative"
    return Found(what, error, limit)


def requests_of(sizes: Sizes, threshold: float = LOG_RHO) -> Sequence[Any]:
    from tailrl.rollout.types import Request

    prompts = torch.randint(2, sizes.policy_vocabulary, (8, 9), generator=torch.Generator().manual_seed(1)).tolist()
    return [Request(tuple(prompt[: 2 + n]), 100 + n, threshold) for n, prompt in enumerate(prompts)]


def exact_large(device: str, sizes: Sizes) -> Found:
    """`exact` with two layers and a vocabulary whose sums a GPU cuts."""
    return exact(device, replace(sizes, layers=2, policy_vocabulary=sizes.vocabulary))


def exact(_: str, sizes: Sizes) -> Found:
    """The exact engine's own self-test, on the device that it takes."""
    from tailrl.config.sampler import SamplerSettings
    from tailrl.model.policy import named_weights
    from tailrl.rollout import Decoding, make_sampler
    from tailrl.runtime.errors import StudyError

    model = make_policy(sizes)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        sampler = make_sampler(SamplerSettings(engine="exact", dtype="float32"), Path(folder), 256, 0)
    sampler.load_weights(named_weights(model))
    place = next(vars(sampler)["model"].parameters()).device
    what = f"the exact engine on {place}: its log-probs with the trainer's bits, nats"
    try:
        error = sampler.self_test(requests_of(sizes), Decoding(1.0, sizes.response, "min_p"))
    except StudyError as refusal:
        if place.type == "cpu":
            raise
        raise RefusedError(str(refusal)) from None
    return Found(what, error, 0.0)


# --- training --------------------------------------------------------------------------------------------


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """One token a byte, of transformers alone: our own tokenizers learn from texts of another package."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<end>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def run_of(
    sizes: Sizes,
    dtype: str = "float32",
    sampler: Mapping[str, Any] = TRANSFORMERS,
    checkpoint_every: int = STEPS + 1,
) -> Any:
    """DVP with MIS, sampled in bfloat16 unless `sampler` says more; without a checkpoint, if none is asked for.

    With int4 it is DVP alone: random weights suffer so much from it that MIS would reject every response.
    """
    from tailrl.config.load import parse_study

    arm = {
        "sampler": dict(sampler),
        "vocabulary": {"rule": "min_p", "rho": "e-13"},
        "correction": {} if sampler.get("quantization") == "int4" else {"sequence": "mis", "sequence_threshold": 2.0},
    }
    training = {"steps": STEPS, "prompts": 4, "group_size": 4, "max_new_tokens": sizes.response, "dtype": dtype}
    rest = {"token_budget": 16 * sizes.response, "checkpoint_every": checkpoint_every, "learning_rate": 1e-3}
    study = {"name": "gpu_check", "policy": {"max_length": LONGEST}, "arms": {"dvp_mis": arm}}
    return parse_study({**study, "training": training | rest}).run("dvp_mis")


@contextmanager
def prepared(sizes: Sizes) -> Iterator[Path]:
    """A folder with a policy and problems."""
    from tailrl.model.policy import save_policy
    from tailrl.tasks.problem import Problem, write_problems

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_policy(make_policy(sizes), byte_tokenizer(), folder / "policy")
        write_problems([Problem(f"{n}", f"{n}+{n}=", str(2 * n)) for n in range(20)], folder / "problems.jsonl")
        yield folder


class StoppedError(Exception):
    """Ends a run as a kill would, as far as its checkpoints go."""


def train(folder: Path, run: Any, out: str, stop_at: int | None = None) -> list[dict[str, float]]:
    """Train into a folder, or go on there; the metrics of every step. The reward is a response's own, made up.

    Raises StoppedError in the step `stop_at`.
    """
    from tailrl.artifacts.metrics import read_steps
    from tailrl.training import loop
    from tailrl.training import step as training_step

    taken = 0

    def rewards(rollouts: Sequence[Any], *_: object) -> Any:
        nonlocal taken
        if taken == stop_at:
            raise StoppedError
        taken += 1
        return np.array([crc32(str(rollout.tokens).encode()) % 2 for rollout in rollouts], np.float32)

    with patch.object(training_step, "rewards", rewards):
        loop.train(run, 0, folder / "policy", folder / "problems.jsonl", folder / out, folder)
    return [{key: value for key, value in step.items() if value is not None} for step in read_steps(folder / out)]


def change(one: Path, other: Path) -> float:
    """Largest difference of a weight of two policies."""
    from safetensors.torch import load_file

    weights, others = (load_file(folder / "model.safetensors") for folder in (one, other))
    return float(max((weights[name].double() - others[name].double()).abs().max().item() for name in weights))


def step(dtype: str, limit: float | None, sampler: Mapping[str, Any], _: str, sizes: Sizes) -> Found:
    """Whole steps: rollout, update, weights into the engine."""
    from tailrl.tracking import metrics as keys

    run = run_of(sizes, dtype, sampler)
    with prepared(sizes) as folder:
        steps = train(folder, run, "whole")
        moved = change(folder / "policy", folder / "whole/policy")
    if len(steps) != STEPS or not moved > 0 or not all(row.get(keys.GRADIENT_NORM, 0) > 0 for row in steps):
        raise ValueError(f"{len(steps)} of {STEPS} steps; the weights moved by {moved:g}")
    last = steps[-1]
    seconds = ", ".join(f"{name} {last[keys.in_group(keys.TIME, name)]:.2g} s" for name in PHASES)
    sampled = ", ".join(str(value) if name == "engine" else f"{name} {value}" for name, value in sampler.items())
    arm = "DVP" if run.correction.sequence == "none" else "DVP with MIS"
    what = f"{STEPS} steps of {arm}, the trainer in {dtype}: largest k3 of its tokens, sampled by {sampled}"
    return Found(
        what,
        max(row[keys.K3_MASKED] for row in steps),
        limit,
        note=f"{last[keys.TOKENS_PER_SECOND]:.3g} tokens/s: {seconds}",
    )


def experts(device: str, sizes: Sizes) -> Found:
    """Steps of a mixture of eight experts a layer, each as wide as the dense policy's MLP."""
    return step("float32", 1e-2, TRANSFORMERS, device, replace(sizes, experts=8))


def verified(device: str, sizes: Sizes) -> Found:
    """Responses of at most 21 tokens, since each token that differs costs another round."""
    shorter = replace(sizes, response=min(21, sizes.response))
    return step("float32", 0.0, TRANSFORMERS | {"verify": True}, device, shorter)


def vllm_step(limit: float | None, settings: Mapping[str, Any], device: str, sizes: Sizes) -> Found:
    """Whole steps with vLLM, its self-test first, in a process of their own: only its end frees vLLM's memory."""
    from tailrl.runtime.errors import StudyError

    if not find_spec("vllm"):
        raise MissingError("vLLM is not installed")
    sampler = {"engine": "vllm", "enforce_eager": True} | dict(settings)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(step, "float32", limit, sampler, device, sizes).result()
        except StudyError as refusal:
            if not str(refusal).startswith("sampler."):
                raise
            raise RefusedError(str(refusal)) from None


def resume(device: str, sizes: Sizes) -> Found:
    """A run that is stopped and goes on from its checkpoint, beside one that is not: the same bits on a CPU."""
    from tailrl.artifacts.records import RunRecord, read_record

    # Another order of a GPU's atomic additions may change a sampled token, and so all that follows.
    torch.use_deterministic_algorithms(device == "cuda", warn_only=True)
    with prepared(sizes) as folder:
        run = run_of(sizes, checkpoint_every=1)
        train(folder, run, "whole")
        try:
            train(folder, run, "stopped", stop_at=STOPPED_AT)
        except StoppedError:
            train(folder, run, "stopped")
        resumed = read_record(folder / "stopped", RunRecord).resumed_at_steps
        if list(resumed) != [STOPPED_AT]:
            raise ValueError(f"the run went on from the steps {list(resumed)}, not from step {STOPPED_AT}")
        error = change(folder / "whole/policy", folder / "stopped/policy")
        moved = change(folder / "policy", folder / "whole/policy")
    what = f"weights after a stop in step {STOPPED_AT} with an undisturbed run's, as a share of what training moved"
    torch.use_deterministic_algorithms(False)
    return Found(what, error / moved, 0.0 if device == "cpu" else 0.05)
