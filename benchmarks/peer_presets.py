"""The presets of `config/presets.yaml` against the peers' own functions, executed on random log-probs.

    python benchmarks/peer_presets.py FOLDER --out docs/results/presets.csv

FOLDER holds checkouts of verl, SkyRL, slime, OpenRLHF and prime-rl at the versions of `presets.yaml`; TRL's functions
come from its wheel. The files of a mode that was read at another version are in a folder of their own, such as
`verl@c6236f515`. `--only trl verl/dppo_tv` renews these rows and keeps the others. Only the named functions of a
file are executed, since their modules import whole training stacks. A mode that stands inside a longer function (TRL's
and NeMo-RL's weights) is held to its lines by `tests/unit/config/test_presets.py` instead. Each row has the largest
difference of a token's weight, relative to a weight of at least 1; for score centering that of its term's gradient by
the trainer's logits. verl and SkyRL clamp log-ratios to 20 nats, which changes weights below 2e-9.
"""

import __future__

import argparse
import ast
import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor

from tailrl.config.arm import Arm
from tailrl.config.presets import frameworks, presets, version_of
from tailrl.objective.centering import expected_score
from tailrl.objective.corrections import correct, normaliser
from tailrl.objective.loss import surrogate
from tailrl.objective.safe_set import TokenLogprobs

LENGTHS = (1, 3, 17, 40, 8, 60, 2, 25)
OF_A_LOSS = tuple(
    f"{framework}/{mode}"
    for framework in frameworks()
    for mode in ("gspo", "cispo", "sapo", "luspo", "vespo", "opsm")
    if f"{framework}/{mode}" in presets()
)
"""Presets whose loss is compared after an update, since their ratio is 1 before it."""

VOCABULARY = 400
"""Tokens of the distributions that score centering is compared on: a head of 128 leaves a third of the mass."""

SCALES = (0.0008, 0.05, 0.4, 1.5)
"""Standard deviations of Δ, nats: at the smallest the geometric masks keep some, at the largest all drop some."""


@dataclass(frozen=True)
class Batch:
    """Padded log-probs [N, L] in float64, and the same in packed form."""

    train_NL: Tensor
    infer_NL: Tensor
    mask_NL: Tensor
    advantage_N: Tensor
    new_NL: Tensor  # the trainer after an update
    scale: float
    seed: int


def random_batch(scale: float, seed: int) -> Batch:
    """Log-probs of trainer and sampler that differ by about `scale` nats a token, and by more in a few tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    mask_NL = torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]
    infer_NL = -torch.rand(shape, generator=generator, dtype=torch.float64) * 3 - 0.01
    delta_NL = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    delta_NL = torch.where(torch.rand(shape, generator=generator) < 0.02, 8 * delta_NL, delta_NL)
    train_NL = (infer_NL + delta_NL).clamp(max=-0.001)
    advantage_N = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    new_NL = train_NL + scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return Batch(train_NL, infer_NL, mask_NL, advantage_N, new_NL.clamp(max=-0.001), scale, seed)


def distributions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits of trainer and sampler at each token, [T, V], that differ by about the batch's scale."""
    generator = torch.Generator().manual_seed(batch.seed)
    shape = (int(batch.mask_NL.sum()), VOCABULARY)
    infer_TV = torch.randn(shape, generator=generator, dtype=torch.float64)
    train_TV = infer_TV + batch.scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return train_TV.requires_grad_(), infer_TV


def ours(preset: str, batch: Batch) -> Tensor:
    """The preset's weights of all tokens, [N, L], 0 in the padding; with score centering `_of_the_centering`."""
    arm = Arm.model_validate({"correction": {"preset": preset}})
    if arm.correction.centering != "none":
        return _of_the_centering(arm, batch)
    if preset in OF_A_LOSS:
        return _of_the_loss(arm, batch)
    correction = arm.correction
    sequence_T = batch.mask_NL.nonzero()[:, 0]
    infer_T = batch.infer_NL[batch.mask_NL]
    delta_T = batch.train_NL[batch.mask_NL] - infer_T
    outside_T = torch.zeros_like(sequence_T, dtype=torch.bool)
    advantage_T = batch.advantage_N[sequence_T]
    found = correct(delta_T, outside_T, sequence_T, len(LENGTHS), correction, None, infer_T, advantage_T)
    weight_T = found.weight_T / normaliser(correction, found.ratio_X)
    return torch.zeros_like(batch.train_NL).masked_scatter(batch.mask_NL, weight_T)


