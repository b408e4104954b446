"""Supervised training on worked solutions, against transformers' own loss."""

import math

import pytest
import torch
from moe_fixture import SETTINGS
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tailrl.config.policy import ScratchPolicy, WarmStart
from tailrl.kernels.packing import pack_batch
from tailrl.model.forward import hidden_states
from tailrl.model.policy import create_policy, named_weights
from tailrl.model.routing import Routing
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem
from tailrl.training.base_policy import encode_solutions, warm_start


def test_solutions_are_closed_by_the_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    problem = Problem("", "17+15=\n", "32", "17+15=32,\\boxed{32}")
    prompts, solutions = encode_solutions([problem], tokenizer)
    assert tokenizer.decode(prompts[0]) == problem.prompt
    assert tokenizer.decode(solutions[0]) == problem.solution + "<end>"


def test_the_first_loss_is_the_mean_over_solution_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> None:
    config = model.config.__class__.from_dict(model.config.to_dict())
    config._attn_implementation = "eager"
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(dict(named_weights(model)))
    terms = []
    for problem in problems[:6]:
        prompt, solution = tokenizer.encode(problem.prompt), tokenizer.encode(problem.solution + "<end>")
        with torch.no_grad():
            logp = plain(torch.tensor([prompt + solution])).logits[0].double().log_softmax(-1)
        terms += [-logp[len(prompt) + t - 1, token].item() for t, token in enumerate(solution)]
    losses = warm_start(model, tokenizer, problems[:12], WarmStart(batch=6))
    assert len(losses) == 2
    assert losses[0] == pytest.approx(sum(terms) / len(terms), rel=1e-5)


def test_the_loss_falls_and_its_log_shows_it(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = warm_start(model, tokenizer, problems * 6, WarmStart(batch=10))
    assert len(losses) == 36
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 36 and shown[-1] == f"warm start  step 36/36  loss {losses[-1]:.3g}"
    assert losses[0] == pytest.approx(math.log(600), abs=0.3)
    assert losses[-1] < losses[0] / 2


def test_it_is_deterministic_and_the_last_batch_may_be_short(
    tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> None:
    settings = ScratchPolicy(vocabulary_size=600, hidden_size=32, heads=1, layers=1)
    runs = [
        warm_start(create_policy(settings, tokenizer, 0), tokenizer, problems[:11], WarmStart(batch=4)) for _ in "ab"
    ]
    assert len(runs[0]) == 3
    assert runs[0] == runs[1]


def test_a_loss_that_is_not_finite_is_one_sentence(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    with pytest.raises(StudyError, match=r"warm start: the loss is nan at step 0; lower policy\.warm_start"):
        warm_start(model, tokenizer, problems[:8], WarmStart(batch=4))


def test_a_mixture_learns_and_spreads_its_tokens(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> None:
    """The losses that are told are of the solutions alone; the load-balancing loss moves the routers besides."""
    used, losses = [], []
    for weight in (0.0, 1.0):
        model = create_policy(SETTINGS, tokenizer, 0)
        losses.append(warm_start(model, tokenizer, problems * 6, WarmStart(batch=10, load_balancing=weight)))
        prompts, solutions = encode_solutions(problems, tokenizer)
        batch, routing = pack_batch(prompts, solutions), Routing()
        with torch.no_grad():
            hidden_states(model, batch.tokens_P, batch.packing, routing)
        used.append(routing.load_balancing(SETTINGS.experts_per_token).item())
    assert losses[0][0] == losses[1][0] == pytest.approx(math.log(600), abs=0.3)
    assert all(each[-1] < each[0] / 2 for each in losses)
    assert used[1] < used[0]
