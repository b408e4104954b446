"""One step: sample, score, advantage, log-prob, weight, loss, backward, optimizer step, weights into the engine.

Read it from top to bottom: `take_step` is a step, `update` its optimizer steps, `accumulate_gradients` the forward and
backward passes of one of them. Ranks share the work, and every rank makes the same decisions.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tailrl.config.arm import Correction
from tailrl.config.jobs import Run
from tailrl.objective.advantages import advantages_of
from tailrl.objective.batch_rules import resolved
from tailrl.objective.corrections import normaliser
from tailrl.objective.loss import LossInputs, LossOutputs, loss
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.rollout import Decoding
from tailrl.runtime import distributed
from tailrl.runtime.errors import NumericalError, say
from tailrl.runtime.heap import give_back_freed
from tailrl.runtime.seeding import derive_seed
from tailrl.tasks.problem import Problem
from tailrl.tracking import metrics as keys
from tailrl.training.guarded_engine import GuardedEngine
from tailrl.training.optimizer import optimizer_step, scale_gradient
from tailrl.training.placement import give_up_forward, tensor_floats
from tailrl.training.reference import with_reference
from tailrl.training.rollouts import of_all_ranks, response_metrics, reward_metrics, rewards, step_requests
from tailrl.training.samples import Sample, in_micro_batches, write_batch
from tailrl.training.scorer import NamedWeights, Scored, Scorer, computing_at, make_scorer, score_all
from tailrl.training.state import RunState, seed_libraries
from tailrl.training.stopwatch import Stopwatch
from tailrl.training.token_table import TokenTable, sampler_column


@dataclass(frozen=True, slots=True)
class Job:
    """The constants of a run: settings, seed, folder of the results, the problems as tokens, the reference policy."""

    run: Run
    seed: int
    out: Path
    tokenizer: PreTrainedTokenizerBase
    problems: list[Problem]
    prompts: list[tuple[int, ...]]
    decoding: Decoding
    scorer: Scorer
    reference: NamedWeights


def take_step(
    job: Job, state: RunState, engine: GuardedEngine, chosen: Sequence[int], between_steps: float
) -> tuple[dict[str, float], str | None]:
    """One step, from the problems to the weights in the engine.

    Args:
        job: the run's constants.
        state: what the step changes, except its step and metrics, which the caller updates.
        engine: samples with the weights that it has.
        chosen: the indices of the step's problems.
        between_steps: seconds of logging and saving after the previous step; they count towards this one.

    Returns:
        The step's metrics, and the reason of a skipped update.
    """
    run, settings, step = job.run, job.run.training, state.step
    sync, together = engine.weight_sync, run.sampler.sharing
    watch, begun = Stopwatch(), time.perf_counter()
    seed_libraries(derive_seed("libraries", job.seed, step))
    for group in state.optimizer.param_groups:
        group["lr"] = settings.learning_rate * min(1.0, (step + 1) / (settings.warmup_steps + 1))

    # Sample `group_size` responses to each problem.
    thresholds = [state.thresholds.of(problem) for problem in chosen]
    requests = step_requests([job.prompts[i] for i in chosen], thresholds, settings.group_size, job.seed, state.step)
    with watch.phase("rollout"):
        rollouts = engine.generate(distributed.share(requests, together), job.decoding, state.model)
        with engine.in_time("the engine's sleep"):
            engine.sampler.release()

    # Score each response, and take its advantage over the others.
    with watch.phase("reward"):
        posed = distributed.share([job.problems[i] for i in chosen for _ in range(settings.group_size)], together)
        rollouts, rewards_B = of_all_ranks(rollouts, rewards(rollouts, posed, job.tokenizer), together)
        rewards_PG = rewards_B.reshape(settings.prompts, settings.group_size)
    advantages = advantages_of(run.estimator, torch.from_numpy(rewards_PG)).flatten().tolist()
    age = min(step, run.disturbance.staleness)  # the first steps sample with the base policy
    samples = [
        Sample(rollout, advantage, request.threshold, request.seed, reward, age=age)
        for rollout, advantage, request, reward in zip(rollouts, advantages, requests, rewards_B.tolist(), strict=True)
    ]

    # Log-probs, weights, loss, backward and optimizer steps. A NaN or Inf skips them.
    fault, updated = None, None
    try:
        deal = derive_seed("deal", job.seed, step)
        samples = with_reference(state.model, samples, rewards_PG, run, job.reference, watch, sync.delayed)
        updated = update(state.model, state.optimizer, samples, run, deal, watch, sync.delayed, job.scorer)
    except NumericalError as error:
        fault = _skip(job, state, samples, error)

    # Hand the new weights to the engine.
    with watch.phase("weights"), engine.in_time("the hand-over of the weights"):
        sync(state.model)

    # Record the step.
    with watch.phase("metrics"):
        metrics = dict.fromkeys([*keys.METRICS, *(keys.ROUTING if run.sampler.says_routes else ())], math.nan) | {
            keys.STEP: float(step),
            keys.SKIPPED: float(fault is not None),
            keys.LEARNING_RATE: state.optimizer.param_groups[0]["lr"],
            keys.THRESHOLD: float(np.mean([sample.threshold for sample in samples[:: settings.group_size]])),
            **reward_metrics(rewards_PG),
            **response_metrics(rollouts),
            **engine.sampler.metrics(),
        }
        if updated is not None:
            mean_loss, norm, table = updated
            metrics |= {keys.LOSS: mean_loss, keys.GRADIENT_NORM: norm, **table.metrics(run.correction)}
            if distributed.is_first() and (step % settings.keep_tokens_every == 0 or not state.tokens.checksums):
                state.tokens.keep(step, table.arrays(step))
    seconds = watch.read()
    seconds["metrics"] += between_steps
    elapsed = time.perf_counter() - begun + between_steps
    metrics |= {keys.in_group(keys.TIME, phase): spent for phase, spent in seconds.items()}
    metrics[keys.STEP_SECONDS] = elapsed
    metrics[keys.TOKENS_PER_SECOND] = sum(len(r.tokens) for r in rollouts) / elapsed
    # All ranks take the first one's numbers, times included, and so decide the same.
    metrics = distributed.gathered(metrics)[0]
    if updated is not None:
        state.thresholds.observe(chosen, rewards_PG.mean(axis=1).tolist(), metrics[keys.LOST_MASS])
    return metrics, fault


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    run: Run,
    seed: int,
    watch: Stopwatch,
    delayed: NamedWeights | None = None,
    scorer: Scorer | None = None,
) -> tuple[float, float, TokenTable]:
    """The optimizer steps of one step of the run, each on a minibatch of its samples.

    Args:
        model: the policy, changed in place.
        optimizer: its optimizer.
        samples: the step's rollouts.
        run: the arm's settings; `training.minibatches` is the number of updates.
        seed: of the rollouts' order in the minibatches.
        watch: gets the seconds of the phases.
        delayed: named weights of an earlier step, at which the gradient is taken; None for the policy's own.
        scorer: of the run; None: made from its settings.

    Returns:
        The mean loss and the mean gradient norm (before clipping) over the updates, and the step's tokens.

    Raises:
        NumericalError: a log-prob, a loss or a norm is not finite; earlier updates stay in effect.
    """
    scorer = scorer or make_scorer(run)
    count = run.training.minibatches
    order = np.random.default_rng(seed).permutation(len(samples)) if count > 1 else np.arange(len(samples))
    old: list[TokenLogprobs] | None = None
    if count > 1 or run.correction.judges_batch:
        # The mismatch, and some clips and rules, are of the weights that sampled.
        with watch.phase("forward"), computing_at(model, run, delayed), tensor_floats(run.sampler):
            old = score_all(model, samples, scorer)
    losses, norms, tables = [], [], []
    for minibatch in np.array_split(order, count):
        chosen, judging = minibatch.tolist(), scorer
        if old is not None and run.correction.judges_batch:
            limits = of_update(run.correction, [samples[i] for i in chosen], [old[i] for i in chosen])
            judging = replace(scorer, run=run.model_copy(update={"correction": limits}))
        with computing_at(model, run, delayed), tensor_floats(run.sampler):
            loss_sum, table = accumulate_gradients(model, samples, judging, watch, old, chosen)
        if (factor := rescaling(run, table)) != 1:
            scale_gradient(model, factor)
        losses.append(loss_sum * factor)
        tables.append(table)
        with watch.phase("optimizer"):
            norms.append(optimizer_step(model, optimizer, run.training.max_grad_norm))
    return float(np.mean(losses)), float(np.mean(norms)), TokenTable.joined(tables)


def of_update(correction: Correction, samples: Sequence[Sample], old: Sequence[TokenLogprobs]) -> Correction:
    """The correction with rules over the batch as limits of single tokens, which all tokens of the update give.

    `old`: the trainer's log-probs of each sample's tokens before the first update on the step's rollouts.
    """
    before = TokenLogprobs.joined(old)
    inside_T = ~before.outside_T.cpu()
    logp_sampler_T = torch.from_numpy(np.concatenate([sample.rollout.logp_sampler_T for sample in samples]))[inside_T]
    delta_T = before.in_set().cpu()[inside_T] - logp_sampler_T
    return resolved(correction, delta_T, torch.zeros_like(delta_T), logp_sampler_T)


def accumulate_gradients(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    scorer: Scorer,
    watch: Stopwatch,
    old: Sequence[TokenLogprobs] | None = None,
    chosen: Sequence[int] | None = None,
) -> tuple[float, TokenTable]:
    """Forward and backward over the micro-batches of one update; gradients add up in the model.

    The micro-batches are dealt to the ranks. Each adds its share of the loss, which is divided by all samples of the
    update, and the ranks' gradients are summed. Under RLOO and GRPO a group that is all right or all wrong has
    advantages of 0. Such samples add nothing to the gradient, unless the loss has a KL or a penalty. They come last,
    and are scored for the table only.

    Args:
        model: the policy.
        samples: the rollouts of the step.
        scorer: the arm's, with its settings.
        watch: gets the seconds of the phases forward and backward.
        old: the trainer's log-probs of each sample's tokens before the first update on these rollouts, for the table
            and for a clip whose ratio is to them. None for a single update, where the present ones are the old ones.
        chosen: indices of this update's samples; None: all.

    Returns:
        The loss, one mean over the update's samples, and the tokens of all ranks.

    Raises:
        NumericalError: a log-prob or the loss is not finite on some rank; raised on every rank.
    """
    run = scorer.run
    chosen = range(len(samples)) if chosen is None else chosen
    # A KL to the base policy, or to the sampler, pulls whatever the advantage is.
    every = run.reference_kl is not None and run.reference_kl.where == "loss"
    every = every or run.correction.log_ratio_penalty is not None
    teaching = [i for i in chosen if every or samples[i].advantage != 0]
    silent = [i for i in chosen if not (every or samples[i].advantage != 0)]
    if not teaching:
        # The gradient is 0, not missing: the optimizer still applies its momentum.
        teaching, silent = silent, []
    tables: list[TokenTable] = []
    for teaches, indices in ((True, teaching), (False, silent)):
        groups = in_micro_batches(samples, indices, run.training.token_budget)
        own_tables: list[TokenTable] = []
        for index, counts in distributed.dealt(len(groups)):
            give_back_freed()
            numbers = groups[index]
            group = [samples[i] for i in numbers]
            old_logprobs = None if old is None else TokenLogprobs.joined([old[i] for i in numbers])
            with watch.phase("forward"), torch.set_grad_enabled(teaches), distributed.raised_together():
                scored = scorer(model, group)
                inputs = loss_inputs(group, scored, old_logprobs, len(chosen), run)
                outputs = loss(inputs, correction=run.correction, clip=run.clip, reference_kl=run.reference_kl)
                check_scored(scored, outputs)
            if teaches:
                with watch.phase("backward"):
                    (outputs.loss if counts else 0 * outputs.loss).backward()  # type: ignore[no-untyped-call]
            if counts:
                own_tables.append(TokenTable.of(group, numbers, scored, outputs, old_logprobs))
        with watch.phase("backward"):
            tables += distributed.in_turns(distributed.gathered(own_tables))
    give_back_freed()
    loss_sum = 0.0
    for table in tables:
        loss_sum += table.loss_M.item()
    return loss_sum, TokenTable.joined(tables)


def loss_inputs(
    samples: Sequence[Sample], scored: Scored, old_logprobs: TokenLogprobs | None, denominator: int, run: Run
) -> LossInputs:
    """What the loss needs of a micro-batch, of both sides; `denominator` is the number of the update's samples."""
    device, sequence_T = scored.logprobs.logp_T.device, scored.batch.sequence_T
    logp_old_T, logp_reference_T = None, None
    if old_logprobs is not None and run.clip is not None and run.clip.ratio != "bypass":
        logp_old_T = old_logprobs.in_set().to(device)
    if run.reference_kl is not None:
        reference = [sample.logp_reference_T for sample in samples if sample.logp_reference_T is not None]
        logp_reference_T = torch.cat(reference).to(device)
    return LossInputs(
        trainer=scored.logprobs,
        logp_sampler_T=sampler_column(samples, "logp_sampler_T", device),
        advantage_T=torch.tensor([sample.advantage for sample in samples], device=device)[sequence_T],
        sequence_T=sequence_T,
        sequences=len(samples),
        denominator=denominator,
        logp_old_T=logp_old_T,
        expected_T=scored.expected_T,
        logp_reference_T=logp_reference_T,
        age_T=torch.tensor([sample.age for sample in samples], device=device)[sequence_T],
    )