def _of_the_loss(arm: Arm, batch: Batch) -> Tensor:
    """The gradient of the arm's loss by the log-probs of the moved trainer, over −A: what weighs each token."""
    sequence_T = batch.mask_NL.nonzero()[:, 0]
    old_T, infer_T, new_T = (x[batch.mask_NL] for x in (batch.train_NL, batch.infer_NL, batch.new_NL))
    logp_T, zero_T = new_T.clone().requires_grad_(), torch.zeros_like(new_T)
    inside_T = torch.zeros_like(sequence_T, dtype=torch.bool)
    scored = TokenLogprobs(logp_T, new_T, zero_T, sequence_T, zero_T, inside_T)
    advantage_T = batch.advantage_N[sequence_T]
    numbers = (len(LENGTHS), 1, arm.correction, arm.clip, old_T)
    loss = surrogate(scored, infer_T, advantage_T, sequence_T, *numbers).loss
    weight_T = -torch.autograd.grad(loss, logp_T)[0] / advantage_T
    return torch.zeros_like(batch.train_NL).masked_scatter(batch.mask_NL, weight_T)


def _of_the_centering(arm: Arm, batch: Batch) -> Tensor:
    """The gradient of the expected score by the trainer's logits, [T, V]."""
    train_TV, infer_TV = distributions(batch)
    expected_T = expected_score(train_TV.log_softmax(-1), infer_TV.log_softmax(-1), arm.correction)
    return torch.autograd.grad(expected_T.sum(), train_TV)[0]


def _centred_by(function: Callable[[Tensor, Tensor], Tensor], k: int, batch: Batch) -> Tensor:
    """The same of a peer's function of the head's log-probs, of trainer and sampler, both [T, K]."""
    train_TV, infer_TV = distributions(batch)
    logq_TV = infer_TV.log_softmax(-1)
    head_TK = logq_TV.topk(k, dim=-1).indices
    term_T = function(train_TV.log_softmax(-1).gather(-1, head_TK), logq_TV.gather(-1, head_TK))
    return torch.autograd.grad(term_T.sum(), train_TV)[0]


def definitions(file: Path, *names: str, **known: Any) -> SimpleNamespace:
    """The functions and classes of these names in a file, executed with those in `known`; all if none is named."""
    chosen = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        own = {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)} - {None}
        if own and not isinstance(node, ast.Import | ast.ImportFrom) and (not names or own & {*names}):
            chosen.append(node)
    scope = {"torch": torch, "math": math, "dataclass": dataclass, "field": field, "nn": torch.nn, **known}
    # Annotations stay text: their types belong to modules that are not imported.
    code = compile(ast.Module(chosen, []), str(file), "exec", flags=__future__.annotations.compiler_flag)
    exec(code, scope)
    return SimpleNamespace(**scope)


Weigh = Callable[[Batch], Tensor]


