"""Time and memory of the constrained log-prob, forward and backward, beside full logits and other libraries' paths.

    PYTHONPATH=workflow/scripts python benchmarks/logprobs.py --threads 2 --out docs/results/logprobs.csv
    PYTHONPATH=workflow/scripts python benchmarks/logprobs.py --memory --out docs/results/logprobs_memory.csv

The inputs are real: SmolLM2-135M-Instruct answers four questions at temperature 1, and its last hidden states, its head
(float32) and the sampled tokens are what every case gets; a coefficient per response stands for advantage × weight.
Times: all cases in one process, one after another, in an order that turns by one each round; the ratio is taken within
each round, then the median. Memory: each case in a process of its own, the growth of the resident set's high-water mark
over what it is with the inputs loaded and the threads started (Linux; the mark is reset through /proc/self/clear_refs).

Every case computes the gradient by the hidden states and by the head. `full logits, mask and fill` writes −50 outside
the safe set of ρ = e⁻¹³, as the paper does. Liger's chunked GRPO loss is uncompiled; it gets the advantages, so it
needs no second pass. `kept` is the share of the vocabulary in the safe set, `peak_mib` the growth of memory.

All cases are measured at 2,048 tokens, most at 8,192, a few at other numbers and with the first rows of the head alone.
The answers are made once, in about two minutes, and kept in results/benchmarks/.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import smollm2
import torch
from table import ratios, show
from torch import Tensor

from tailrl.kernels.logprobs import constrained_logprobs
from tailrl.objective.safe_set import PAPER_FILL, safe_set

QUESTIONS = (
    "What is the sum of the first ten odd numbers? Explain your steps.",
    "Write a short story about a lighthouse keeper.",
    "Why is the sky blue?",
    "A train travels 60 miles in 45 minutes. What is its average speed in miles per hour?",
)
RESPONSES, LENGTH = 16, 128  # to each question; tokens
VOCABULARY, WIDTH = 49152, 576

Step = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def make_inputs(path: Path) -> None:
    """Save hidden states [8192, H], weight [V, H] and tokens [8192]; responses shuffled over the questions."""
    model, tokenizer = smollm2.load()
    generator = torch.manual_seed(0)
    hidden, tokens = [], []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt_P = torch.tensor(tokenizer.encode(prompt))
        with torch.inference_mode():
            rows_NL = model.generate(
                prompt_P.repeat(RESPONSES, 1),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=LENGTH,
                max_new_tokens=LENGTH,
                pad_token_id=tokenizer.eos_token_id,
            )
            hidden.append(model.base_model(input_ids=rows_NL).last_hidden_state[:, len(prompt_P) - 1 : -1])
        tokens.append(rows_NL[:, len(prompt_P) :])
    order = torch.randperm(len(QUESTIONS) * RESPONSES, generator=generator)
    weight = model.get_output_embeddings().weight.detach().clone()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save((torch.cat(hidden)[order].flatten(0, 1), weight, torch.cat(tokens)[order].flatten()), path)


def load_inputs(path: Path, tokens: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first rows of the saved inputs, with gradients asked for, and a coefficient for each row.

    More rows than were saved are the same ones again. A smaller vocabulary is the head's first rows; sampled tokens
    beyond it are folded back into it.
    """
    hidden_TH, weight_VH, tokens_T = torch.load(path, mmap=True, weights_only=True)
    times = -(-tokens // len(tokens_T))
    hidden_TH, tokens_T = hidden_TH.repeat(times, 1), tokens_T.repeat(times)
    coefficient_N = torch.randn(len(tokens_T) // LENGTH, generator=torch.Generator().manual_seed(1))
    return (
        hidden_TH[:tokens].clone().requires_grad_(),
        weight_VH[:vocabulary].clone().requires_grad_(),
        tokens_T[:tokens] % vocabulary,
        coefficient_N.repeat_interleave(LENGTH)[:tokens],
    )


def full_logits(hidden_TH: Tensor, weight_VH: Tensor, tokens_T: Tensor, coefficient_T: Tensor) -> None:
    logp_T = (hidden_TH @ weight_VH.T).log_softmax(-1).gather(-1, tokens_T[:, None]).squeeze(-1)
    (logp_T * coefficient_T).sum().backward()


@torch.no_grad()
def three_products(hidden_TH: Tensor, weight_VH: Tensor, _tokens_T: Tensor, _coefficient_T: Tensor) -> None:
    """The products of unmasked logits alone: forward, and the gradients by the hidden states and by the head."""
    logits_TV = hidden_TH @ weight_VH.T
    hidden_TH.grad = logits_TV @ weight_VH
    weight_VH.grad = logits_TV.T @ hidden_TH


def mask_and_fill(hidden_TH: Tensor, weight_VH: Tensor, tokens_T: Tensor, coefficient_T: Tensor) -> None:
    logits_TV = hidden_TH @ weight_VH.T
    filled_TV = logits_TV.masked_fill(~safe_set(logits_TV, "min_p", -13.0), PAPER_FILL)
    logp_T = filled_TV.log_softmax(-1).gather(-1, tokens_T[:, None]).squeeze(-1)
    (logp_T * coefficient_T).sum().backward()


def trl(hidden_TH: Tensor, weight_VH: Tensor, tokens_T: Tensor, coefficient_T: Tensor) -> None:
    from trl.trainer.utils import selective_log_softmax

    logits_NLV = (hidden_TH @ weight_VH.T).view(-1, LENGTH, len(weight_VH))
    logp_NL = selective_log_softmax(logits_NLV, tokens_T.view(-1, LENGTH))
    (logp_NL.flatten() * coefficient_T).sum().backward()


def liger(hidden_TH: Tensor, weight_VH: Tensor, tokens_T: Tensor, coefficient_T: Tensor) -> None:
    """Its chunked loss takes the advantages, so that it can form gradients in the forward."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo")
    ids_NL = tokens_T.view(-1, LENGTH)
    hidden_NLH = hidden_TH.view(-1, LENGTH, hidden_TH.shape[-1])
    value, _ = loss(hidden_NLH, weight_VH, ids_NL, torch.ones_like(ids_NL), coefficient_T[::LENGTH])
    value.backward()


def ours(log_rho: float | None) -> Step:
    def step(hidden_TH: Tensor, weight_VH: Tensor, tokens_T: Tensor, coefficient_T: Tensor) -> None:
        rule, threshold = ("full", 0.0) if log_rho is None else ("min_p", log_rho)
        logp_T = constrained_logprobs(hidden_TH, weight_VH, tokens_T, rule, threshold).logp_T
        (logp_T * coefficient_T).sum().backward()

    return step


LOG_RHOS = (-16, -14, -13, -12, -10, -8, -6, -4)
THRESHOLDS = {"full logits, mask and fill": -13.0, **{f"ours, ρ = e^{k}": float(k) for k in LOG_RHOS}}
"""ln ρ of the cases that mask."""

FLOOR = "three dense products"
"""Measured where it is asked for: no objective, but what the others cannot do without."""
CASES: dict[str, Step] = {
    "full logits": full_logits,
    FLOOR: three_products,
    "full logits, mask and fill": mask_and_fill,
    "TRL, full logits": trl,
    "Liger, chunked": liger,
    "ours, no mask": ours(None),
    **{f"ours, ρ = e^{k}": ours(float(k)) for k in LOG_RHOS},
}
USUAL = tuple(case for case in CASES if case != FLOOR)
GROWTH = ("full logits", "ours, no mask", "ours, ρ = e^-13")
"""Cases that are also measured at the sizes between, to see how they grow."""

MAIN = tuple(case for case in USUAL if not case.endswith(("e^-14", "e^-12", "e^-10", "e^-6")))
"""The others show at one size how time depends on the share of the vocabulary that is kept."""

SIZES = {
    (2048, VOCABULARY): USUAL,
    (8192, VOCABULARY): MAIN,
    **{(tokens, VOCABULARY): GROWTH for tokens in (1024, 4096)},
    **{(2048, vocabulary): GROWTH for vocabulary in (3072, 6144, 12288, 24576)},
}
"""Tokens and vocabulary, and what is measured there."""


def run(case: str, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[float, float]:
    """Seconds of one forward and backward: on the clock, and of CPU time over all threads, waiting ones included."""
    inputs[0].grad = inputs[1].grad = None
    wall, cpu = time.perf_counter(), time.process_time()
    CASES[case](*inputs)
    return time.perf_counter() - wall, time.process_time() - cpu


@torch.no_grad()
def kept(case: str, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> float:
    """Share of the vocabulary in the safe set, mean over the rows; 1 without a mask."""
    if case not in THRESHOLDS:
        return 1.0
    hidden_TH, weight_VH, tokens_T, _ = inputs
    found = constrained_logprobs(hidden_TH, weight_VH, tokens_T, "min_p", THRESHOLDS[case])
    return found.kept_vocab_T.double().mean().item() / len(weight_VH)


def available(case: str) -> bool:
    package = {"TRL": "trl", "Liger": "liger_kernel"}.get(case.split(",")[0])
    return package is None or find_spec(package) is not None


def peak(case: str, path: Path, tokens: int, vocabulary: int) -> float:
    """MiB of resident memory that one run adds, at its highest; in a process that has done nothing else."""
    inputs = load_inputs(path, tokens, vocabulary)
    few = load_inputs(path, LENGTH, vocabulary)
    run(case, few)
    del few
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water_mark()
    run(case, inputs)
    return high_water_mark() - before


def high_water_mark() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def peak_elsewhere(case: str, arguments: argparse.Namespace, tokens: int, vocabulary: int) -> float:
    command = [sys.executable, __file__, "--peak", case, "--size", str(tokens), str(vocabulary)]
    command += ["--data", str(arguments.data), "--threads", str(arguments.threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure(cases: list[str], arguments: argparse.Namespace, tokens: int, vocabulary: int) -> list[dict[str, object]]:
    inputs = load_inputs(arguments.data, tokens, vocabulary)
    wall: dict[str, list[float]] = {case: [] for case in cases}
    cpu: dict[str, list[float]] = {case: [] for case in cases}
    for case in cases:
        run(case, load_inputs(arguments.data, LENGTH, vocabulary))
    for turn in range(arguments.repeats):
        for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
            seconds = run(case, inputs)
            wall[case].append(seconds[0])
            cpu[case].append(seconds[1])
    shares = {case: kept(case, inputs) for case in cases}
    del inputs
    memory = {case: peak_elsewhere(case, arguments, tokens, vocabulary) for case in cases}
    return [
        {
            "tokens": tokens,
            "vocabulary": vocabulary,
            "case": case,
            "kept": f"{shares[case]:.3g}",
            "threads": arguments.threads,
            "repeats": arguments.repeats,
            "seconds": round(statistics.median(wall[case]), 3),
            "seconds_min": round(min(wall[case]), 3),
            **ratios("ratio", wall[case], wall["full logits"]),
            **ratios("cpu_ratio", cpu[case], cpu["full logits"]),
            "peak_mib": round(memory[case]),
            "peak_ratio": round(memory[case] / memory["full logits"], 3),
        }
        for case in cases
    ]


def measure_memory(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """How the peak grows with the tokens, and what of it is the gradient by the hidden states, which is an output."""
    rows: list[dict[str, object]] = []
    for case in ("ours, no mask", "ours, ρ = e^-13"):
        for tokens in (1024, 2048, 4096, 8192, 16384):
            memory = peak_elsewhere(case, arguments, tokens, VOCABULARY)
            gradient = tokens * WIDTH * 4 / 2**20
            rows.append(
                {
                    "case": case,
                    "tokens": tokens,
                    "peak_mib": round(memory),
                    "gradient_mib": round(gradient),
                    "rest_mib": round(memory - gradient),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("results/benchmarks/smollm2.pt"), help="made where missing")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--size", type=int, nargs=2, metavar=("TOKENS", "VOCABULARY"), help="measure all cases at this size alone"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=USUAL, help="full logits must be among them")
    parser.add_argument("--memory", action="store_true", help="the peak over more tokens alone, no times")
    parser.add_argument("--out", type=Path, help="write a CSV file")
    parser.add_argument("--peak", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if "full logits" not in arguments.cases:
        parser.error("--cases: full logits must be among them")
    if arguments.peak:
        print(peak(arguments.peak, arguments.data, *arguments.size))
        return
    if not arguments.data.exists():
        make_inputs(arguments.data)
    if arguments.memory:
        show(measure_memory(arguments), arguments.out)
        return
    sizes = {tuple(arguments.size): tuple(CASES)} if arguments.size else SIZES
    rows = [
        row
        for size, cases in sizes.items()
        for row in measure([c for c in cases if available(c) and c in arguments.cases], arguments, *size)
    ]
    show(rows, arguments.out)


if __name__ == "__main__":
    main()
