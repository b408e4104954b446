"""Refuses settings of TRL that would silently change the objective."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from tailrl.config.arm import Correction
from tailrl.integrations.trl.head import language_model
from tailrl.model.forward import head_weight
from tailrl.runtime import distributed
from tailrl.runtime.errors import ConfigurationError

LOSSES = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo"})
"""Losses of GRPOTrainer that are linear in the advantage: a weight can go onto the advantage."""

HARMLESS = frozenset({"max_tokens", "max_new_tokens", "seed", "cache_implementation", "use_cache"})
"""Keys of `generation_kwargs` that do not change the distribution of a token."""

SCALES = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
"""Keys of a model's configuration for logits that are scaled after the head."""


def check_adapter(trainer: type, known: tuple[type, ...], rho: float, correction: Correction, tokens: bool) -> None:
    """Raises StudyError for an unsupported trainer (`known` are supported), ρ or correction.

    `tokens`: whether the trainer's loss sums over tokens, so that each token can have a weight.
    """
    if not issubclass(trainer, known):
        raise ConfigurationError(f"{trainer.__name__}: with_dvp knows {' and '.join(t.__name__ for t in known)} only")
    if not 0 < rho <= 1:
        raise ConfigurationError(
            f"rho: {rho}: min-p keeps tokens of at least ρ times the largest probability, 0 < ρ ≤ 1"
        )
    if correction.token != "none" and not tokens:
        raise ConfigurationError(
            f"correction.token: {correction.token}: {trainer.__name__}'s ratio is a whole response's"
        )
    if correction.judges_moves:
        raise ConfigurationError(
            "correction.rejects: r_ppo: it is 1 in the first update on a batch, often TRL's only one"
        )
    if any(rule.by == "token" for rule in correction.reject) and not tokens:
        raise ConfigurationError(f"correction.reject: by: token: {trainer.__name__}'s ratio is a whole response's")
    if correction.centering != "none":
        raise ConfigurationError(
            "correction.centering: it needs the sampler's whole distribution, which TRL does not keep"
        )
    if correction.normalise:
        raise ConfigurationError(
            "correction.normalise: TRL computes the loss in parts, and the mean is over the whole batch"
        )


def _problems_of_sampling(args: Any, rho: float) -> Iterable[str]:
    """Settings with which TRL would not sample from min-p at ρ, after the temperature."""
    if args.min_p is None or not math.isclose(args.min_p, rho, rel_tol=1e-9):
        yield f"min_p: {args.min_p}: the sampler must prune at the ρ of the objective, min_p={rho!r}"
    for name, off in (("top_p", (1.0,)), ("top_k", (0, -1, None)), ("repetition_penalty", (1.0,))):
        if getattr(args, name) not in off:
            yield f"{name}: {getattr(args, name)}: the sampler would prune by more than min_p, and the trainer does not"
    if other := sorted(set(args.generation_kwargs or {}) - HARMLESS):
        yield f"generation_kwargs: {', '.join(other)} may change what is sampled from, and the trainer does not follow"
    if args.vllm_structured_outputs_regex is not None:
        yield "vllm_structured_outputs_regex: the sampler would prune by more than min_p, and the trainer does not"
    if args.use_transformers_continuous_batching:
        yield "use_transformers_continuous_batching: it returns no log-probs of the sampler; leave it out or use vLLM"