def verl(folder: Path) -> Iterator[tuple[str, Weigh, str]]:
    """Every factory of RolloutCorrectionConfig through `compute_rollout_correction_and_rejection_mask`."""
    sums = definitions(folder / "verl/utils/torch_functional.py", "masked_sum", "masked_mean")
    config = definitions(
        folder / "verl/trainer/config/algorithm.py", "RolloutCorrectionConfig", BaseConfig=object
    ).RolloutCorrectionConfig
    proto = SimpleNamespace(from_dict=lambda tensors: SimpleNamespace(batch=tensors))
    helper = definitions(
        folder / "verl/trainer/ppo/rollout_corr_helper.py",
        verl_F=sums,
        DataProto=proto,
    )
    dppo, ratio_losses = ("dppo_tv", "dppo_kl"), ("gspo", "cispo", "sapo")
    for mode in (name for name in frameworks()["verl"].modes if name not in {*dppo, *ratio_losses, *VERL_CENTERED}):

        def weigh(batch: Batch, mode: str = mode) -> Tensor:
            own = getattr(config, "disabled" if mode == "default" else mode)()
            weights, mask_NL, _ = helper.compute_rollout_correction_and_rejection_mask(
                batch.train_NL,
                batch.infer_NL,
                batch.mask_NL.double(),
                own.rollout_is,
                own.rollout_is_threshold,
                own.rollout_is_batch_normalize,
                own.rollout_rs,
                own.rollout_rs_threshold,
            )
            found: Tensor = mask_NL if weights is None else mask_NL * weights.batch["rollout_is_weights"]
            return found

        yield mode, weigh, "compute_rollout_correction_and_rejection_mask"
    limits = yaml.safe_load((folder / "verl/trainer/config/actor/actor.yaml").read_text(encoding="utf-8"))
    losses = definitions(
        folder / "verl/trainer/ppo/core_algos.py",
        *(f"compute_policy_loss_{mode}" for mode in dppo + ratio_losses),
        ActorConfig=SimpleNamespace,
        register_policy_loss=lambda _: lambda function: function,
        verl_F=sums,
        AlgoConfig=type(None),
        agg_loss=lambda loss_mat, loss_mask, **_: (loss_mat * loss_mask).sum(),
    )
    for mode in dppo + ratio_losses:

        def gradient(batch: Batch, mode: str = mode) -> Tensor:
            old_NL, new_NL = (batch.infer_NL, batch.train_NL) if mode in dppo else (batch.train_NL, batch.new_NL)
            new_NL = new_NL.clone().requires_grad_()
            advantage_NL = batch.advantage_N[:, None].expand_as(new_NL)
            own = SimpleNamespace(**limits, get=limits.get, global_batch_info={})
            function = getattr(losses, f"compute_policy_loss_{mode}")
            # Its mean over a response's tokens, that of gspo and sapo, is the sum of the stand-in.
            loss, _ = function(old_NL, new_NL, advantage_NL, batch.mask_NL.double(), config=own)
            return -torch.autograd.grad(loss, new_NL)[0] / advantage_NL

        yield mode, gradient, f"compute_policy_loss_{mode}"
    yield from _verl_centering(folder)


VERL_CENTERED: dict[str, tuple[str | None, float | str]] = {
    "bypass_pg_sc": (None, 2.0),
    "bypass_pg_token_tis_sc": ("token", 2.0),
    "bypass_pg_token_icepop_sc": ("token", "0.5_5.0"),
}
"""`rollout_is` and `rollout_is_threshold` of verl's factories with score centering."""


def _verl_centering(folder: Path) -> Iterator[tuple[str, Weigh, str]]:
    """`score_centering_correction` with the weights of `score_centering_weight_fn`."""
    parse = definitions(folder / "verl/trainer/ppo/rollout_corr_helper.py", "_parse_rollout_is_threshold")
    helper = definitions(
        folder.with_name("verl@c6236f515") / "verl/trainer/ppo/score_centering.py",
        "score_centering_weight_fn",
        "score_centering_correction",
        _parse_rollout_is_threshold=parse._parse_rollout_is_threshold,
    )
    for mode, own in VERL_CENTERED.items():

        def weigh(batch: Batch, own: tuple[str | None, float | str] = own) -> Tensor:
            weight = helper.score_centering_weight_fn(*own)
            return _centred_by(lambda p, q: helper.score_centering_correction(p, q, weight)[0], 128, batch)

        yield mode, weigh, "score_centering_correction"


