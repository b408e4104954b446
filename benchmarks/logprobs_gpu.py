"""Time and memory of the constrained log-prob on a GPU, forward and backward, beside three dense products of its size.

    PYTHONPATH=workflow:workflow/scripts:tests/gpu python benchmarks/logprobs_gpu.py --out docs/results/logprobs_gpu.csv

The inputs are made up, so that nothing needs to be fetched: bf16 hidden states and head whose logits are normal, with a
spread at which ρ = e⁻¹³ keeps 6 % of the tokens, and a part that 32 neighbouring rows have in common, so that together
they keep 44 %. What it came to is printed. Before anything is timed, values and gradients of some rows are compared
with the plain definition in float64. Needs torch (2.11 or newer) and its Triton alone.

The three products are logits, and a product for either gradient, in bf16. `torch, in chunks` is what runs on a CPU: no
kernels, float32 products. Liger's fused linear cross entropy has no mask, no coefficients and no second pass.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from gpu_rows import GROUP, LOG_RHO, Inputs, liger, make_inputs
from logprobs import LENGTH
from table import ratios, show

from tailrl.kernels import logprobs
from tailrl.kernels.logprobs import constrained_logprobs
from tailrl.objective.safe_set import safe_set, token_logprobs

COMMON = 0.54  # share of a logit's variance that neighbouring rows have in common
SAMPLED_ROWS = 8


def inputs_of(tokens: int, vocabulary: int, width: int, device: str) -> Inputs:
    """bf16 hidden states and weight, sampled tokens, and a coefficient per response; prints how large safe sets are."""
    inputs = make_inputs(tokens, vocabulary, width, torch.bfloat16, device, COMMON)
    sizes, unions = [], []
    ever_V = torch.zeros(vocabulary, dtype=torch.bool, device=device)
    with torch.no_grad():
        for hidden_CH in inputs.hidden_TH.split(16 * GROUP):
            safe_CV = safe_set((hidden_CH @ inputs.weight_VH.T).float(), "min_p", LOG_RHO)
            sizes.append(safe_CV.float().mean(1))
            unions += [group.any(0).float().mean() for group in safe_CV.split(GROUP)]
            ever_V |= safe_CV.any(0)
    density, union, ever = torch.cat(sizes).mean(), torch.stack(unions).mean(), ever_V.float().mean()
    print(f"safe: {density:.1%} of the tokens, {union:.1%} within {GROUP} rows, {ever:.1%} within all {tokens}")
    generator = torch.Generator(device).manual_seed(1)
    coefficient_R = torch.randn(-(-tokens // LENGTH), generator=generator, device=device)
    return replace(inputs, coefficient_T=coefficient_R.repeat_interleave(LENGTH)[:tokens])


def check(inputs: Inputs, log_rho: float | None) -> None:
    """Some rows' values and gradients against float64; for the weight's gradient all other coefficients are zero."""
    rows = torch.linspace(0, len(inputs.tokens_T) - 1, SAMPLED_ROWS, device=inputs.tokens_T.device).long()
    hidden, weight = (tensor.detach().double() for tensor in inputs.operands())
    hidden = hidden[rows].requires_grad_()
    weight.requires_grad_()
    rule, threshold = ("full", 0.0) if log_rho is None else ("min_p", log_rho)
    expected = token_logprobs(hidden @ weight.T, inputs.tokens_T[rows], rule, threshold)
    loss = (expected.logp_T * inputs.coefficient_T[rows]).sum()
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    only_T = torch.zeros_like(inputs.coefficient_T).index_fill_(0, rows, 1.0) * inputs.coefficient_T
    found = constrained_logprobs(*inputs.operands(), inputs.tokens_T, rule, threshold)
    whole, _ = torch.autograd.grad((found.logp_T * inputs.coefficient_T).sum(), inputs.operands(), retain_graph=True)
    part, by_weight = torch.autograd.grad((found.logp_T * only_T).sum(), inputs.operands())
    errors = {
        "log-prob": (found.logp_T[rows] - expected.logp_T).abs().max(),
        "unmasked": (found.logp_full_T[rows] - expected.logp_full_T).abs().max(),
        "log Z": (found.log_kept_T[rows] - expected.log_kept_T).abs().max(),
        "entropy": (found.entropy_T[rows] - expected.entropy_T).abs().max(),
        "|V_S|, relative": ((found.kept_vocab_T[rows] - expected.kept_vocab_T) / expected.kept_vocab_T).abs().max(),
        "by hidden, relative": (whole[rows] - d_hidden).norm() / d_hidden.norm(),
        "by hidden, few rows": (part[rows] - d_hidden).norm() / d_hidden.norm(),
        "by weight, relative": (by_weight - d_weight).norm() / d_weight.norm(),
    }
    print(f"ρ = {log_rho}: largest errors: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    # Values are float32, and a logit within rounding of the cut may change sides; entries of gradients are bfloat16.
    bounds = [1e-4] * 5 + [2.0**-7] * 3
    wrong = [name for (name, error), bound in zip(errors.items(), bounds, strict=True) if not error <= bound]
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")


# --- cases: forward and backward -------------------------------------------------------------------------


def dense(inputs: Inputs) -> None:
    hidden, weight = (tensor.detach() for tensor in inputs.operands())
    gradient_TV = hidden @ weight.T  # numbers of no meaning: a product's time hardly knows them
    torch.mm(gradient_TV, weight)
    torch.mm(gradient_TV.T, hidden)


def ours(log_rho: float | None) -> Callable[[Inputs], None]:
    def step(inputs: Inputs) -> None:
        rule, threshold = ("full", 0.0) if log_rho is None else ("min_p", log_rho)
        logp_T = constrained_logprobs(*inputs.operands(), inputs.tokens_T, rule, threshold).logp_T
        (logp_T * inputs.coefficient_T).sum().backward()

    return step


def chunked(inputs: Inputs) -> None:
    """What a CPU runs: torch's operations in chunks of rows, in float32."""
    threshold_T1 = torch.full((len(inputs.tokens_T), 1), LOG_RHO, device=inputs.tokens_T.device)
    arguments = (*inputs.operands(), inputs.tokens_T, threshold_T1, "min_p", 1.0, False, True)
    logp_T, *_ = logprobs._ConstrainedLogprobs.apply(*arguments)
    (logp_T * inputs.coefficient_T).sum().backward()