def check_scored(scored: Scored, outputs: LossOutputs) -> None:
    """Raises NumericalError for a log-prob that is not finite: outside the set it has no term in the loss."""
    if not scored.logprobs.logp_full_T.isfinite().all():
        raise NumericalError(f"the loss is {outputs.loss.item()}: the policy's log-probs are no longer finite")


def rescaling(run: Run, table: TokenTable) -> float:
    """The factor of an update's gradient and loss that is known only when all its tokens are weighed; mostly 1.

    `loss_mean: kept` turns the mean over all responses into one over those with a weight, and `normalise` divides by
    the mean weight.
    """
    factor = 1.0
    if run.training.loss_mean == "kept":
        kept_responses = int((table.weights.used_N > 0).sum())
        factor = table.responses / kept_responses if kept_responses else 1.0
    return factor / normaliser(run.correction, table.weights.ratio_X)


def _skip(job: Job, state: RunState, samples: Sequence[Sample], error: NumericalError) -> str:
    """Drop the gradient and keep the batch; prints and returns the reason."""
    give_up_forward(state.model)
    state.optimizer.zero_grad(set_to_none=True)
    file = job.out / "skipped" / f"step-{state.step:08d}.npz"
    where = f"arm {job.run.arm}, seed {job.seed}, step {state.step}"
    sentence = f"{where}: the update is skipped, for {error}; its batch is in {file}"
    if distributed.is_first():
        write_batch(samples, file)
        say(sentence)
    return sentence