def skyrl(folder: Path) -> Iterator[tuple[str, Weigh, str]]:
    """`compute_off_policy_correction`, and the gradient of `dppo_policy_loss`."""
    utils = folder / "skyrl/backends/skyrl_train/utils"
    sums = definitions(utils / "torch_utils.py", "masked_mean", "safe_exp_delta")
    known = {"masked_mean": sums.masked_mean, "safe_exp_delta": sums.safe_exp_delta}
    helper = definitions(utils / "off_policy_correction_utils.py", **known)
    config = definitions(folder / "skyrl/train/config/config.py", "OffPolicyCorrectionConfig", BaseConfig=object)
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "tis_token": {"tis_ratio_type": "token"},
        "tis_sequence": {"tis_ratio_type": "sequence"},
        "mask_geometric": {"sequence_mask_metric": "geometric"},
        "mask_product": {"sequence_mask_metric": "product"},
        "outlier_token": {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0},
    }
    for mode, own in settings.items():

        def weigh(batch: Batch, own: dict[str, Any] = own) -> Tensor:
            correction = config.OffPolicyCorrectionConfig(**own)
            ratio, _, mask = helper.compute_off_policy_correction(
                batch.train_NL, batch.infer_NL, batch.mask_NL.double(), correction
            )
            found: Tensor = mask if ratio is None else mask * ratio
            return found

        yield mode, weigh, "compute_off_policy_correction"
    off = config.OffPolicyCorrectionConfig()
    losses = definitions(
        utils / "ppo_utils.py",
        *("dppo_policy_loss", "gspo_policy_loss", "sapo_policy_loss"),
        register_policy_loss=lambda _: lambda function: function,
        PolicyLossType=SimpleNamespace(DPPO="dppo", GSPO="gspo", SAPO="sapo"),
        reduce_loss=lambda loss, mask: (loss * mask).sum(),
        apply_off_policy_correction=helper.apply_off_policy_correction,
        **known,
    )
    for kind, delta in (("binary_tv", 0.2), ("binary_kl", 0.05)):
        loss_settings = SimpleNamespace(
            dppo=SimpleNamespace(dppo_type=kind, delta_low=delta, delta_high=delta), off_policy_correction=off
        )

        def gradient(batch: Batch, own: Any = loss_settings) -> Tensor:
            train_NL = batch.train_NL.clone().requires_grad_()
            advantage_NL = batch.advantage_N[:, None].expand_as(train_NL)
            loss, _ = losses.dppo_policy_loss(
                train_NL, train_NL.detach(), advantage_NL, own, batch.mask_NL.double(), batch.infer_NL
            )
            return -torch.autograd.grad(loss, train_NL)[0] / advantage_NL

        yield f"dppo_{kind}", gradient, "dppo_policy_loss"
    sapo = definitions(folder / "skyrl/train/config/config.py", "SAPOConfig", BaseConfig=object).SAPOConfig()
    ratio_settings = SimpleNamespace(
        eps_clip_low=0.2, eps_clip_high=0.2, sapo=sapo, off_policy_correction=off, loss_reduction="sequence_mean"
    )
    for mode in ("gspo", "sapo"):

        def moved(batch: Batch, mode: str = mode) -> Tensor:
            new_NL, mask_NL = batch.new_NL.clone().requires_grad_(), batch.mask_NL.double()
            advantage_NL = batch.advantage_N[:, None].expand_as(new_NL)
            function = getattr(losses, f"{mode}_policy_loss")
            loss, _ = function(new_NL, batch.train_NL, advantage_NL, ratio_settings, mask_NL, batch.infer_NL)
            return -torch.autograd.grad(loss, new_NL)[0] / advantage_NL

        yield mode, moved, f"{mode}_policy_loss"


