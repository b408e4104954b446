"""One update against a loop over sequences, and whole runs over an engine that samples exactly.

The trainer's packing, chunking and bookkeeping must vanish: what is compared with is transformers' own attention, one
sequence at a time, log-softmax and the estimator's definition.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampler_fixture import PlainSampler
from step_fixture import DVP, GROUP, PROMPTS, RHO, STEPS, make_rollouts, run_of, samples_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from tailrl.artifacts.tokens import ARRAYS
from tailrl.config.jobs import Run
from tailrl.model.policy import load_policy, load_tokenizer, named_weights
from tailrl.objective.advantages import ESTIMATORS
from tailrl.rollout import Decoding
from tailrl.rollout.types import Rollout
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem, write_problems
from tailrl.tracking.metrics import METRICS
from tailrl.training import scorer
from tailrl.training.loop import train
from tailrl.training.optimizer import make_optimizer
from tailrl.training.placement import decided
from tailrl.training.samples import Sample
from tailrl.training.scorer import make_scorer
from tailrl.training.step import accumulate_gradients, update
from tailrl.training.stopwatch import Stopwatch

ARMS: dict[str, dict[str, Any]] = {
    "naive": {},
    "dvp": {"vocabulary": DVP},
    "dvp_mis": {"vocabulary": DVP, "correction": {"sequence": "mis", "veto": 1e-4}},
    "paper_fill": {"vocabulary": {**DVP, "outside": "paper_fill"}},
}


def make_run(arm: str, **training: Any) -> Run:
    return run_of(ARMS[arm], arm, **training)


# --- one update --------------------------------------------------------------------------------------


def oracle(
    model: PreTrainedModel, folder: Path, rollouts: list[Rollout], advantages: list[float], run: Run
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Loss, gradients and some metrics from the definitions, float64, one sequence at a time."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    plain.load_state_dict(dict(named_weights(model)))
    terms, mass, inside, weights, squares, products = [], [], [], [], [], []
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        first = len(rollout.prompt_tokens)
        row = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]])
        probs_TV = (plain(row).logits[0, first - 1 : -1] / run.training.temperature).softmax(-1)
        rho = RHO if run.vocabulary.rule == "min_p" else 0.0
        safe_TV = probs_TV >= rho * probs_TV.amax(-1, keepdim=True)
        masked_TV = torch.where(safe_TV, probs_TV, 0.0)
        steps = range(len(rollout.tokens))
        safe = [bool(safe_TV[t, a]) for t, a in zip(steps, rollout.tokens, strict=True)]
        logp = [
            (masked_TV[t, a] / masked_TV[t].sum()).log() for t, a in zip(steps, rollout.tokens, strict=True) if safe[t]
        ]
        weight = 1.0
        if run.correction.sequence == "mis":
            delta = sum(value.item() for value in logp) - rollout.logp_sampler_T.astype(float).sum()
            weight = math.exp(delta) if all(safe) and delta <= math.log(run.correction.limit) else 0.0
        terms.append(-weight * advantage * sum(logp) / len(rollouts))
        infer = rollout.logp_sampler_T.astype(float)
        square = math.exp(2 * (sum(value.item() for value in logp) - infer.sum())) if all(safe) else 0.0
        full = sum(probs_TV[t, a].log().item() for t, a in zip(steps, rollout.tokens, strict=True))
        full_square = math.exp(2 * (full - (infer + rollout.log_kept_sampler_T).sum()))
        squares.append((square, full_square))
        products.append(masked_TV.sum(-1).prod().item())
        mass += masked_TV.sum(-1).tolist()
        inside += safe
        weights.append(weight)
    loss = sum(terms)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    # All cases occur: whole weights, one response above the threshold, and three responses with an outside token.
    if run.correction.sequence == "mis":
        assert sum(weight > 0 for weight in weights) == 3
    metrics = {
        "rollout_corr/rollout_is_mean": np.mean(weights),
        "dvp/kept_mass_train_mean": np.mean(mass),
        "dvp/kept_mass_train_min": min(mass),
        "dvp/sampled_outside_train_support_count": inside.count(False),
        "rollout_corr/chi2_seq": np.mean(squares, axis=0)[0] - 1,
        "rollout_corr_unmasked/chi2_seq": np.mean(squares, axis=0)[1] - 1,
        "dvp/bias_bound_paper": max(len(rollout.tokens) for rollout in rollouts) * (1 - min(mass)),
        "dvp/total_variation": 1 - np.mean(products),
    }
    return loss.item(), gradients, metrics


@pytest.mark.parametrize("arm", ["naive", "dvp", "dvp_mis"])
def test_an_update_is_the_definition(model: PreTrainedModel, policy_folder: Path, arm: str) -> None:
    run = make_run(arm)
    run = run.model_copy(
        update={"correction": run.correction.model_copy(update={"veto": None, "sequence_threshold": 2.0})}
    )
    rollouts, advantages = make_rollouts()
    loss, record = accumulate_gradients(model, samples_of(rollouts, advantages, run), make_scorer(run), Stopwatch())
    expected_loss, gradients, metrics = oracle(model, policy_folder, rollouts, advantages, run)
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    assert max(gradient.abs().max().item() for gradient in gradients.values()) > 1e-3
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = gradients[name].abs().max().item()
        torch.testing.assert_close(parameter.grad.double(), gradients[name], rtol=0, atol=1e-4 * scale + 1e-7, msg=name)
    found = record.metrics()
    assert {name: found[name] for name in metrics} == pytest.approx(metrics, rel=1e-4)


@pytest.mark.parametrize("arm", ARMS)
def test_the_token_budget_changes_nothing(model: PreTrainedModel, arm: str) -> None:
    results = []
    for budget in (1, 45, 10_000):
        model.zero_grad()
        run = make_run(arm, token_budget=budget)
        loss, record = accumulate_gradients(model, samples_of(*make_rollouts(), run), make_scorer(run), Stopwatch())
        gradient = torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])
        results.append((loss, gradient, record))
    most, some, one = (len(record.loss_M) for *_, record in results)
    assert most == 7 > some > one == 1
    for loss, gradient, record in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-4, abs=1e-6)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-3, atol=1e-5 * results[0][1].abs().max().item())
        assert record.metrics() == pytest.approx(results[0][2].metrics(), rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("advantages", [[0.0] * 4, [0.7, 0.0, -0.7, 0.0]])
def test_a_penalty_pulls_responses_without_an_advantage_too(
    model: PreTrainedModel, policy_folder: Path, advantages: list[float]
) -> None:
    """The gradient of the definition, float64, one sequence at a time."""
    run = run_of({"correction": {"log_ratio_penalty": 0.5}})
    rollouts, _ = make_rollouts(4)
    loss, _ = accumulate_gradients(model, samples_of(rollouts, advantages, run), make_scorer(run), Stopwatch())
    plain = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float64, attn_implementation="eager")
    plain.load_state_dict(dict(named_weights(model)))
    terms = []
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        first, sampled_T = len(rollout.prompt_tokens), torch.tensor(rollout.tokens)
        row = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]])
        logp_TV = (plain(row).logits[0, first - 1 : -1] / run.training.temperature).log_softmax(-1)
        logp_T = logp_TV.gather(1, sampled_T[:, None])[:, 0]
        squared_T = (logp_T - torch.tensor(rollout.logp_sampler_T, dtype=torch.float64)).square()
        terms.append((0.5 * squared_T - advantage * logp_T).sum() / 4)
    expected = torch.stack(terms).sum()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    weights = dict(plain.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, weights[name].grad.float(), atol=1e-5, rtol=1e-3)
    assert max(weight.grad.abs().max().item() for weight in model.parameters()) > 1e-3


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("silent", [[], [0, 3], [0, 1, 2, 4], list(range(7))])
def test_samples_without_an_advantage_are_only_recorded(
    model: PreTrainedModel, arm: str, silent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient equals a backward through all samples; where no sample has an advantage it is 0, not missing."""
    rollouts, advantages = make_rollouts()
    advantages = [0.0 if i in silent else advantage for i, advantage in enumerate(advantages)]
    run, results, scored = make_run(arm, token_budget=45), [], []
    score = scorer.Scorer.__call__

    def spy(self: scorer.Scorer, model: PreTrainedModel, samples: Sequence[Sample]) -> scorer.Scored:
        scored.append((torch.is_grad_enabled(), [sample.advantage for sample in samples]))
        return score(self, model, samples)

    monkeypatch.setattr(scorer.Scorer, "__call__", spy)
    # So small an advantage that it is one for the sum alone.
    for least in (0.0, 1e-30):
        model.zero_grad()
        samples = samples_of(rollouts, [a or least for a in advantages], run)
        loss, record = accumulate_gradients(model, samples, make_scorer(run), Stopwatch())
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        metrics = record.metrics()
        results.append((loss, gradients, metrics))
        with_gradient = sum(len(given) for enabled, given in scored if enabled)
        assert with_gradient == (7 - len(silent) if least == 0 and len(silent) < 7 else 7)
        assert sum(len(given) for _, given in scored) == 7
        scored.clear()
    (loss, found, metrics), (loss_of_all, expected, metrics_of_all) = results
    assert loss == pytest.approx(loss_of_all, rel=1e-5, abs=1e-12)
    assert metrics == pytest.approx(metrics_of_all, rel=1e-4, abs=1e-6, nan_ok=True)
    assert {*found} == {name for name, _ in model.named_parameters()} == {*expected}
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert (largest > 1e-3) == (len(silent) < 7)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * largest + 1e-20, msg=name)


