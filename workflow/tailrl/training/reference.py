"""The reference policy of a run, the base policy: its weights, and the samples' log-probs under it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tailrl.config.jobs import Run
from tailrl.model.policy import load_policy, named_weights
from tailrl.objective.advantages import advantages_of
from tailrl.objective.disturbance import round_weights
from tailrl.objective.reference_kl import reward_penalty
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.training.placement import tensor_floats
from tailrl.training.samples import Sample
from tailrl.training.scorer import NamedWeights, computing_at, make_scorer, score_all
from tailrl.training.stopwatch import Stopwatch


def reference_weights(run: Run, policy_folder: Path) -> NamedWeights:
    """The base policy's weights in the host's memory, by name; empty where the arm has no `reference_kl`.

    Raises:
        StudyError: the policy cannot be read.
    """
    return list(named_weights(load_policy(policy_folder))) if run.reference_kl else ()


def with_reference(
    model: PreTrainedModel,
    samples: list[Sample],
    rewards_PG: NDArray[np.float32],
    run: Run,
    reference: NamedWeights,
    watch: Stopwatch,
    delayed: NamedWeights | None = None,
) -> list[Sample]:
    """The samples with their tokens' log-probs under the reference; a penalty in the reward changes the advantages.

    Args:
        model: the policy; it computes with the reference's weights in between.
        samples: the step's rollouts.
        rewards_PG: their rewards.
        run: the arm's settings; without `reference_kl` the samples come back as they are.
        reference: `reference_weights`.
        watch: gets the seconds of these forward passes, of the phase forward.
        delayed: named weights at which the gradient is taken; None for the policy's own.
    """
    settings = run.reference_kl
    if settings is None:
        return samples
    with watch.phase("forward"), tensor_floats(run.sampler):
        coarse = run.disturbance.weights if run.disturbance.side == "both" else None
        # Rounded as the policy is, and with its own experts: the sampler's are the present policy's.
        own_routes = run.model_copy(update={"training": run.training.model_copy(update={"routing_replay": False})})
        with computing_at(model, run, list(round_weights(reference, coarse))):
            logp_reference = [scored.logp_full_T.cpu() for scored in score_all(model, samples, make_scorer(own_routes))]
        samples = [
            replace(sample, logp_reference_T=reference_T)
            for sample, reference_T in zip(samples, logp_reference, strict=True)
        ]
        if settings.where == "loss":
            return samples
        with computing_at(model, run, delayed):
            trainer = TokenLogprobs.joined(score_all(model, samples, make_scorer(run)))
    lengths = torch.tensor([len(reference_T) for reference_T in logp_reference])
    penalty_B = reward_penalty(
        settings,
        trainer.logp_T.cpu(),
        torch.cat(logp_reference),
        trainer.outside_T.cpu(),
        torch.arange(len(samples)).repeat_interleave(lengths),
        len(samples),
    )
    advantage_PG = advantages_of(run.estimator, torch.from_numpy(rewards_PG) - penalty_B.view(rewards_PG.shape))
    advantages = advantage_PG.flatten().tolist()
    return [replace(sample, advantage=advantage) for sample, advantage in zip(samples, advantages, strict=True)]