def slime(folder: Path) -> Iterator[tuple[str, Weigh, str]]:
    """`vanilla_tis_function`, `icepop_function`, and `compute_mis_weights` with the settings of `mis.yaml`."""
    file = folder / "slime/backends/megatron_utils/loss.py"
    losses = definitions(file, "vanilla_tis_function", "icepop_function")
    for mode, name in (("tis", "vanilla_tis_function"), ("icepop", "icepop_function")):

        def weigh(batch: Batch, name: str = name) -> Tensor:
            rows = {"train_log_probs": batch.train_NL, "rollout_log_probs": batch.infer_NL}
            args = SimpleNamespace(tis_clip=2.0, tis_clip_low=0)
            one = torch.ones_like(batch.train_NL).flatten()
            flat = {key: list(rows_NL) for key, rows_NL in rows.items()}
            loss, _, _ = getattr(losses, name)(args, pg_loss=one, loss_masks=[], **flat)
            found: Tensor = loss.view_as(batch.train_NL) * batch.mask_NL
            return found

        yield mode, weigh, name
    mis = definitions(folder / "examples/train_infer_mismatch_helper/mis.py")
    settings = yaml.safe_load((folder / "examples/train_infer_mismatch_helper/mis.yaml").read_text(encoding="utf-8"))

    def weigh_mis(batch: Batch) -> Tensor:
        rows = [
            [row[keep] for row, keep in zip(x, batch.mask_NL, strict=True)] for x in (batch.train_NL, batch.infer_NL)
        ]
        masks = [torch.ones_like(row) for row in rows[0]]
        weights, kept, _ = mis.compute_mis_weights(
            SimpleNamespace(**settings), train_log_probs=rows[0], rollout_log_probs=rows[1], loss_masks=masks
        )
        packed = torch.cat([w * k for w, k in zip(weights, kept, strict=True)])
        return torch.zeros_like(batch.train_NL).masked_scatter(batch.mask_NL, packed)

    yield "mis", weigh_mis, "compute_mis_weights"
    yield from _slime_losses(folder)
    centering = definitions(
        folder.with_name("slime@2e5cd7cd5") / "slime/utils/score_centering.py",
        "score_centering_correction",
        importance_weights=lambda ratio, *_: torch.ones_like(ratio),  # that of mode none, its default
    )

    def centred(batch: Batch) -> Tensor:
        return _centred_by(lambda p, q: centering.score_centering_correction(p, q)[0], 128, batch)

    yield "score_centering", centred, "score_centering_correction"


def _slime_losses(folder: Path) -> Iterator[tuple[str, Weigh, str]]:
    """The gradients of `compute_policy_loss` and `compute_cispo_loss` after an update, by the limits of its default."""
    torch.compiler.set_stance("force_eager")
    losses = definitions(
        folder / "slime/utils/ppo_utils.py",
        *("compute_opsm_mask", "compute_gspo_kl", "compute_policy_loss", "compute_cispo_loss"),
    )
    for mode, name in (("gspo", "compute_gspo_kl"), ("cispo", "compute_cispo_loss"), ("opsm", "compute_opsm_mask")):

        def gradient(batch: Batch, mode: str = mode) -> Tensor:
            new_NL, mask_NL = batch.new_NL.clone().requires_grad_(), batch.mask_NL.double()
            advantage_NL = batch.advantage_N[:, None].expand_as(new_NL)
            rows = (list(new_NL), list(batch.train_NL))
            kl_NL = batch.train_NL - new_NL
            if mode == "gspo":
                kl_NL = losses.compute_gspo_kl(*rows, rows[0], list(mask_NL)).view_as(new_NL)
            if mode == "cispo":
                loss_NL, _ = losses.compute_cispo_loss(kl_NL, new_NL, advantage_NL, 0.2, 0.2)
            else:
                loss_NL, _ = losses.compute_policy_loss(kl_NL, advantage_NL, 0.2, 0.2)
            if mode == "opsm":
                own = SimpleNamespace(opsm_delta=1e-4)
                kept, _ = losses.compute_opsm_mask(own, *rows, list(advantage_NL), list(mask_NL))
                loss_NL = loss_NL * kept.view_as(loss_NL)
            return -torch.autograd.grad((loss_NL * mask_NL).sum(), new_NL)[0] / advantage_NL

        yield mode, gradient, name


