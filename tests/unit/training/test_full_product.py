"""Estimator × clip × correction × vocabulary in full: every arm is refused with its reason, or admitted and trains.

An admitted arm trains two steps through the update itself, on responses that the plain sampler drew from the initial
policy. The first step is one update without mismatch, the second is two updates on responses of an older policy.
Thresholds adapt in between, as in the loop. `deliberate` admits biased arms, and changes nothing else.
"""

import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from arms_fixture import Choice, arm_of, every_combination, every_vocabulary, reasons, vocabulary_reasons
from pydantic import ValidationError
from sampler_fixture import PlainSampler
from step_fixture import run_of
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tailrl.config.arm import Arm
from tailrl.config.jobs import Run
from tailrl.config.policy import ScratchPolicy
from tailrl.config.vocabulary import Vocabulary
from tailrl.model.policy import create_policy, encode_prompt, save_policy
from tailrl.objective.adaptive_rho import Thresholds
from tailrl.objective.advantages import ESTIMATORS
from tailrl.rollout import Decoding
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime.seeding import derive_seed
from tailrl.tasks.problem import Problem
from tailrl.training.rollouts import step_requests
from tailrl.training.samples import Sample
from tailrl.training.step import update
from tailrl.training.stopwatch import Stopwatch
from tailrl.training.token_table import TokenTable

SOUND = [vocabulary for vocabulary in every_vocabulary() if not vocabulary_reasons(vocabulary)]
PROMPTS, GROUP, TOKENS = 2, 3, 4
SMALLEST = ScratchPolicy(vocabulary_size=600, hidden_size=32, layers=1, heads=1, intermediate_size=32, max_length=64)


def every_arm(**factors: tuple[object, ...]) -> list[Choice]:
    """All combinations with sound vocabularies but for what `test_every_arm` varies."""
    return list(
        every_combination(**{"vocabulary": tuple(SOUND), "disturbance": ("none",), "minibatches": (1,)} | factors)
    )


# --- what is refused ---------------------------------------------------------------------------------------


def refusal(model: type[Arm] | type[Vocabulary], settings: Choice) -> str | None:
    """The one sentence that the settings are refused with; None where they are admitted."""
    try:
        model.model_validate(settings)
    except ValidationError as error:
        (item,) = error.errors()
        return item["msg"].removeprefix("Value error, ")
    return None


@pytest.mark.parametrize(
    "vocabulary", list(every_vocabulary()), ids=lambda v: "-".join(str(value) for value in v.values())
)
def test_every_vocabulary_is_admitted_or_refused_with_its_reason(vocabulary: Choice) -> None:
    expected, found = vocabulary_reasons(vocabulary), refusal(Vocabulary, vocabulary)
    assert (found is None) == (not expected)
    assert found is None or found.startswith(tuple(expected))


@pytest.mark.slow
def test_every_arm_is_admitted_or_refused_with_its_reason() -> None:
    """The estimator does not matter here, nor does it in the arms that train below."""
    counts = {"admitted": 0, "refused": 0}
    for choice in every_arm(estimator=("rloo",)):
        expected, found = reasons(choice), refusal(Arm, arm_of(choice))
        assert (found is None) == (not expected), (choice, found)
        assert found is None or found.startswith(tuple(expected)), (choice, found)
        counts["admitted" if found is None else "refused"] += 1
    # 23 vocabularies with 72 corrections by themselves, 72 beside recompute and 8 beside either other ratio; the 16
    # with the paper's fill by themselves. Of these, 9 and 8 prune on both sides: the others need `deliberate`, as do 30
    # corrections that weigh by two ratios.
    deliberate, unbiased = 23 * 160 + 16, 9 * (160 - 60) + 8
    assert counts["admitted"] == deliberate + unbiased
    assert sum(counts.values()) == len(SOUND) * 4 * 4 * 9 * 2 * 2


# --- what is admitted trains -------------------------------------------------------------------------------


