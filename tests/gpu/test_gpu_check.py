"""The rehearsal for a GPU on a CPU: every row that a CPU can make, and what a fault does to a row."""

import csv
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import gpu_check
import gpu_memory
import gpu_rows
import gpu_runs
import pytest
import torch
from gpu_rows import CPU, Found, kernel_errors, make_inputs
from ranks_fixture import on_ranks

from tailrl.kernels.logprobs import constrained_logprobs
from tailrl.runtime.errors import StudyError

ROOT = Path(__file__).parents[2]
NEEDS_A_GPU = {"time beside Liger", "varlen attention, bfloat16", "memory beside the plan"}
# No CPU computes the first; the others need instructions that some lack.
MAY_REFUSE: dict[str, tuple[str, ...]] = {
    "steps, vLLM, fp8": ("refused: sampler.quantization",),
    "steps, vLLM, fp8 cache": ("measured", "refused: sampler.kv_cache_dtype"),
    **dict.fromkeys(("steps, vLLM, int8", "steps, vLLM, int4"), ("measured", "refused: sampler.quantization")),
}


def read(file: Path) -> dict[str, dict[str, str]]:
    with file.open(encoding="utf-8") as opened:
        return {row["check"]: row for row in csv.DictReader(opened)}


@pytest.mark.slow
def test_a_cpu_makes_every_row_that_it_can(tmp_path: Path) -> None:
    """In a process of its own, where Triton interprets its kernels, with the repository alone on the path."""
    command = [sys.executable, str(ROOT / "tests/gpu/gpu_check.py"), "--out", str(tmp_path / "check.csv")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/workflow:{ROOT}/benchmarks", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = read(tmp_path / "check.csv")
    assert list(rows) == list(gpu_check.CHECKS)
    for name, row in rows.items():
        known = "not there: " if name in NEEDS_A_GPU else MAY_REFUSE.get(name, ("ok", "measured"))
        assert row["verdict"].startswith(known), row
        assert row["torch"] == torch.__version__ and row["transformers"]
        assert f"| {name} |" in ended.stdout
    assert rows["exact engine"]["figure"] == rows["checkpoint and resume"]["figure"] == "0"


def test_the_update_whose_memory_is_measured(tmp_path: Path) -> None:
    """Up to what a GPU alone counts; in a process of its own, for its process group lasts until that ends."""
    on_ranks(1, tmp_path, gpu_memory.updates, CPU, gpu_runs.run_of(CPU, "bfloat16"))
    samples = gpu_memory.made_samples(CPU, gpu_runs.run_of(CPU))
    assert {len(sample.rollout.tokens) for sample in samples} == {CPU.response}


class SameProcess:
    """A pool without processes."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "SameProcess":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*arguments))
        except StudyError as error:
            done.set_exception(error)
        return done


def test_what_a_machine_refuses_to_vllm_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal names the sampler's setting; a self-test that fails stays a failure."""
    given: list[Any] = []
    said = ["vLLM's log-probs are not those of sampler.rule", "sampler.quantization: fp8 needs a GPU"]

    def step(*arguments: Any) -> Found:
        given.append(arguments)
        raise StudyError(said.pop())

    monkeypatch.setattr(gpu_runs, "ProcessPoolExecutor", SameProcess)
    monkeypatch.setattr(gpu_runs, "step", step)
    for raised in (gpu_rows.RefusedError, StudyError):
        with pytest.raises(raised):
            gpu_runs.vllm_step(0.5, {"quantization": "fp8"}, "cpu", CPU)
    sampler = {"engine": "vllm", "enforce_eager": True, "quantization": "fp8"}
    assert given[0] == ("float32", 0.5, sampler, "cpu", CPU)
    monkeypatch.setattr(gpu_runs, "find_spec", lambda _: None)
    with pytest.raises(gpu_rows.MissingError, match="not installed"):
        gpu_runs.vllm_step(0.5, {}, "cpu", CPU)


def broken(*_: object) -> Found:
    raise RuntimeError("a kernel |\n died")


def lacking(*_: object) -> Found:
    import there_is_no_such_package  # type: ignore[import-not-found]  # noqa: F401

    return Found("", 0.0)


def test_a_row_that_fails_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    within, over, nan = (lambda *_, value=value: Found("numbers", value, 1.0) for value in (1.0, 1.5, float("nan")))
    checks: dict[str, Any] = {"broken": broken, "lacking": lacking, "over": over, "nan": nan, "within": within}
    assert gpu_check.failed_rows(checks, tmp_path / "out/check.csv") == 3
    verdicts = {name: row["verdict"] for name, row in read(tmp_path / "out/check.csv").items()}
    assert verdicts == {
        "broken": "failed: a kernel / died",
        "lacking": "not there: No module named 'there_is_no_such_package'",
        "over": "failed: over its limit",
        "nan": "failed: over its limit",
        "within": "ok",
    }
    assert "| over | numbers | 1.5 | 1 | failed: over its limit |" in capsys.readouterr().out


@pytest.mark.parametrize(("temperature", "coefficient"), [(1.0, 1.0), (1.001, 1.0), (1.0, 1.001)])
def test_the_kernels_row_sees_a_planted_fault(temperature: float, coefficient: float) -> None:
    inputs = make_inputs(CPU.tokens, CPU.vocabulary, CPU.width, torch.float32, "cpu")

    def compute(*arguments: Any) -> Any:
        found = constrained_logprobs(*arguments, temperature=temperature)
        if coefficient != 1:
            found.logp_T.register_hook(lambda gradient_T: coefficient * gradient_T)
        return found

    values, gradients = kernel_errors(inputs, compute, "min_p", -4.0)
    assert (values <= 1e-4) == (temperature == 1)
    assert (gradients <= 1e-4) == (temperature == coefficient == 1)


def test_the_attention_that_varlen_is_held_to_is_pytorchs() -> None:
    query, key, value = (torch.randn(7, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(0, 1) for tensor in (query, key, value)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(gpu_rows.attended(query, key, value), expected.transpose(0, 1))