def openrlhf(folder: Path) -> Iterator[tuple[str, Weigh, str]]:
    """The gradient of `PolicyLoss` at a ratio of 1, which is the weight."""
    mean = definitions(folder / "openrlhf/models/utils.py", "masked_mean").masked_mean
    losses = definitions(folder / "openrlhf/models/loss.py", "PolicyLoss", "aggregate_loss", masked_mean=mean)
    for mode in ("tis", "icepop", "seq-mask-tis"):
        function = losses.PolicyLoss(
            enable_vllm_is_correction=True, vllm_is_truncated_threshold=[0.5, 5.0], vllm_is_correction_type=mode
        )

        def weigh(batch: Batch, function: Any = function) -> Tensor:
            train_NL = batch.train_NL.clone().requires_grad_()
            advantage_NL = batch.advantage_N[:, None].expand_as(train_NL)
            mask_NL = batch.mask_NL.double()
            loss, *_ = function(
                train_NL, train_NL.detach(), advantage_NL, mask_NL, batch.infer_NL, batch_num_tokens=1.0
            )
            return -torch.autograd.grad(loss, train_NL)[0] / advantage_NL

        yield mode, weigh, "PolicyLoss.forward"
    gspo = losses.PolicyLoss(policy_loss_type="gspo")

    def moved(batch: Batch) -> Tensor:
        new_NL, mask_NL = batch.new_NL.clone().requires_grad_(), batch.mask_NL.double()
        advantage_NL = batch.advantage_N[:, None].expand_as(new_NL)
        loss, *_ = gspo(new_NL, batch.train_NL, advantage_NL, mask_NL, batch.infer_NL, global_batch_size=1.0)
        # Its mean over a response's tokens is a sum here.
        return -torch.autograd.grad(loss, new_NL)[0] / advantage_NL * mask_NL.sum(-1, keepdim=True)

    yield "gspo", moved, "PolicyLoss.forward"


def prime_rl(folder: Path) -> Iterator[tuple[str, Weigh, str]]:
    """The gradient of `default_loss_fn` without its KL term."""
    losses = definitions(
        folder / "src/prime_rl/trainer/rl/loss.py",
        "LossInputs",
        "LossOutputs",
        "_safe_mean",
        "compute_importance_ratio_and_mismatch_kl",
        "default_loss_fn",
    )
    config = SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.2, adv_tau=1.0, kl_tau=0.0)

    def weigh(batch: Batch) -> Tensor:
        rows = []
        for train_L, infer_L, mask_L, advantage in zip(
            batch.train_NL, batch.infer_NL, batch.mask_NL, batch.advantage_N, strict=True
        ):
            own_L = train_L.clone().requires_grad_()
            advantage_L = advantage.expand_as(train_L)
            inputs = losses.LossInputs(own_L, infer_L, None, advantage_L, mask_L)
            rows.append(-torch.autograd.grad(losses.default_loss_fn(inputs, config).loss, own_L)[0] / advantage)
        return torch.stack(rows)

    yield "default", weigh, "default_loss_fn"


def trl(_: Path) -> Iterator[tuple[str, Weigh, str]]:
    """`get_off_policy_mask` of the installed wheel, and the gradient of `_compute_loss` after an update."""
    from trl import GRPOConfig, GRPOTrainer

    def weigh(batch: Batch) -> Tensor:
        mask_NL = batch.mask_NL.double()
        kept: Tensor = GRPOTrainer.get_off_policy_mask(
            batch.advantage_N[:, None], batch.train_NL, batch.infer_NL, mask_NL, 0.5
        )
        return kept * mask_NL

    yield "off_policy_mask", weigh, "GRPOTrainer.get_off_policy_mask"
    defaults = {each.name: each.default for each in fields(GRPOConfig)}
    for mode in ("sapo", "luspo", "vespo"):

        def gradient(batch: Batch, mode: str = mode) -> Tensor:
            new_NL, mask_NL = batch.new_NL.clone().requires_grad_(), batch.mask_NL.double()
            level = "sequence" if mode == "luspo" else "token"
            trainer = _without_a_model(GRPOTrainer, defaults | {"loss_type": mode, "importance_sampling_level": level})
            trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new_NL, torch.zeros_like(new_NL), None)
            trainer.vllm_importance_sampling_correction = mode != "vespo"
            # Its mode sequence_mask with the cap of 3, which stands within a longer function.
            ratio_N1 = ((batch.train_NL - batch.infer_NL) * mask_NL).sum(-1, keepdim=True).exp()
            ids_NL = torch.zeros_like(batch.train_NL, dtype=torch.int64)
            inputs = {"prompt_ids": ids_NL, "prompt_mask": ids_NL, "completion_ids": ids_NL, "completion_mask": mask_NL}
            inputs |= {"advantages": batch.advantage_N, "old_per_token_logps": batch.train_NL}
            inputs |= {"num_items_in_batch": torch.ones(())}
            if mode != "vespo":
                inputs["importance_sampling_ratio"] = ratio_N1.masked_fill(ratio_N1 > 3.0, 0.0)
            loss = GRPOTrainer._compute_loss(trainer, None, inputs)
            weight_NL: Tensor = -torch.autograd.grad(loss, new_NL)[0] / batch.advantage_N[:, None]
            # Its means over responses, and with sapo over their tokens, are sums here.
            means: dict[str, Tensor | float] = {"sapo": len(LENGTHS) * mask_NL.sum(-1, keepdim=True)}
            means |= {"luspo": len(LENGTHS), "vespo": 1}
            return weight_NL * means[mode]

        yield mode, gradient, "GRPOTrainer._compute_loss"