def two_steps(
    model: PreTrainedModel, run: Run, prompts: list[tuple[int, ...]], respond: Callable[[Request, Decoding], Rollout]
) -> list[tuple[float, float, TokenTable]]:
    """Losses, norms and records of two steps, in the loop's order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.training.learning_rate, weight_decay=0.0, fused=True)
    thresholds = Thresholds(run.vocabulary, model.config.vocab_size)
    rule = "full" if run.vocabulary.side == "trainer" else run.vocabulary.rule
    decoding = Decoding(run.training.temperature, run.training.max_new_tokens, rule, run.disturbance)
    steps = []
    for step in range(2):
        minibatches = run.training.model_copy(update={"minibatches": step + 1})
        chosen = list(range(PROMPTS * step, PROMPTS * (step + 1)))
        given = [thresholds.of(problem) for problem in chosen]
        requests = step_requests([prompts[i] for i in chosen], given, GROUP, 5, step)
        rollouts = [respond(request, decoding) for request in requests]
        rewards_PG = torch.tensor([float(zlib.crc32(bytes(str(r.tokens), "ascii")) % 2) for r in rollouts])
        rewards_PG = rewards_PG.view(PROMPTS, GROUP)
        advantages = ESTIMATORS[run.estimator](rewards_PG).flatten().tolist()
        samples = [
            Sample(rollout, advantage, request.threshold, request.seed)
            for rollout, advantage, request in zip(rollouts, advantages, requests, strict=True)
        ]
        own = run.model_copy(update={"training": minibatches})
        steps.append(update(model, optimizer, samples, own, derive_seed("deal", 5, step), Stopwatch()))
        thresholds.observe(chosen, rewards_PG.mean(1).tolist(), steps[-1][2].lost_mass_per_response())
    return steps


def sends_gradient(record: TokenTable, run: Run) -> bool:
    """Whether any token of the step does: it has an advantage, and nothing that may stop it does.

    It may be stopped by the clip, the correction's threshold, the veto or the trainer's set; and, with ratios, by a
    token of the same response outside that set, which makes the response's ratio 0. Which tokens are outside is
    recorded for the weights that sampled. The first update may move one more out of the second's set: its response's
    ratio, which is of the update's own sets, is then 0.
    """
    sequence_T = record.sequence_T
    outside_T = record.trainer.outside_T
    gone_N = record.weights.rejected_N | record.weights.vetoed_N
    if run.correction.weighted:
        gone_N[sequence_T[outside_T]] = True
        gone_N |= record.weights.raw_N == 0
    stopped_T = record.clipped_T | record.weights.masked_T | gone_N[sequence_T]
    if run.vocabulary.outside == "drop":
        stopped_T |= outside_T
    return bool((record.advantage_T[~stopped_T] != 0).any())


@pytest.mark.long
def test_every_arm_that_is_admitted_trains(
    tmp_path: Path, problems: list[Problem], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Every number is finite, and the weights move just where a token sends a gradient."""
    model = create_policy(SMALLEST, tokenizer, seed=3)
    save_policy(model, tokenizer, tmp_path)
    first = {name: weight.clone() for name, weight in model.state_dict().items()}
    sampler = PlainSampler(tmp_path)
    respond = cache(lambda request, decoding: sampler.generate([request], decoding)[0])
    prompts = [tuple(encode_prompt(tokenizer, problem.prompt)) for problem in problems[: 2 * PROMPTS]]
    base = run_of({}, prompts=PROMPTS, group_size=GROUP, max_new_tokens=TOKENS, token_budget=1024)
    trained = still = 0
    for choice in every_arm(deliberate=(True,)):
        if reasons(choice):
            continue
        arm = Arm.model_validate(arm_of(choice))
        names = ("estimator", "clip", "vocabulary", "correction")
        run = base.model_copy(update={name: getattr(arm, name) for name in names})
        model.load_state_dict(first)
        pushed = False
        for loss, norm, record in two_steps(model, run, prompts, respond):
            assert torch.tensor([loss, norm, record.lost_mass_per_response()]).isfinite().all(), choice
            assert (norm > 0) == sends_gradient(record, run), choice
            pushed |= norm > 0
        weights = model.state_dict()
        assert all(weight.isfinite().all() for weight in weights.values()), choice
        assert any(not torch.equal(weight, first[name]) for name, weight in weights.items()) == pushed, choice
        # Without a correction some token always sends one.
        assert pushed or arm.correction.weighted or arm.correction.veto, choice
        trained, still = trained + 1, still + (not pushed)
    assert trained == 3 * (23 * 160 + 16)
    assert still < trained / 5
