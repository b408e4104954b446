"""The checks of `gpu_check.py` on kernels and attention: values with float64 definitions, times with peers.

tailrl and the peers are imported within the checks, so that a missing package costs its own rows alone.
"""

import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

LOG_RHO = -13.0
SPREAD = 4.52  # of the logits, in nats: their largest among V = 151,936 then lies 13 above the 94th percentile
GROUP = 32  # neighbouring rows, which may have a part of their logits in common
DRAWN = 512  # rows whose tokens are drawn at once
LENGTHS = (3, 50, 7, 21, 64, 1, 33, 12)  # ragged, tokens of a sequence


class MissingError(Exception):
    """Why this machine cannot make a row: its device, or its PyTorch, lacks something."""

    verdict = "not there"


class RefusedError(MissingError):
    """What a study would be told here, where nothing else was promised."""

    verdict = "refused"


@dataclass(frozen=True)
class Sizes:
    """As large as the device takes in minutes for all checks."""

    tokens: int  # response tokens whose log-probs are checked
    timed: int  # and timed
    vocabulary: int
    width: int
    repeats: int
    stretch: int  # factor of LENGTHS
    hidden: int  # of the policy that is trained, with heads of 64
    layers: int
    policy_vocabulary: int
    response: int
    experts: int = 0  # of a layer, two for each token; 0: a dense policy


CPU = Sizes(6, 16, 5000, 16, 1, 1, 64, 2, 320, 6)
CUDA = Sizes(512, 4096, 151_936, 2048, 5, 16, 1024, 8, 32_768, 128)


@dataclass(frozen=True)
class Found:
    """What a check found: the figure of a row with its limit, or without one."""

    compared: str
    value: float
    limit: float | None = None  # the figure may not be larger, nor nan
    unit: str = ""
    note: str = ""

    def columns(self) -> dict[str, object]:
        verdict = "measured" if self.limit is None else "ok" if self.value <= self.limit else "failed: over its limit"
        limit = "" if self.limit is None else f"{self.limit:.3g}{self.unit}"
        figure = f"{self.value:.3g}{self.unit}" + (f" ({self.note})" if self.note else "")
        return {"compared": self.compared, "figure": figure, "limit": limit, "verdict": verdict}


Check = Callable[[str, Sizes], Found]


