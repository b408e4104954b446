"""Calls of frameworks' own functions, taken out of a checkout's files and executed without its other imports."""

import __future__

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """N padded responses of at most L tokens: log-probs [N, L], the mask, and an advantage a response."""

    train_NL: Tensor
    infer_NL: Tensor
    mask_NL: Tensor
    advantage_NL: Tensor

    @property
    def lengths(self) -> list[int]:
        """Each response's tokens."""
        return [int(number) for number in self.mask_NL.sum(1)]

    def rows(self, values_NL: Tensor) -> list[Tensor]:
        """Each response's values, without the padding."""
        return [row[:length] for row, length in zip(values_NL, self.lengths, strict=True)]


def definitions(file: Path, needs: Mapping[str, Any], *names: str) -> Any:
    """What a file defines, executed without its imports: the named functions and classes, or all and its constants."""
    kinds = (ast.FunctionDef, ast.ClassDef, *(() if names else (ast.Assign, ast.AnnAssign)))
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, kinds) and (not names or node.name in names)]
    space: dict[str, Any] = {"__name__": "framework", "torch": torch, "math": math, "Any": Any, "Optional": Optional}
    space |= needs
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(file), "exec", flags=flags, dont_inherit=True), space)
    return SimpleNamespace(**space)


class Loose(SimpleNamespace):
    """A configuration or an enumeration: what is not set is None."""

    def __getattr__(self, name: str) -> None:
        return None


Found = Iterator[tuple[str, str, float]]
"""Source, name and value of metrics."""


# --- verl -----------------------------------------------------------------------------------------------

VERL = "verl/trainer/ppo/rollout_corr_helper.py"


def verl_helper(path: Path) -> Any:
    functional = definitions(path / "verl/utils/torch_functional.py", {}, "masked_sum", "masked_mean", "masked_var")
    proto = SimpleNamespace(from_dict=lambda tensors: SimpleNamespace(batch=tensors))
    return definitions(path / VERL, {"verl_F": functional, "DataProto": proto})


# --- NeMo-RL --------------------------------------------------------------------------------------------

NEMO = "nemo_rl/algorithms/loss/loss_functions.py"


def nemo_loss(path: Path, batch: Batch, **given: Any) -> tuple[Tensor, dict[str, float]]:
    """Its loss and metrics. It drops the first column: the log-prob of a token stands one place before it."""
    utils = definitions(path / "nemo_rl/algorithms/utils.py", {}, "masked_mean", "calculate_kl")
    kinds = dict.fromkeys(("LossInputType", "MetricNormalizer"), Loose())
    kinds["LossType"] = Loose(TOKEN_LEVEL="token", SEQUENCE_LEVEL="sequence")
    needs = kinds | {"LossFunction": object, "masked_mean": utils.masked_mean, "calculate_kl": utils.calculate_kl}
    loss_class = definitions(path / NEMO, needs, "ClippedPGLossFn").ClippedPGLossFn
    config = {
        "token_level_loss": True, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "reference_policy_kl_penalty": 0,
        "reference_policy_kl_type": "k3", "positive_example_nll_weight": 0.0,
    }  # fmt: skip
    loss = loss_class(Loose(**config | given))

    def padded(values_NL: Tensor) -> Tensor:
        return torch.cat([values_NL[:, :1], values_NL], 1)

    data = {
        "token_mask": padded(batch.mask_NL.double()),
        "sample_mask": torch.ones(len(batch.mask_NL), dtype=torch.float64),
        "advantages": padded(batch.advantage_NL),
        "prev_logprobs": padded(batch.train_NL),
        "generation_logprobs": padded(batch.infer_NL),
        "input_ids": padded(batch.mask_NL.long()),
    }
    counts = torch.tensor(float(len(batch.mask_NL))), batch.mask_NL.sum().double()
    found: tuple[Tensor, dict[str, float]] = loss(batch.train_NL, data, *counts)
    return found


def nemo_metrics(path: Path, batch: Batch) -> Found:
    for name, value in nemo_loss(path, batch)[1].items():
        yield NEMO, name, float(value)


# --- prime-rl, slime -------------------------------------------------------------------------------------


def prime_metrics(path: Path, batch: Batch) -> Found:
    source = "src/prime_rl/trainer/rl/loss.py"
    function = definitions(path / source, {}, "compute_importance_ratio_and_mismatch_kl")
    found_NL = function.compute_importance_ratio_and_mismatch_kl(batch.train_NL, batch.infer_NL)[2]
    yield source, "mismatch_kl", found_NL[batch.mask_NL].mean().item()


def slime_metrics(path: Path, batch: Batch) -> Found:
    source = "slime/backends/megatron_utils/cp_utils.py"
    parallel = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    function = definitions(path / source, {"mpu": parallel}, "get_sum_of_sample_mean")
    masks = [torch.ones(length, dtype=torch.float64) for length in batch.lengths]
    mean = function.get_sum_of_sample_mean(batch.lengths, batch.lengths, masks)
    found = mean((batch.train_NL - batch.infer_NL)[batch.mask_NL].abs()) / len(masks)
    yield source, "train_rollout_logprob_abs_diff", found.item()
