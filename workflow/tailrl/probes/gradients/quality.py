"""Measures bias, variance and direction of every arm's gradient, by model, kind of mismatch and dose."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tailrl.artifacts.manifest import MANIFEST, write_manifest
from tailrl.artifacts.probes import GradientsRecord, Quality, write_quality
from tailrl.artifacts.records import write_record
from tailrl.config.arm import Arm
from tailrl.config.gradients import NO_MISMATCH, GradientQuality, Gradients
from tailrl.config.source_files import at_start, job_files
from tailrl.objective.batch_rules import resolved
from tailrl.objective.centering import expected_score
from tailrl.objective.loss import LossInputs, loss
from tailrl.objective.safe_set import safe_set, token_logprobs
from tailrl.probes.gradients.enumeration import (
    SequenceModel,
    constrained,
    disturbed,
    divergence,
    dose_at,
    random_model,
    return_gradient,
)
from tailrl.probes.gradients.moments import Terms, draw_steps, mean_and_variance
from tailrl.runtime.errors import ConfigurationError
from tailrl.runtime.provenance import provenance
from tailrl.runtime.seeding import derive_seed


def response_terms(model: SequenceModel, logits_sampler_SV: Tensor, arm: Arm) -> Terms:
    """Each response's term of a step's gradient under an arm, and its probability under the arm's sampler.

    Both come from the functions that training uses: each side's safe set from its own logits, log-probs, weights, loss.
    An adaptive threshold keeps its initial value.
    """
    vocabulary, settings = model.logits_SV.shape[1], arm.vocabulary
    threshold = settings.threshold(vocabulary)
    logp_sampler_SV = constrained(logits_sampler_SV, settings.sampler_rule, threshold)
    logp_sampler_KNT = model.gather(logp_sampler_SV)
    state_T, tokens_T = model.state_KNT.flatten(), model.tokens_NT.expand_as(model.state_KNT).flatten()
    logits_TV = model.logits_SV[state_T].requires_grad_()
    safe_SV = trainer_set(model, logits_sampler_SV, arm)
    fill = settings.outside == "paper_fill"
    logprobs = token_logprobs(logits_TV, tokens_T, "full", None, fill, safe_SV[state_T])
    expected_T = None
    if arm.correction.centering != "none":
        logp_TV = logits_TV.masked_fill(~safe_SV[state_T], -torch.inf).log_softmax(-1)
        expected_T = expected_score(logp_TV, logp_sampler_SV[state_T], arm.correction)
    responses, length = model.reward_KN.numel(), model.tokens_NT.shape[1]
    sign_T = (2 * model.reward_KN - 1).flatten().repeat_interleave(length)
    # A response that the sampler cannot draw has probability 0: any finite number will do.
    logp_sampler_T = logp_sampler_KNT.flatten().nan_to_num(neginf=0.0)
    chance_KN = logp_sampler_KNT.sum(-1).exp()
    correction = arm.correction
    if correction.judges_batch:
        # A batch varies with its responses; here it has them as often as the sampler draws them, as a large batch.
        inside_T = ~logprobs.outside_T
        delta_T = (logprobs.logp_T.detach() - logp_sampler_T)[inside_T]
        share_T = chance_KN.flatten().repeat_interleave(length)[inside_T]
        correction = resolved(correction, delta_T, torch.zeros_like(delta_T), logp_sampler_T[inside_T], share_T)
    inputs = LossInputs(
        trainer=logprobs,
        logp_sampler_T=logp_sampler_T,
        advantage_T=sign_T,
        sequence_T=torch.arange(responses).repeat_interleave(length),
        sequences=responses,
        denominator=1,
        expected_T=expected_T,
        age_T=torch.full_like(tokens_T, arm.disturbance.staleness),
    )
    part = loss(inputs, correction=correction, clip=arm.clip)
    (slope_TV,) = torch.autograd.grad(part.loss, logits_TV)
    mean_weight = 1.0
    if arm.correction.normalise:
        # The mean of a batch varies with its responses; here it is its expectation, as of a large batch.
        of_responses_KN = part.weights.ratio_X.view(*chance_KN.shape, -1).mean(-1)
        mean_weight = (of_responses_KN * chance_KN).sum(-1).mean().item()
    return Terms(
        term_KNTV=-slope_TV.view(*model.state_KNT.shape, vocabulary) / mean_weight,
        state_KNT=model.state_KNT,
        chance_KN=chance_KN,
        right_KN=model.reward_KN.long(),
        states=len(model.logits_SV),
    )


def trainer_set(model: SequenceModel, logits_sampler_SV: Tensor, arm: Arm) -> Tensor:
    """The trainer's safe set in every state, bool [S, V]: by its own logits, or the sampler's set."""
    settings, replayed = arm.vocabulary, arm.vocabulary.side == "replay"
    logits_SV = logits_sampler_SV if replayed else model.logits_SV
    rule = settings.rule if replayed else settings.trainer_rule
    return safe_set(logits_SV, rule, settings.threshold(logits_SV.shape[1]))


def measure(settings: Gradients) -> Iterator[Quality]:
    """Every model, mismatch, dose and arm, in this order.

    Raises:
        StudyError: an arm's ρ is above 1 in so small a vocabulary, or a model's gradient is zero.
    """
    quality = settings.quality
    for name, arm in settings.arms.items():
        if arm.reference_kl is not None:
            raise ConfigurationError(
                f"arms.{name}.reference_kl: the tiny models of gradient_quality have no base policy"
            )
        if arm.correction.log_ratio_penalty is not None:
            raise ConfigurationError(
                f"arms.{name}.correction.log_ratio_penalty: gradient_quality compares terms that an advantage "
                "multiplies, and this one has none"
            )
        if arm.vocabulary.rhos and arm.vocabulary.threshold(quality.vocabulary_size) > 0:
            raise ConfigurationError(
                f"arms.{name}.vocabulary: a rho of {arm.vocabulary.rhos[0]} is above 1 for the "
                f"{quality.vocabulary_size} tokens of gradient_quality"
            )
    doses = [(NO_MISMATCH, 0.0)]
    if quality.nats:
        doses += [(kind, nats) for kind in quality.causes for nats in quality.nats]
    else:
        doses += [(kind, dose) for kind, values in quality.doses.model_dump().items() for dose in values]
    for index in range(quality.models):
        seed = derive_seed("gradient model", quality.seed, index)
        model = random_model(quality.vocabulary_size, quality.length, quality.prompts, seed)
        if not return_gradient(model).any():
            raise ConfigurationError(
                f"gradient_quality: all responses of model {index} have the same reward; raise length"
            )
        for kind, dose in doses:
            logits_sampler_SV = model.logits_SV
            if kind != NO_MISMATCH:
                given = dose_at(model, kind, dose, quality.seed, index) if quality.nats else dose
                logits_sampler_SV = disturbed(model, kind, given, quality.seed, index)
            nats = divergence(model, logits_sampler_SV)
            for name, arm in settings.arms.items():
                values = estimator_quality(model, logits_sampler_SV, arm, quality, seed)
                yield Quality(model=index, mismatch=kind, dose=dose, arm=name, divergence=nats, **values)


def estimator_quality(
    model: SequenceModel, logits_sampler_SV: Tensor, arm: Arm, quality: GradientQuality, seed: int
) -> dict[str, float]:
    """The numbers of a `Quality`, from bias on, of one arm at one mismatch; `seed` seeds the sampled steps."""
    terms = response_terms(model, logits_sampler_SV, arm)
    mean_SV, variance = mean_and_variance(terms, arm.estimator, quality.group_size)
    exact_SV = return_gradient(model)
    kept_SV = trainer_set(model, logits_sampler_SV, arm)
    drawn_SV = safe_set(
        logits_sampler_SV, arm.vocabulary.sampler_rule, arm.vocabulary.threshold(quality.vocabulary_size)
    )
    constrained_SV = return_gradient(model, kept_SV)
    length, length_constrained = exact_SV.norm().item(), constrained_SV.norm().item()
    bias, bias_constrained = (mean_SV - exact_SV).norm().item(), (mean_SV - constrained_SV).norm().item()
    generator = torch.Generator().manual_seed(derive_seed("steps", seed))
    drawn_DX = draw_steps(terms, arm.estimator, quality.group_size, quality.draws, generator).flatten(1)
    norm_D = drawn_DX.norm(dim=1)
    cosine_D = torch.where(norm_D > 0, drawn_DX @ exact_SV.flatten() / (norm_D * length), 0.0)
    mean_length = mean_SV.norm().item()
    return {
        "bias": bias / length,
        "bias_constrained": bias_constrained / length_constrained if length_constrained else math.nan,
        "lacking": (kept_SV & ~drawn_SV).any(-1).double().mean().item(),
        "deviation": math.sqrt(variance) / length,
        "error": math.sqrt(variance + bias**2) / length,
        "direction": (mean_SV * exact_SV).sum().item() / (mean_length * length) if mean_length else math.nan,
        "cosine": cosine_D.mean().item(),
        "cosine_half_width": 1.96 * cosine_D.std().item() / math.sqrt(quality.draws),
    }


def write_qualities(settings: Gradients, out: Path) -> None:
    """Writes out/quality.jsonl, one `Quality` a line, and out/run.json with settings and provenance."""
    start, sources = time.perf_counter(), at_start(job_files("measure_gradients", settings))
    out.mkdir(parents=True, exist_ok=True)
    write_quality(out, measure(settings))
    record = GradientsRecord(
        settings=settings.model_dump(mode="json"),
        **provenance(),
        threads=torch.get_num_threads(),
        wall_seconds=round(time.perf_counter() - start, 1),
    )
    write_record(out, record)
    write_manifest(out / MANIFEST, [out / "quality.jsonl", out / "run.json"], sources=sources)