@contextmanager
def whole_float32() -> Iterator[None]:
    """Without TF32, which a study may use and a limit of 1e-4 does not forgive."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --- kernels against the definition ----------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    hidden_TH: Tensor
    weight_VH: Tensor
    tokens_T: Tensor
    coefficient_T: Tensor

    def operands(self) -> tuple[Tensor, Tensor]:
        return self.hidden_TH, self.weight_VH


@torch.no_grad()
def make_inputs(
    tokens: int, vocabulary: int, width: int, dtype: torch.dtype, device: str, common: float = 0.0
) -> Inputs:
    """Normal hidden states and head, tokens drawn from the full distribution, coefficients of which a third is zero.

    `common` is the share of a logit's variance that `GROUP` neighbouring rows have in common.
    """
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, generator=generator, device=device)
    shared_TH = normal(-(-tokens // GROUP), width).repeat_interleave(GROUP, 0)[:tokens]
    hidden_TH = (common**0.5 * shared_TH + (1 - common) ** 0.5 * normal(tokens, width)).to(dtype)
    weight_VH = (SPREAD / width**0.5 * normal(vocabulary, width)).to(dtype)
    drawn = []
    for hidden_CH in hidden_TH.split(DRAWN):
        score_CV = hidden_CH.float() @ weight_VH.float().T
        # Gumbel's way to sample
        drawn.append(score_CV.sub_(torch.empty_like(score_CV).exponential_(generator=generator).log_()).argmax(1))
    coefficient_T = normal(tokens).masked_fill(torch.rand(tokens, generator=generator, device=device) < 1 / 3, 0.0)
    return Inputs(hidden_TH.requires_grad_(), weight_VH.requires_grad_(), torch.cat(drawn), coefficient_T)


def kernel_errors(inputs: Inputs, compute: Callable[..., Any], rule: str, threshold: float) -> tuple[float, float]:
    """Largest error of a value, nats, and of a gradient, relative, against float64; raises where set sizes differ."""
    from tailrl.objective.safe_set import token_logprobs

    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in inputs.operands())
    expected = token_logprobs(hidden @ weight.T, inputs.tokens_T, rule, threshold)
    found = compute(*inputs.operands(), inputs.tokens_T, rule, threshold)
    # A logit within rounding of the cut may change sides.
    moved = (found.kept_vocab_T - expected.kept_vocab_T).abs().max().item()
    if moved > 2:
        raise ValueError(f"|V_S| differs by {moved} tokens in a row")
    names = ("logp_T", "logp_full_T", "log_kept_T", "entropy_T")
    values = max((getattr(found, name) - getattr(expected, name)).abs().max().item() for name in names)
    wanted = torch.autograd.grad((inputs.coefficient_T * expected.logp_T).sum(), (hidden, weight))
    given = torch.autograd.grad((inputs.coefficient_T * found.logp_T).sum(), inputs.operands(), materialize_grads=True)
    errors = [((g.double() - w).norm() / w.norm()).item() for g, w in zip(given, wanted, strict=True)]
    return values, max(errors)


def _by_triton(hidden_TH: Tensor, weight_VH: Tensor, tokens_T: Tensor, rule: str, threshold: float) -> Any:
    from tailrl.kernels import cuda

    return cuda.constrained_logprobs(hidden_TH, weight_VH, tokens_T, -torch.inf if rule == "full" else threshold)


def kernels(dtype: torch.dtype, rule: str, threshold: float, device: str, sizes: Sizes) -> Found:
    """Triton's kernels, compiled on a GPU and interpreted on a CPU."""
    inputs = make_inputs(sizes.tokens, sizes.vocabulary, sizes.width, dtype, device)
    with whole_float32():
        values, gradient = kernel_errors(inputs, _by_triton, rule, threshold)
    # Of bfloat16 every entry of a gradient is rounded by 2⁻⁸ on a GPU; the interpreter truncates.
    allowed = 1e-4 if dtype == torch.float32 else 2.0**-7 if device == "cuda" else 2.0**-6
    return Found(
        "values and gradients with float64's, as shares of their limits",
        max(values / 1e-4, gradient / allowed),
        1.0,
        note=f"values {values:.1e} nats of 1e-04, gradients {gradient:.1e} of {allowed:.1e}",
    )


def chunks(device: str, sizes: Sizes) -> Found:
    """The other rules take torch's operations on every device."""
    from tailrl.kernels.logprobs import constrained_logprobs

    inputs = make_inputs(sizes.tokens, sizes.vocabulary, sizes.width, torch.float32, device)
    with whole_float32():
        values, gradient = kernel_errors(inputs, constrained_logprobs, "top_k", 50.0)
    return Found("values, nats, and gradients, relative, with float64's", max(values, gradient), 1e-4)


