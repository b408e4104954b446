"""An arm of a study as lines of verl's command: what verl 0.9.1 trains as our own loop does, and what is refused.

The lines are Hydra's overrides of `verl.trainer.main_ppo`; `verl.yaml` has those of every arm, and the values that verl
knows of each setting. A key stands in verl's `trainer/config/ppo_trainer.yaml` or
in a file that it includes; `docs/how-to/verl-study.md` has the table.
"""

import math
from collections.abc import Iterator

from tailrl.config.arm import Bounded, Clip, Correction
from tailrl.config.jobs import Run
from tailrl.config.sampler import Disturbance, VllmSettings
from tailrl.config.vocabulary import log_rho
from tailrl.runtime.data_files import yaml_beside

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"

DATA = yaml_beside(__file__, "verl.yaml")

VERLS_LIMIT = 20.0
"""Nats, to which verl clamps every log-ratio."""

ANY_RATIO = 1e9
"""A threshold that no ratio reaches, for a weight that has none."""


def train_lines(run: Run, vocabulary_size: int, seed: int) -> list[str]:
    """The lines that say of an arm how it trains; files, machine and lengths of prompts come from elsewhere.

    Args:
        run: the arm's settings.
        vocabulary_size: of the policy, for a ρ that is written per token of it.
        seed: of the run.

    Returns:
        Overrides of verl's configuration, each `key=value`.

    Raises:
        ValueError: verl cannot train so; the sentence begins with the key.
    """
    check(run)
    training = run.training
    lines = [
        *DATA["lines"],
        f"trainer.total_training_steps={training.steps}",
        f"trainer.save_freq={training.checkpoint_every}",
        # With 1 verl removes the last checkpoint before it notes the new one.
        f"trainer.max_actor_ckpt_to_keep={max(2, training.keep_checkpoints)}",
        f"data.seed={seed}",
        f"data.train_batch_size={training.prompts}",
        f"data.max_response_length={training.max_new_tokens}",
        f"algorithm.adv_estimator={run.estimator}",
        f"{ACTOR}.ppo_mini_batch_size={training.prompts // training.minibatches}",
        f"{ACTOR}.data_loader_seed={seed}",
        f"{ACTOR}.optim.clip_grad={training.max_grad_norm}",
        f"{ACTOR}.optim.lr={training.learning_rate}",
        f"{ACTOR}.optim.betas=[{training.betas[0]},{training.betas[1]}]",
        f"{ACTOR}.optim.weight_decay={training.weight_decay}",
        f"{ACTOR}.optim.lr_warmup_steps={training.warmup_steps}",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={str(training.activation_checkpointing).lower()}",
        f"{ROLLOUT}.dtype={run.sampler.dtype}",
        f"{ROLLOUT}.n={training.group_size}",
        f"{ROLLOUT}.temperature={training.temperature}",
        f"{ROLLOUT}.tensor_model_parallel_size={run.sampler.sharing}",
    ]
    if run.sampler.reserved is not None:
        lines.append(f"{ROLLOUT}.gpu_memory_utilization={run.sampler.reserved}")
    if isinstance(run.sampler, VllmSettings) and run.sampler.enforce_eager is not None:
        lines.append(f"{ROLLOUT}.enforce_eager={str(run.sampler.enforce_eager).lower()}")
    if training.dtype == "float32":  # else bfloat16, verl's own
        formats = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
        lines.append(f"+{ACTOR}.fsdp_config.mixed_precision={formats}")
    if run.vocabulary.prunes:
        lines.append(f"+tailrl.dvp.log_rho={log_rho(run.vocabulary.rhos[0], vocabulary_size)}")
    lines += _loss_lines(run.clip)
    lines += _correction_lines(run.correction, run.clip)
    return lines


def check(run: Run) -> None:
    """Raises ValueError where verl, or the plugin in it, cannot train an arm as our own loop does."""
    for key, why in _refusals(run):
        raise ValueError(f"training.backend: verl: {key} {why}")


