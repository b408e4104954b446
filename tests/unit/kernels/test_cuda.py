"""The CUDA paths of log-probs and noise where there is no CUDA: under the interpreter, and up to the machine code.

Triton decides when it is imported whether it interprets, and other tests may have imported it: hence the processes.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tailrl.kernels import logprobs

FIXTURES = Path(__file__).parents[2] / "fixtures"


def run(*arguments: str, **environment: str) -> str:
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("file", ["kernels_logprobs.py", "kernels_noise.py", "kernels_attention.py"])
def test_under_the_interpreter(file: str) -> None:
    arguments = ("-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", str(FIXTURES / file))
    passed = run(*arguments, TRITON_INTERPRET="1", OMP_NUM_THREADS="1").splitlines()[-1]
    assert "passed" in passed and "skipped" not in passed


def test_a_cpu_needs_no_triton() -> None:
    script = (
        "import sys, torch; from tailrl.kernels.logprobs import constrained_logprobs; "
        "hidden = torch.randn(3, 4, requires_grad=True); tokens = torch.tensor([1, 2, 3]); "
        "constrained_logprobs(hidden, torch.randn(9, 4), tokens, 'min_p', -2.0).logp_T.sum().backward(); "
        "print(*sorted(name for name in sys.modules if name.split('.')[0] == 'triton'))"
    )
    assert run("-c", script).strip() == ""


class OnCuda(Tensor):
    """A tensor that says it is on a CUDA device."""

    is_cuda = True


@pytest.mark.parametrize(("rule", "threshold", "expected"), [("full", 0.0, -torch.inf), ("min_p", -13.0, -13.0)])
def test_a_cuda_device_takes_the_kernels(
    rule: str, threshold: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tailrl.kernels import cuda

    monkeypatch.setattr(cuda, "constrained_logprobs", lambda *arguments: arguments)
    hidden_TH, weight_VH, tokens_T = torch.randn(3, 4).as_subclass(OnCuda), torch.randn(9, 4), torch.tensor([1, 2, 3])
    found: Any = logprobs.constrained_logprobs(hidden_TH, weight_VH, tokens_T, rule, threshold, 0.5, True)
    assert found[0] is hidden_TH and found[1] is weight_VH and found[2] is tokens_T
    assert found[3:] == (expected, 0.5, True)
    wide = logprobs.constrained_logprobs(hidden_TH.double(), weight_VH, tokens_T, rule, threshold)
    assert wide.logp_T.dtype == torch.float64, "the kernels know float32 only"
    other = logprobs.constrained_logprobs(hidden_TH, weight_VH, tokens_T, "top_k", 3.0)
    assert (other.kept_vocab_T == 3).all(), "nor do they know other rules"


SHARED_BYTES = 99 * 1024  # of a program: what the smallest GPU with bfloat16 has
# What each kernel is given, in order; V is a value in the dtype of the products, E an entry.
SIGNATURES = {
    "block_sums": "*fp32 *fp32 *fp32 *fp32 i32 fp32",
    "safe_sums": "*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 *i32 i32 fp32",
    "keep_safe": "*fp32 *fp32 *fp32 *i32 *i32 *u8 *u8 *E i32 fp32",
    "spread_kept": "*V *i64 *i32 *i32 *E *i32 *i32 *fp32 *i64 *fp32 i32 i32 i32",
    "spread_computed": "*V *fp32 *i64 *fp32 *fp32 *fp32 *i32 *fp32 i32 i32 fp32",
    "hash_tokens": "*i32 *i32 i32",
    "attend": "*V *V *V *fp32 *V i32 i32 i32 i32 i32 i32 i32 i32 i32 fp32",
}


@pytest.mark.parametrize(("value", "entry"), [("bf16", "i32"), ("fp32", "i64")])
@pytest.mark.parametrize("name", SIGNATURES)
def test_kernels_compile_for_an_h100(
    name: str, value: str, entry: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The interpreter takes more than the compiler does. No GPU is needed for it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tailrl.kernels import attention_rows, cuda_passes, triton_kernels
    from tailrl.objective import noise_kernel

    kernel = getattr(triton_kernels, name, None) or getattr(noise_kernel, name)
    types = SIGNATURES[name].replace("V", value).replace("E", entry).split()
    sizes = {"BLOCK": cuda_passes.BLOCK_TOKENS, "STEP": cuda_passes.ENTRIES_STEP}
    sizes |= {
        "HEADS": 8,
        "SIZE": 240,
        "WIDTH": 256,
        "QUERIES": attention_rows.QUERY_ROWS,
        "KEYS": attention_rows.KEY_BLOCK,
    }
    constants = {argument: sizes[argument] for argument in kernel.arg_names if argument in sizes}
    signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
    places = {(kernel.arg_names.index(argument),): size for argument, size in constants.items()}
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": cuda_passes.WARPS}
    if name == "attend":
        options = {"num_warps": attention_rows.ATTENTION_WARPS, "num_stages": attention_rows.ATTENTION_STAGES}
    compiled = triton.compile(ASTSource(kernel, signature, places, {}), target=target, options=options)
    assert compiled.asm["ptx"] and compiled.metadata.shared <= SHARED_BYTES