def _without_a_model(trainer: Any, args: dict[str, Any]) -> SimpleNamespace:
    """What `_compute_loss` reads of a GRPOTrainer with these settings, on one rank and without a KL."""
    alone = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x)
    return SimpleNamespace(
        args=SimpleNamespace(**args | {"steps_per_generation": 1}),
        accelerator=alone,
        model=SimpleNamespace(training=True),
        loss_type=args["loss_type"],
        importance_sampling_level=args["importance_sampling_level"],
        beta=args["beta"],
        epsilon_low=args["epsilon"],
        epsilon_high=args["epsilon_high"] or args["epsilon"],
        top_entropy_quantile=args["top_entropy_quantile"],
        off_policy_mask_threshold=args["off_policy_mask_threshold"],
        use_vllm=True,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        get_gamma_weights=trainer.get_gamma_weights,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )


PEERS = {
    "verl": ("verl", verl),
    "trl": ("", trl),
    "skyrl": ("SkyRL", skyrl),
    "prime-rl": ("prime-rl", prime_rl),
    "slime": ("slime", slime),
    "openrlhf": ("OpenRLHF", openrlhf),
}


def rows(folder: Path, only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """One row a preset that a peer's function was executed for, or those of some frameworks and presets alone."""
    for framework, (name, modes) in PEERS.items():
        if only and not any(chosen.split("/")[0] == framework for chosen in only):
            continue
        for mode, weigh, function in modes(folder / name):
            if only and not {framework, f"{framework}/{mode}"} & {*only}:
                continue
            largest, dropped, tokens = 0.0, 0, 0
            for seed, scale in enumerate(SCALES * 5):
                batch = random_batch(scale, seed)
                own, theirs = ours(f"{framework}/{mode}", batch), weigh(batch)
                if own.shape == batch.mask_NL.shape:
                    own, theirs = own[batch.mask_NL], theirs[batch.mask_NL]
                    dropped += int((own == 0).sum())
                apart = (own - theirs).abs() / theirs.abs().clamp(min=1)
                largest = max(largest, apart.max().item())
                tokens += int(batch.mask_NL.sum())
            yield {
                "preset": f"{framework}/{mode}",
                "version": version_of(f"{framework}/{mode}"),
                "function": function,
                "tokens": tokens,
                "dropped": dropped,
                "largest_difference": f"{largest:.2g}",
            }


def main() -> None:
    """Writes the table; fails where a difference exceeds 1e-6."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="frameworks or presets whose rows are renewed")
    given = parser.parse_args()
    table = list(rows(given.folder, given.only))
    if given.only:
        with given.out.open(encoding="utf-8", newline="") as file:
            kept = {row["preset"]: row for row in csv.DictReader(file)} | {row["preset"]: row for row in table}
        table = [kept[name] for name in presets() if name in kept]
    with given.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    worst = max(float(row["largest_difference"]) for row in table)
    print(f"{len(table)} presets, largest relative difference {worst:.2g}")
    if not worst < 1e-6:
        raise SystemExit("a preset is not what its framework computes")


if __name__ == "__main__":
    main()
