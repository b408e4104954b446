"""Calls of frameworks' own functions, taken out of a checkout's files and executed without its other imports."""

import __future__

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch
import yaml
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


def make_batch(responses: int = 64, longest: int = 60) -> Batch:
    """Seeded log-probs; what is padding has values that no mean may see."""
    torch.manual_seed(28)
    lengths_N1 = torch.randint(1, longest + 1, (responses, 1))
    lengths_N1[0] = longest
    mask_NL = torch.arange(longest) < lengths_N1
    train_NL = -torch.empty(responses, longest, dtype=torch.float64).exponential_(1.0)
    infer_NL = (train_NL + 0.3 * torch.randn(responses, longest, dtype=torch.float64)).clamp(max=0.0)
    advantage_NL = torch.randn(responses, 1, dtype=torch.float64).expand(responses, longest)
    return Batch(train_NL.where(mask_NL, -9.0), infer_NL.where(mask_NL, -1.0), mask_NL, advantage_NL)


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

Weigh = Callable[[Path, Batch, str], tuple[str, Tensor]]
"""Checkout, batch and lines of configuration → source, and weights [N, L] or a loss []."""


def settings(text: str, prefix: str) -> dict[str, Any]:
    """The values of lines such as `prefix.name=value`."""
    found = re.findall(rf"^{re.escape(prefix)}\.(\w+)=(.*)$", text, re.MULTILINE)
    return {name: yaml.safe_load(value.strip("'")) for name, value in found}


# --- verl -----------------------------------------------------------------------------------------------

VERL = "verl/trainer/ppo/rollout_corr_helper.py"


def verl_helper(path: Path) -> Any:
    functional = definitions(path / "verl/utils/torch_functional.py", {}, "masked_sum", "masked_mean", "masked_var")
    proto = SimpleNamespace(from_dict=lambda tensors: SimpleNamespace(batch=tensors))
    return definitions(path / VERL, {"verl_F": functional, "DataProto": proto})


def verl_weights(path: Path, batch: Batch, text: str) -> tuple[str, Tensor]:
    given = settings(text, "algorithm.rollout_correction")
    proto, mask_NL, _ = verl_helper(path).compute_rollout_correction_and_rejection_mask(
        batch.train_NL, batch.infer_NL, batch.mask_NL.long(), **{"rollout_is": None} | given
    )
    weight_NL = 1.0 if proto is None else proto.batch["rollout_is_weights"]
    return VERL, weight_NL * mask_NL * batch.mask_NL


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


def nemo_weights(path: Path, batch: Batch, text: str) -> tuple[str, Tensor]:
    return NEMO, nemo_loss(path, batch, **settings(text, "loss_fn"))[0]


# --- prime-rl, slime, SkyRL, OpenRLHF -------------------------------------------------------------------


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


def slime_weights(path: Path, batch: Batch, text: str) -> tuple[str, Tensor]:
    words = [*re.findall(r"--(tis[\w-]+) ([\d.]+)", text), *re.findall(r"(tis_\w+|use_rs): ([\w.]+)", text)]
    told = {name.replace("-", "_"): yaml.safe_load(value) for name, value in words}
    given = Loose(**{"use_tis": True, "tis_clip_low": 0.0} | told)
    lists = {
        "train_log_probs": batch.rows(batch.train_NL),
        "rollout_log_probs": batch.rows(batch.infer_NL),
        "loss_masks": [torch.ones(length, dtype=torch.float64) for length in batch.lengths],
    }
    weight_NL = torch.zeros_like(batch.train_NL)
    if "mis.yaml" in text:
        source = "examples/train_infer_mismatch_helper/mis.py"
        weights, masks, _ = definitions(path / source, {}).compute_mis_weights(given, **lists)
        weight_NL[batch.mask_NL] = torch.cat(weights) * torch.cat(masks)
    else:
        source = "slime/backends/megatron_utils/loss.py"
        name = "icepop_function" if "icepop_function" in text else "vanilla_tis_function"
        ones_T = torch.ones(int(batch.mask_NL.sum()), dtype=torch.float64)
        function = getattr(definitions(path / source, {}, name), name)
        weight_NL[batch.mask_NL] = function(given, pg_loss=ones_T, **lists)[0]
    return source, weight_NL


def skyrl_weights(path: Path, batch: Batch, text: str) -> tuple[str, Tensor]:
    source = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
    utils = path / "skyrl/backends/skyrl_train/utils/torch_utils.py"
    needs = vars(definitions(utils, {}, "safe_exp_delta", "masked_mean"))
    given = Loose(**settings(text, "trainer.algorithm.off_policy_correction"))
    functions = definitions(path / source, needs)
    ratio_NL, _, mask_NL = functions.compute_off_policy_correction(
        batch.train_NL, batch.infer_NL, batch.mask_NL.double(), given
    )
    return source, (1.0 if ratio_NL is None else ratio_NL) * mask_NL * batch.mask_NL


def openrlhf_weights(path: Path, batch: Batch, text: str) -> tuple[str, Tensor]:
    source = "openrlhf/models/loss.py"
    mean = definitions(path / "openrlhf/models/utils.py", {}, "masked_mean").masked_mean
    functions = definitions(path / source, {"nn": torch.nn, "masked_mean": mean}, "PolicyLoss", "aggregate_loss")
    [level], [mode] = (re.findall(rf"is_correction_{name} (\S+)", text) for name in ("level", "mode"))
    [bounds] = re.findall(r"is_correction_threshold (\S+) (\S+)", text)
    limits = [float(bound) for bound in bounds]
    loss = functions.PolicyLoss(is_correction_level=level, is_correction_mode=mode, is_correction_threshold=limits)
    return source, loss(batch.train_NL, batch.train_NL, batch.advantage_NL, batch.mask_NL.double(), batch.infer_NL)[0]


WEIGHTS: dict[str, Weigh] = {
    "verl": verl_weights,
    "NeMo-RL": nemo_weights,
    "slime": slime_weights,
    "SkyRL": skyrl_weights,
    "OpenRLHF": openrlhf_weights,
}