def test_tokens_are_recorded_as_they_were_sampled(model: PreTrainedModel) -> None:
    rollouts, advantages = make_rollouts()
    run = make_run("dvp", token_budget=1)
    _, record = accumulate_gradients(model, samples_of(rollouts, advantages, run), make_scorer(run), Stopwatch())
    tokens = record.arrays(step=0)
    order = sorted(rollouts, key=lambda r: len(r.prompt_tokens) + len(r.tokens))
    np.testing.assert_array_equal(tokens["logp_infer_masked"], np.concatenate([r.logp_sampler_T for r in order]))
    unmasked = np.concatenate([r.logp_sampler_T + r.log_kept_sampler_T for r in order])
    np.testing.assert_array_equal(tokens["logp_infer"], unmasked)
    assert tokens["outside"].any() and not tokens["outside"].all()
    assert (tokens["logp_train_masked"] >= tokens["logp_train"]).all()


@pytest.mark.parametrize("minibatches", [1, 3])
def test_what_each_token_is_and_what_its_response_earned(model: PreTrainedModel, minibatches: int) -> None:
    """Minibatches are dealt by chance, and responses without an advantage come last in theirs."""
    rollouts, advantages = make_rollouts()
    advantages[1] = advantages[4] = 0.0
    clip: dict[str, Any] = {"clip": {"ratio": "recompute"}} if minibatches > 1 else {}
    run = run_of({"vocabulary": DVP, **clip}, minibatches=minibatches)
    optimizer = make_optimizer(model, run.training)
    rewards_B = np.arange(7, dtype=np.float32) / 7
    samples = [
        replace(sample, reward=reward)
        for sample, reward in zip(samples_of(rollouts, advantages, run), rewards_B.tolist(), strict=True)
    ]
    _, _, record = update(model, optimizer, samples, run, 3, Stopwatch())
    order = record.number_N.tolist()
    assert sorted(order) == list(range(7)) != order
    tokens = record.arrays(step=4)
    assert set(tokens["step"]) == {4}
    assert len({len(array) for array in tokens.values()}) == 1
    assert {name: str(tokens[name].dtype) for name in ("token", "position", "sequence", "advantage", "reward")} == {
        **dict.fromkeys(("token", "position", "sequence"), "int32"), **dict.fromkeys(("advantage", "reward"), "float32")
    }  # fmt: skip
    for number, rollout in enumerate(rollouts):
        own = tokens["sequence"] == number
        assert tokens["token"][own].tolist() == list(rollout.tokens)
        assert tokens["position"][own].tolist() == list(range(len(rollout.tokens)))
        np.testing.assert_array_equal(tokens["logp_infer_masked"][own], rollout.logp_sampler_T)
        assert set(tokens["advantage"][own]) == {np.float32(advantages[number])}
        assert set(tokens["reward"][own]) == {rewards_B[number]}


