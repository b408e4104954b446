"""Settings of verl under which a run would silently not do what it asked of the plugin."""

from collections.abc import Iterator
from typing import Any

from tailrl.integrations.verl.settings import Plugin
from tailrl.runtime.errors import ConfigurationError

ENGINES = ("fsdp", "fsdp2")
OTHER_ENGINES = {
    "megatron": "it splits the vocabulary over ranks, and a safe set needs the largest logit of all of them",
    "automodel": "it scores in a module of its own, which runs on GPUs alone: DVP was never tried there",
    "torchtitan": "it scores in a module of its own, which runs on GPUs alone: DVP was never tried there",
    "veomni": "it scores in a module of its own, which runs on GPUs alone: DVP was never tried there",
}
# Each token has a term of its own, which a mask takes out. Other losses have one ratio a response, or compare tokens.
LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "sapo", "gpg", "cispo")

PROCESSED = "processed_logprobs"  # vLLM's name for log-probs of the distribution that it samples from


def check_run(config: Any, settings: Plugin) -> None:
    """Raises StudyError with every reason at once.

    Args:
        config: verl's whole configuration.
        settings: the plugin's.
    """
    problems = [*_problems_of_both_sides(config)]
    if settings.dvp:
        problems += [*_problems_of_sampling(config), *_problems_of_scores(config), *_problems_of_objective(config)]
    if problems:
        raise ConfigurationError(f"tailrl: {'; '.join(problems)}")


def _problems_of_both_sides(config: Any) -> Iterator[str]:
    """Settings without which a batch lacks one side's log-probs."""
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield "set actor_rollout_ref.rollout.calculate_log_probs=true, or the batch has no log-probs of the sampler"
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode"):
        yield (
            "set algorithm.rollout_correction.bypass_mode=false: bypass takes the sampler's log-probs for the "
            "trainer's, and no mismatch is left to see or to correct"
        )


def _problems_of_sampling(config: Any) -> Iterator[str]:
    """Settings with which the sampler would not sample from min-p, or would not return its log-probs."""
    rollout = config.actor_rollout_ref.rollout
    prefix = "actor_rollout_ref.rollout"
    if rollout.name != "vllm":
        why = "SGLang's log-probs are not renormalised after min-p" if rollout.name == "sglang" else "it is not known"
        yield f"{prefix}.name={rollout.name}: DVP needs vllm: {why}"
    if rollout.get("logprobs_mode") != PROCESSED:
        yield f"set {prefix}.logprobs_mode={PROCESSED}: others are not of the distribution that is sampled from"
    if rollout.top_p != 1.0:
        yield f"{prefix}.top_p={rollout.top_p}: the sampler would prune by more than min-p, and the trainer does not"
    if rollout.top_k not in (-1, 0):
        yield f"{prefix}.top_k={rollout.top_k}: the sampler would prune by more than min-p, and the trainer does not"
    if not rollout.temperature > 0:
        yield f"{prefix}.temperature={rollout.temperature}: training samples must be random"
    mtp = config.actor_rollout_ref.model.get("mtp") or {}
    if mtp.get("enable") and mtp.get("enable_rollout"):
        yield "actor_rollout_ref.model.mtp.enable_rollout: vLLM knows no min-p beside speculative decoding"


def _problems_of_scores(config: Any) -> Iterator[str]:
    """Engines and kernels that compute log-probs where the plugin cannot prune them."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if actor.strategy not in ENGINES:
        why = OTHER_ENGINES.get(actor.strategy, "it is not known")
        yield f"actor_rollout_ref.actor.strategy={actor.strategy}: DVP needs fsdp or fsdp2: {why}"
    if model.get("use_fused_kernels"):
        yield "set actor_rollout_ref.model.use_fused_kernels=false: fused kernels score without the plugin"
    if (config.get("distillation") or {}).get("enabled"):
        yield "distillation.enabled: the teacher's distribution is over the whole vocabulary"


def _problems_of_objective(config: Any) -> Iterator[str]:
    """Terms and estimators that read the whole vocabulary, or a reference whose safe set is another one."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if actor.use_kl_loss or algorithm.use_kl_in_reward:
        yield (
            "set actor_rollout_ref.actor.use_kl_loss=false and algorithm.use_kl_in_reward=false: the reference's safe "
            "set is another one, and a KL between policies on two sets is infinite"
        )
    if actor.entropy_coeff:
        yield (
            f"actor_rollout_ref.actor.entropy_coeff={actor.entropy_coeff}: verl's entropy is of the whole vocabulary, "
            "and its bonus would raise the tail that DVP leaves out"
        )
    loss = actor.policy_loss.get("loss_mode", "vanilla")
    if loss not in LOSSES:
        yield f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}: DVP serves {', '.join(LOSSES)}"
    if "optimal_token_baseline" in str(algorithm.adv_estimator):
        yield f"algorithm.adv_estimator={algorithm.adv_estimator}: it weighs by the whole vocabulary's probabilities"