CASES: dict[str, Callable[[Inputs], None]] = {
    "three dense products": dense,
    "ours, ρ = e^-13": ours(LOG_RHO),
    "ours, no mask": ours(None),
    "torch, in chunks, ρ = e^-13": chunked,
    "Liger, no mask": liger,
}
BASE = "three dense products"


def run(case: str, inputs: Inputs) -> tuple[float, float]:
    """Milliseconds of one forward and backward, and MiB allocated at its highest over what the inputs take."""
    inputs.hidden_TH.grad = inputs.weight_VH.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    CASES[case](inputs)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(inputs: Inputs, repeats: int) -> list[dict[str, object]]:
    """All cases one after another, in an order that turns by one each round; the ratio is that within a round."""
    cases = [case for case in CASES if not case.startswith("Liger") or find_spec("liger_kernel")]
    for case in cases:
        run(case, inputs)
    times: dict[str, list[float]] = {case: [] for case in cases}
    memory: dict[str, float] = {}
    for turn in range(repeats):
        for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
            milliseconds, memory[case] = run(case, inputs)
            times[case].append(milliseconds)
    return [
        {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "tokens": len(inputs.tokens_T),
            "vocabulary": len(inputs.weight_VH),
            "width": inputs.hidden_TH.shape[1],
            "case": case,
            "repeats": repeats,
            "ms": round(statistics.median(times[case]), 2),
            "ms_min": round(min(times[case]), 2),
            **ratios("ratio", times[case], times[BASE]),
            "peak_mib": round(memory[case]),
        }
        for case in cases
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=2_048)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write a CSV file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here")
    inputs = inputs_of(arguments.tokens, arguments.vocabulary, arguments.width, "cuda")
    for log_rho in (LOG_RHO, None):
        check(inputs, log_rho)
    rows = measure(inputs, arguments.repeats)
    show(rows, arguments.out)


if __name__ == "__main__":
    main()