def test_a_loss_that_is_not_finite_is_refused(model: PreTrainedModel) -> None:
    rollouts, advantages = make_rollouts()
    with pytest.raises(StudyError, match="loss is nan"):
        run = make_run("naive")
        samples = samples_of(rollouts, [math.nan, *advantages[1:]], run)
        accumulate_gradients(model, samples, make_scorer(run), Stopwatch())


# --- whole runs --------------------------------------------------------------------------------------


def trained(files: Path, policy: Path, run: Run, seed: int = 5, name: str = "out") -> list[dict[str, float]]:
    train(run, seed, policy, files / "problems.jsonl", files / name, files)
    return [json.loads(line) for line in (files / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_over_an_exact_engine(
    files: Path, policy_folder: Path, plain_samplers: list[PlainSampler], arm: str
) -> None:
    run = make_run(arm)
    metrics = trained(files, policy_folder, run)
    assert [line["train/step"] for line in metrics] == [0, 1, 2]
    assert [line["train/learning_rate"] for line in metrics] == pytest.approx([5e-4, 1e-3, 1e-3])
    for line in metrics:
        assert [*line] == [*METRICS]
        # The sampler is the trainer: nothing differs but the order of float32 sums.
        assert 0 <= line["rollout_corr/k3_kl"] < 1e-6 and line["rollout_corr_unmasked/k3_kl"] < 1e-6
        assert line["rollout_corr_raw/rollout_is_mean"] == pytest.approx(1, abs=1e-3)
        assert line["dvp/kept_mass_train_mean"] == pytest.approx(line["dvp/kept_mass_rollout_mean"], abs=1e-3)
        assert line["rollout_corr/veto_seq_fraction"] == line["dvp/sampled_outside_train_support_count"] == 0
        kept = line["dvp/kept_vocab_per_token_train"]
        assert kept == pytest.approx(line["dvp/kept_vocab_per_token_rollout"], abs=0.1)
        assert kept == 600 if arm == "naive" else 1 < kept < 599
    assert any(0 < line["reward/mean"] < 1 for line in metrics) and metrics[0]["train/grad_norm"] > 0

    tokens = np.load(files / "out" / "tokens.npz")
    lengths = {step: round(metrics[step]["response/length_mean"] * PROMPTS * GROUP) for step in (0, 2)}
    assert {step: int((tokens["step"] == step).sum()) for step in lengths} == lengths
    assert {len(tokens[name]) for name in tokens.files} == {sum(lengths.values())}
    np.testing.assert_allclose(tokens["logp_train"], tokens["logp_infer"], atol=1e-4)
    np.testing.assert_allclose(tokens["logp_train_masked"], tokens["logp_infer_masked"], atol=1e-4)
    assert not tokens["outside"].any()
    assert set(tokens.files) == set(ARRAYS)
    for number in (0, 2):
        own = {name: tokens[name][tokens["step"] == number] for name in tokens.files}
        first = own["position"] == 0
        assert sorted(own["sequence"][first]) == list(range(PROMPTS * GROUP))
        by_sequence = np.argsort(own["sequence"][first])
        reward_PG = own["reward"][first][by_sequence].reshape(PROMPTS, GROUP)
        assert reward_PG.mean() == metrics[number]["reward/mean"]
        advantage_PG = ESTIMATORS[run.estimator](torch.from_numpy(reward_PG)).numpy()
        np.testing.assert_array_equal(own["advantage"][first][by_sequence].reshape(PROMPTS, GROUP), advantage_PG)

    record = json.loads((files / "out" / "run.json").read_text())
    assert (record["study"], record["arm"], record["seed"]) == ("test", arm, 5)
    assert Run.model_validate(record["settings"]) == decided(run)
    assert record["sampler_self_test"] == 0.0
    assert record["wall_seconds"] > record["startup_seconds"] > 0

    [sampler] = plain_samplers
    [(tested, decoding)] = sampler.tested
    assert decoding == Decoding(0.8, 8, "full" if arm == "naive" else "min_p")
    assert len(tested) == 8 and {request.threshold for request in tested} == {run.vocabulary.threshold(600)}
    assert len(sampler.handed) == STEPS + 1  # once before the first step, and after every step
    saved = dict(named_weights(load_policy(files / "out" / "policy")))
    first = dict(named_weights(load_policy(policy_folder)))
    assert load_tokenizer(files / "out" / "policy").eos_token_id is not None
    for name, weight in saved.items():
        assert torch.equal(sampler.handed[-1][name], weight) and torch.equal(sampler.handed[0][name], first[name])
    for before, after in zip(sampler.handed, sampler.handed[1:], strict=False):
        assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_a_task_may_be_as_small_as_a_step(
    files: Path, policy_folder: Path, problems: list[Problem], plain_samplers: list[PlainSampler]
) -> None:
    write_problems(problems[:2], files / "problems.jsonl")
    assert len(trained(files, policy_folder, make_run("dvp", steps=1))) == 1
    assert len(plain_samplers[0].tested[0][0]) == 4


@pytest.mark.usefixtures("plain_samplers")
def test_a_seed_repeats_its_run(files: Path, policy_folder: Path) -> None:
    """To the bit, in the metrics and in the policy; only times differ. Another arm starts with the same problems."""
    runs = [
        trained(files, policy_folder, make_run("dvp", steps=2), seed, name)
        for seed, name in ((5, "one"), (5, "two"), (6, "three"))
    ]
    timed = ("time/", "throughput/")
    one, two, three = ([{k: v for k, v in line.items() if not k.startswith(timed)} for line in run] for run in runs)
    assert one == two != three
    weights = [(files / name / "policy" / "model.safetensors").read_bytes() for name in ("one", "two", "three")]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.usefixtures("plain_samplers")
@pytest.mark.parametrize("arm", ["naive", "dvp"])
def test_a_policy_of_nan_is_one_sentence(
    files: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    def load_broken(path: Path) -> PreTrainedModel:
        model = load_policy(path)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
        return model

    monkeypatch.setattr("tailrl.training.loop.load_policy", load_broken)
    with pytest.raises(StudyError, match=rf"^arm {arm}, seed 5, step 2: [^\n]*$"):
        trained(files, policy_folder, make_run(arm))