def exact_attention(device: str, sizes: Sizes) -> Found:
    """The batch-invariant attention over part of a cache, in float32, with grouped queries and its gradients."""
    from tailrl.kernels.attention_rows import KEY_BLOCK, attention_rows
    from tailrl.kernels.batch_invariant import future_bias

    length, keys = 20 * sizes.stretch, -(-20 * sizes.stretch // KEY_BLOCK) * KEY_BLOCK
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((2 * length, 80), (80, 2 * keys), (2 * keys, 80))
    made = [torch.randn(3, 2, *shape, generator=generator, device=device) for shape in shapes]
    query, key, value = made[0], made[1][..., :keys], made[2][:, :, :keys]
    given = tuple(part.detach().requires_grad_() for part in (query, key, value))
    bias = future_bias(torch.arange(length, device=device)[None], 2, keys)
    with whole_float32():
        found = attention_rows(given[0], given[1], given[2], bias, 80**-0.5)
        wide = [part.double() for part in given]
        expected = (80**-0.5 * wide[0] @ wide[1] + bias.double()).softmax(-1) @ wide[2]
        weight = torch.randn(found.shape, generator=generator, device=device)
        own, theirs = (torch.autograd.grad((out * weight).sum(), given) for out in (found, expected))
    errors = [((g.double() - w.double()).norm() / w.double().norm()).item() for g, w in zip(own, theirs, strict=True)]
    largest = (found.double() - expected).abs().max().item()
    what = "values, and gradients, relative, with float64's"
    return Found(what, max(largest, *errors), 1e-5, note=f"gradients {max(errors):.1e}")


# --- times -----------------------------------------------------------------------------------------------


def full_logits(inputs: Inputs) -> None:
    logp_TV = (inputs.hidden_TH @ inputs.weight_VH.T).float().log_softmax(-1)
    (logp_TV.gather(-1, inputs.tokens_T[:, None]).squeeze(-1) * inputs.coefficient_T).sum().backward()


def liger(inputs: Inputs) -> None:
    """No mask and no coefficients: cross entropy, which forms its gradients in the forward."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    loss(inputs.weight_VH, inputs.hidden_TH, inputs.tokens_T).backward()


def ours(inputs: Inputs) -> None:
    from tailrl.kernels.logprobs import constrained_logprobs

    operands = *inputs.operands(), inputs.tokens_T
    (constrained_logprobs(*operands, "min_p", LOG_RHO).logp_T * inputs.coefficient_T).sum().backward()


def _seconds(case: Callable[[], object], device: str, repeats: int) -> float:
    """Median seconds of a call, after one that compiles and fills caches."""
    taken = []
    for _ in range(repeats + 1):
        _wait(device)
        begun = time.perf_counter()
        case()
        _wait(device)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def beside(peer: Callable[[Inputs], None], device: str, sizes: Sizes) -> Found:
    """Our time, forward and backward with the mask, as a multiple of a peer's without one."""
    if peer is liger and not find_spec("liger_kernel"):
        raise MissingError("liger_kernel is not installed")
    if peer is liger and device != "cuda":
        raise MissingError("Liger's kernels need a GPU")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = make_inputs(sizes.timed, sizes.vocabulary, sizes.width, dtype, device)
    theirs, own = (_seconds(partial(case, inputs), device, sizes.repeats) for case in (peer, ours))
    what = f"forward and backward of {sizes.timed} tokens, V = {sizes.vocabulary}: ours with ρ = e⁻¹³ over theirs"
    return Found(what, own / theirs, note=f"{1e3 * own:.3g} ms over {1e3 * theirs:.3g} ms")


# --- attention -----------------------------------------------------------------------------------------


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of one sequence in float64, by its definition: [L, heads, d], key heads repeated."""
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(t.double().repeat_interleave(group, 1) for t in (key, value))
    score = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    later = torch.ones_like(score[0], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", score.masked_fill(later, -torch.inf).softmax(-1), value)


def varlen(device: str, sizes: Sizes) -> Found:
    """PyTorch's kernel for ragged rows, in bfloat16."""
    if device != "cuda":
        raise MissingError("torch.nn.attention.varlen needs a GPU")
    if not find_spec("torch.nn.attention.varlen"):
        raise MissingError(f"PyTorch {torch.__version__} has no torch.nn.attention.varlen")
    from torch.nn.attention.varlen import varlen_attn

    lengths = [sizes.stretch * length for length in LENGTHS]
    query, key, value = (
        torch.randn(sum(lengths), heads, 64, device=device, dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    # Keys repeated, and causality in the place that every version knows.
    whole = [tensor.repeat_interleave(8 // tensor.shape[1], 1) for tensor in (query, key, value)]
    window = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if window else {"is_causal": True}
    kernel: Callable[..., Any] = varlen_attn  # whose signature differs between versions
    ragged = partial(kernel, *whole, ends, ends, max(lengths), max(lengths), **causal)
    rows = [tensor.split(lengths) for tensor in (query, key, value)]
    expected = torch.cat([attended(*parts) for parts in zip(*rows, strict=True)])
    error = (ragged() - expected).abs().max().item()
    query, key, value = (
        pad_sequence(list(tensor.split(lengths)), batch_first=True).transpose(1, 2) for tensor in whole
    )
    square = partial(scaled_dot_product_attention, query, key, value, is_causal=True)
    own, padded = (1e3 * _seconds(case, device, sizes.repeats) for case in (ragged, square))
    what = "torch's varlen attention with float64's, largest error"
    return Found(what, error, 0.02, note=f"forward {own:.3g} ms, padded {padded:.3g} ms")