def _problems_of_objective(args: Any) -> Iterable[str]:
    """Settings with which TRL would add a term or a weight of its own."""
    if args.beta:
        yield f"beta: {args.beta}: the reference has a safe set of its own; the KL is infinite outside it; set beta=0.0"
    if args.use_liger_kernel:
        yield "use_liger_kernel: the log-probs are the constrained objective's own, not Liger's; leave it out"
    loss = getattr(args, "loss_type", None)
    if loss is not None and loss not in LOSSES:
        yield f"loss_type: {loss}: it has weights of its own; with_dvp serves {', '.join(sorted(LOSSES))}"
    if getattr(args, "off_policy_mask_threshold", None) is not None:
        yield "off_policy_mask_threshold: it is a correction of its own; say what to reject by with_dvp's correction"
    if getattr(args, "entropy_coef", 0.0) or getattr(args, "use_adaptive_entropy", False):
        yield "entropy_coef: the constrained entropy carries no gradient, and the bonus would do nothing"
    if args.use_vllm and getattr(args, "vllm_importance_sampling_correction", False):
        yield (
            "vllm_importance_sampling_correction: TRL's own ratio would count the mismatch twice; set it to False, and "
            "say what to correct by with_dvp's correction"
        )


def check_settings(args: Any, rho: float, given: dict[str, Any]) -> None:
    """Raises StudyError for settings that change the objective.

    Args:
        args: RLOOConfig or GRPOConfig; None if the user gave none.
        rho: of min-p.
        given: the trainer's other named arguments.
    """
    if args is None:
        raise ConfigurationError(f"args: pass a configuration with min_p={rho!r}")
    problems = [*_problems_of_sampling(args, rho), *_problems_of_objective(args)]
    for name in ("rollout_func", "tools", "environment_factory"):
        if given.get(name):
            problems.append(f"{name}: how its tokens are sampled is not known here, nor their log-probs")
    if problems:
        raise ConfigurationError(problems[0])


def _check_adapters(model: Any) -> None:
    """Raises StudyError for PEFT's adapters that do more than to change the backbone's layers."""
    for settings in model.peft_config.values():
        if settings.is_prompt_learning:
            raise ConfigurationError(
                f"{settings.peft_type.value}: tokens that PEFT adds to a prompt are not scored; use LoRA"
            )
    head = model.get_base_model().get_output_embeddings()
    # The objective multiplies by the head's weight itself, so that a layer around it would be left out.
    if not isinstance(head, nn.Linear) or hasattr(head, "base_layer"):
        raise ConfigurationError(
            f"{type(head).__name__}: PEFT changes the head, whose weight the objective reads; leave lm_head out of "
            "target_modules and modules_to_save"
        )


def keep_float32(plugin: Any) -> None:
    """Let FSDP 2 return log-probs as they are; accelerate's policy of mixed precision would round them to 16 bits.

    At −10 nats bfloat16 rounds by up to 0.03. The weights are sharded when training begins, by this policy.
    """
    policy = plugin.mixed_precision_policy
    if plugin.fsdp_version == 2 and policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)


def check_trainer(trainer: Any, model: Any) -> None:
    """Raises StudyError if the adapter does not support a made trainer's causal language model or way of running."""
    config = model.config
    scales = [name for name in SCALES if getattr(config, name, None) not in (None, 1.0)]
    if config.get_text_config() is not config:
        raise ConfigurationError(f"{type(model).__name__}: multimodal models are not supported")
    if hasattr(model, "peft_config"):
        _check_adapters(model)
    if scales:
        raise ConfigurationError(
            f"{scales[0]}: {getattr(config, scales[0])}: the objective knows no logits that are scaled after the head"
        )
    if trainer.aux_loss_enabled:
        raise ConfigurationError("router_aux_loss_coef: the objective has no loss of a router; set it to 0.0")
    head_weight(language_model(model))
    if trainer.is_fsdp_enabled:
        keep_float32(trainer.accelerator.state.fsdp_plugin)
    if trainer.use_vllm and trainer.vllm_mode == "server":
        # The main process alone has a client.
        main = trainer.accelerator.is_main_process
        info = trainer.vllm_generation.vllm_client.get_server_info() if main else {"model_config": {}}
        mode = distributed.gathered(info["model_config"].get("logprobs_mode"))[0]
        if mode != "processed_logprobs":
            raise ConfigurationError(
                f"vllm_mode: the server's log-probs are {mode}, not those of the distribution that it samples from; "
                "start it with --logprobs-mode processed_logprobs"
            )