def _refusals(run: Run) -> Iterator[tuple[str, str]]:
    """The keys of an arm that verl cannot follow, each with the reason."""
    for key, (values, why) in DATA["taken"].items():
        value: object = run
        for name in key.split("."):
            value = getattr(value, name, None)
        if value and value not in values:
            yield f"{key}: {value}" if isinstance(value, str) else key, why
    training = run.training
    correction = run.correction
    clip = run.clip
    if run.disturbance != Disturbance():
        yield "disturbance", "is made in our own loop alone"
    if training.prompts % training.minibatches:
        yield "training.minibatches", f"must divide the {training.prompts} prompts: verl's minibatches are of prompts"
    if training.minibatches > 1 and clip is None:
        yield "training.minibatches", "need a clip: verl's later updates on the same rollouts weigh by the ratio"
    if correction.token == "tis" and correction.token_lower is not None:
        yield "correction.token_lower", "is no bound of verl's truncation"
    if correction.sequence == "tis" and correction.sequence_lower is not None:
        yield "correction.sequence_lower", "is no bound of verl's truncation"
    if correction.token != "none" and correction.sequence in ("tis", "mis"):
        yield "correction", "weighs tokens and responses, of which verl weighs by one"
    if correction.veto is not None and math.log(correction.veto) <= -VERLS_LIMIT:
        yield "correction.veto", f"never acts in verl, which clamps log-ratios to {VERLS_LIMIT:g} nats"
    if correction.veto_above is not None and not (
        correction.veto is not None and math.isclose(correction.veto_above * correction.veto, 1)
    ):
        yield "correction.veto_above", "must be 1/veto: verl's rule has one bound for both sides"
    if correction.normalise and correction.token == "none":
        yield "correction.normalise", "is verl's of token weights alone"
    if clip is not None and clip.ratio == "decoupled" and correction.weighted:
        yield "clip.ratio: decoupled", "is a weight already"


def _loss_lines(clip: Clip | None) -> list[str]:
    """PPO's clip; without one there is a single update on a step's rollouts, whose ratio is 1."""
    low, high, dual = 1 - 1e-9, ANY_RATIO, ANY_RATIO
    if isinstance(clip, Bounded):
        low, high = clip.bounds
        dual = clip.dual_bound or ANY_RATIO
    return [
        f"{ACTOR}.clip_ratio={low}",
        f"{ACTOR}.clip_ratio_low={low}",
        f"{ACTOR}.clip_ratio_high={high}",
        f"{ACTOR}.clip_ratio_c={dual}",
    ]


def _correction_lines(correction: Correction, clip: Clip | None) -> list[str]:
    """verl's weight and rejection. A threshold of two numbers sets what lies outside them to 0."""
    lines = [f"{CORRECTION}.bypass_mode=false"]
    level, threshold = "", ""
    if clip is not None and clip.ratio == "decoupled":
        level, threshold = "token", f"{ANY_RATIO}"
    elif correction.token == "tis":
        level, threshold = "token", f"{correction.token_threshold}"
    elif correction.token == "mask":
        most = correction.token_threshold
        least = 1 / most if correction.token_lower is None else correction.token_lower
        level, threshold = "token", quoted(_between(least, most))
    elif correction.sequence == "tis":
        level, threshold = "sequence", f"{correction.limit}"
    elif correction.sequence == "mis":
        level, threshold = "sequence", quoted(_between(correction.sequence_lower or 0.0, correction.limit))
    if level:
        lines += [f"{CORRECTION}.rollout_is={level}", f"{CORRECTION}.rollout_is_threshold={threshold}"]
    if correction.normalise:
        lines.append(f"{CORRECTION}.rollout_is_batch_normalize=true")
    rejections = {}
    if correction.sequence == "geometric":
        rejections["seq_mean_k1"] = _between(correction.sequence_lower or 1 / correction.limit, correction.limit)
    if correction.veto is not None:
        # k2 of a token, (log r)² / 2, has one bound for both sides.
        rejections["seq_max_k2"] = f"{math.log(correction.veto) ** 2 / 2}"
    if rejections:
        lines.append(f"{CORRECTION}.rollout_rs={quoted(','.join(rejections))}")
        lines.append(f"{CORRECTION}.rollout_rs_threshold={quoted(','.join(rejections.values()))}")
    return lines


def _between(least: float, most: float) -> str:
    """Two numbers as verl reads them."""
    return f"{max(least, 1e-9)}_{most}"


def quoted(value: object) -> str:
    """A path or text in Hydra's quotes: else a comma would ask for several runs, and `1_2` be the number 12."""
    return f'"{value}"'
