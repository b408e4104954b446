"""The exam of causes: its design, its faults, the fit, and a small share of it on an untrained policy."""

import copy
import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from exams.diagnose.__main__ import design, planned
from exams.diagnose.answers import (
    Answer,
    answer,
    calibration_rows,
    case_rows,
    confusion_rows,
    first_tokens,
    group_rows,
    left_out_rows,
    page,
)
from exams.diagnose.cases import _parts, make_log
from exams.diagnose.faults import Case, Fault
from exams.diagnose.mistakes import MISTAKES, plant
from exams.diagnose.models import SPECS, Spec, Trained, score
from exams.diagnose.rules import few_tokens, fit, left_out, of_causes, scores, settle
from exams.diagnose.samplers import quantised
from exams.tasks import TASKS, Task, problems
from tailrl.config.policy import ScratchPolicy
from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.diagnosis.causes import Cause, cause_words
from tailrl.diagnosis.features import FEATURES
from tailrl.diagnosis.log import Log
from tailrl.model.policy import create_policy, save_policy
from tailrl.model.tokenizer import train_tokenizer
from tailrl.runtime.seeding import derive_seed
from tailrl.tasks.registry import load_task


def test_the_design() -> None:
    """Every fault can be planted, every truth is a cause, and no model settles and judges."""
    plan = design()
    for which in ("settle", "pretrained", "judge"):
        for truth, listed in plan[which].items():
            named = {plan["groups"].get(name, name) for name in truth.split("+")}
            assert named <= {"none", *cause_words()}
            for given in listed:
                fault = Fault(
                    **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
                )
                assert not fault.mistake or (fault.mistake in MISTAKES and truth in ("mistake", "positions", "depth"))
        if which == "pretrained":
            continue
        assert {name for truth in plan[which] for name in truth.split("+")} >= {"none", *plan["apart"], *plan["groups"]}
        assert any("+" in truth for truth in plan[which])
    assert set(plan["groups"].values()) <= set(cause_words())
    assert {*plan["fix"], *plan["apart"]} <= {*plan["judge"], *cause_words()}
    by_set = {which: {(one.task, one.kind) for one in SPECS if one.set == which} for which in ("settle", "judge")}
    assert not {task for task, _ in by_set["settle"]} & {task for task, _ in by_set["judge"]}
    assert len({one.seed for one in SPECS}) == len(SPECS)
    kinds = {which: {given["mistake"] for given in plan[which]["mistake"]} for which in ("settle", "judge")}
    assert len(kinds["judge"] - kinds["settle"]) >= 6 and len(kinds["judge"] & kinds["settle"]) >= 4


def test_every_policy_has_its_share() -> None:
    """Judges have every fault, others their share of each list; the real engine stands once; flips need a mixture."""
    plan, counts = design(), {}
    for spec in SPECS:
        own = list(planned(spec))
        counts[spec.name] = len(own)
        assert len({seed for *_, seed in own}) == len({number for number, *_ in own}) == len(own)
        engines = [given for _, _, given, _ in own if "engine" in given]
        assert spec.vllm == bool(engines) and (spec.kind != "mixture" or not any("quantization" in e for e in engines))
        assert spec.kind == "mixture" or not any("routing" in truth for _, truth, _, _ in own)
        listed = plan["pretrained" if spec.kind == "pretrained" else spec.set]
        assert {truth for _, truth, _, _ in own} >= {"none", "mistake", "rounding"} & {*listed}
        assert spec.steps or not any({"age", "reused", "pinned"} & {*given} for _, _, given, _ in own)
    assert counts["signs_mixture"] > 60 and counts["smollm2"] < 12 < counts["doubles_128"]
    clean = [spec for spec in SPECS if spec.set == "judge" for _, truth, _, _ in planned(spec) if truth == "none"]
    assert len(clean) >= 40, "one false alarm in 40 can be seen"
    judged = [
        given for spec in SPECS if spec.set == "judge" for _, truth, given, _ in planned(spec) if truth == "mistake"
    ]
    assert len(judged) >= 16


@pytest.mark.parametrize("task", TASKS)
def test_tasks_have_solutions_and_slips(task: Task) -> None:
    for slip in (0.0, 0.9):
        made = problems(task, 40, 3, slip)
        right = [one.solution is not None and one.solution.endswith(f"\\boxed{{{one.answer}}}") for one in made]
        assert all(right) if not slip else not all(right)
        assert len({one.prompt for one in made}) > 30


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("policy")
    problems = load_task(ArithmeticTask(problems=40, terms=(2, 2), seed=0)).problems
    tokenizer = train_tokenizer(512, (one.prompt + one.solution for one in problems))
    settings = ScratchPolicy(
        vocabulary_size=512, hidden_size=32, layers=1, heads=1, intermediate_size=64, max_length=400
    )
    model = create_policy(settings, tokenizer, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)  # peaks
    save_policy(model, tokenizer, folder)
    model.eval().requires_grad_(False)
    past = [{name: weight.clone() for name, weight in model.state_dict().items()} for _ in range(9)]
    yield Trained(Spec("tiny", "settle", "arithmetic", "llama", 0), folder, model, tokenizer, problems, past)


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ((), Fault()),
        (("shift",), Fault(shift=1)),
        (("mask",), Fault(mask="prompt")),
        (("mask",), Fault(mask="padding")),
        (("nan",), Fault(nan="trainer nan", at=0.05)),
        (("clipped",), Fault(clip="sampler", at=-3.0)),
    ],
)
def test_a_small_share_of_the_exam(trained: Trained, planted: tuple[str, ...], fault: Fault) -> None:
    log, floor = make_log(trained, fault, 7, 48)
    found = answer(Case("settle", "tiny", 0, planted, {}, floor, with_words(log)), ["shift"])
    assert not found.weights
    assert found.right and found.matters and floor < 1e-9


def with_words(log: Log) -> Log:
    """The log with the words' places that files of the exam lack."""
    nothing = (None,) * len(log.start_S)
    return replace(log, text_S=nothing, whole_S=nothing, place_S=nothing, prompt_text_S=nothing)


def test_settings_of_generate(trained: Trained) -> None:
    """Log-probs are of the distribution after the settings; a pruned trainer renormalises over the same sets."""
    penalised, _ = make_log(trained, Fault(settings={"repetition_penalty": 1.5}), 3, 16)
    delta_T = penalised.trainer_T - penalised.sampler_T
    seen_T = penalised.seen_T == 1
    assert delta_T[seen_T].mean() > delta_T[~seen_T].mean() + 0.1
    one, _ = make_log(trained, Fault(settings={"top_k": 1}, pruned=True), 3, 16)
    assert (one.sampler_T == 0).all() and (one.trainer_T == 0).all()
    four, floor = make_log(trained, Fault(settings={"top_k": 4}, pruned=True), 3, 16)
    assert np.abs(four.trainer_T - four.sampler_T).max() < 1e-3 and floor < 1e-9
    assert four.trainer_T.min() > np.log(1 / 512)


def test_weights_of_parts(trained: Trained) -> None:
    """Ages differ about the fault's own where versions are logged; pinned weights stay while the steps go on."""
    at = len(trained.past) - 1
    aged = _parts(trained, Fault(age=2, columns=("version",)), 0)
    assert [step - version for version, step in aged] != [2] * 4 and {step for _, step in aged} == {
        at - 2 * i for i in range(4)
    }
    constant = _parts(trained, Fault(age=2, columns=("version",), constant=True), 0)
    assert [step - version for version, step in constant] == [2] * 4
    pinned = _parts(trained, Fault(pinned=2), 0)
    assert pinned == [(at - 6, at - 6), (at - 6, at - 4), (at - 6, at - 2), (at - 6, at)]
    behind, _ = make_log(trained, Fault(behind=3, columns=("version",)), 4, 8)
    assert (behind.step_S - behind.version_S == 3).all() and len(set(behind.step_S)) == 4


def test_faults_of_a_part(trained: Trained) -> None:
    """One engine of two, the last tokens, weights that change within responses, an adapter of the trainer."""
    two, _ = make_log(trained, Fault(some={"temperature": 0.5}, columns=("engine",)), 3, 16)
    off_S = np.maximum.reduceat(np.abs(two.trainer_T - two.sampler_T), two.start_S)
    other_S = np.array([labels["engine"] == "b" for labels in two.labels_S])
    assert other_S.sum() == 4 and (off_S[~other_S] < 1e-3).all() and (off_S[other_S] > 1e-3).all()
    last, _ = make_log(trained, Fault(last=2), 3, 16)
    wrong_T = np.abs(last.trainer_T - last.sampler_T) > 1e-3
    ends = np.append(last.start_S[1:], len(last.sampler_T))
    from_end_T = ends[last.sequence_T] - np.arange(len(last.sampler_T))
    assert wrong_T.any() and not wrong_T[from_end_T > 2].any()
    moved, _ = make_log(trained, Fault(adapter=1.0), 3, 16)
    assert np.abs(moved.trainer_T - moved.sampler_T).max() > 1e-2
    flight, _ = make_log(trained, Fault(flight=True, age=4), 3, 16)
    assert np.abs(flight.trainer_T - flight.sampler_T).max() < 1e-3, "the fixture's weights never change"


def test_faults_change_what_they_say(trained: Trained) -> None:
    """A temperature of the trainer alone scales its logits; raw log-probs are those of temperature 1."""
    warm, _ = make_log(trained, Fault(trainer_temperature=2.0), 3, 16)
    raw, _ = make_log(trained, Fault(temperature=0.5, trainer_temperature=0.5, raw=True), 3, 16)
    prompts = [request.prompt_tokens for request in trained.requests(derive_seed("part", 3, 0) % 2**31, 16)]
    for log, other, temperature in ((warm, warm.trainer_T, 2.0), (raw, raw.sampler_T, 1.0)):
        ends = [*log.start_S[1:], len(log.token_T)]
        responses = [tuple(log.token_T[a:b].tolist()) for a, b in zip(log.start_S, ends, strict=True)]
        expected_T = torch.cat(score(trained.model, prompts, responses, temperature))
        np.testing.assert_allclose(other, expected_T, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mixture"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_changes_a_model(mistake: str, kind: str, trained: Trained) -> None:
    """Every mistake changes what a model computes, and a copy of the model stays as it was."""
    settings = ScratchPolicy(
        vocabulary_size=512,
        hidden_size=64,
        layers=2,
        heads=2,
        intermediate_size=64,
        experts=4 if kind != "llama" else None,
    )
    model = create_policy(settings, trained.tokenizer, 0).eval().requires_grad_(False)
    model.model.embed_tokens.weight.mul_(30)
    wrong = copy.deepcopy(model)
    size = {"depth": 2.0, "heads": 2.0, "gelu": 1.0, "dropped": 0.0, "dropout": 0.3, "eps": 0.1, "tokens": 1.0}
    plant(wrong, mistake, size.get(mistake, 1.3), 0)
    prompts, responses = [(5, 6, 7, 8)] * 2, [(9, 10, 11), (12, 13)]
    right_T, wrong_T = (torch.cat(score(one, prompts, responses)) for one in (model, wrong))
    assert (right_T - wrong_T).abs().max() > 1e-4
    assert torch.equal(right_T, torch.cat(score(model, prompts, responses)))


def test_a_mistake_of_either_side(trained: Trained) -> None:
    """The sampler's mistake moves its log-probs, the trainer's the trainer's."""
    for side, moved in (("sampler", "sampler_T"), ("trainer", "trainer_T")):
        fault = Fault(mistake="values", by=3.0, mistaken=side)
        log, _ = make_log(trained, fault, 3, 8)
        ends = [*log.start_S[1:], len(log.token_T)]
        responses = [tuple(log.token_T[a:b].tolist()) for a, b in zip(log.start_S, ends, strict=True)]
        prompts = [request.prompt_tokens for request in trained.requests(derive_seed("part", 3, 0) % 2**31, 8)]
        right_T = torch.cat(score(trained.model, prompts, responses)).numpy()
        for name in ("sampler_T", "trainer_T"):
            assert np.allclose(getattr(log, name), right_T, atol=1e-4) == (name != moved)


def test_fake_quantisation() -> None:
    weight = torch.randn(8, 64)
    for kind, levels, size in (("int8", 255, 64), ("int4", 15, 32)):
        rounded = quantised("model.layers.0.self_attn.q_proj.weight", weight, kind)
        step = weight.view(8, -1, size).abs().amax(-1) / (levels // 2)
        assert ((rounded - weight).view(8, -1, size).abs().amax(-1) <= step / 2 + 1e-6).all()
        assert all(len(group.unique()) <= levels for group in rounded.view(-1, size))
    assert quantised("model.embed_tokens.weight", weight, "int8") is weight


def test_the_fit_finds_what_decides_a_cause() -> None:
    random = np.random.default_rng(0)
    value_CF = random.normal(size=(600, len(FEATURES)))
    above_C2 = value_CF[:, [2, 5]] > 0
    is_CK = np.column_stack([above_C2, ~above_C2.any(1)]).astype(np.float64)
    models = [str(i % 4) for i in range(600)]
    data, held_CK = settle(value_CF, is_CK, models, [""] * 600, ["a", "b", "unknown"])
    assert is_CK[np.arange(600), held_CK.argmax(1)].mean() > 0.9
    weights = data["weights"]
    assert isinstance(weights, dict)
    for cause, place in (("a", 2), ("b", 5)):
        assert max(weights[cause], key=lambda name: abs(weights[cause][name])) == FEATURES[place]
    low = min(weights["unknown"], key=lambda name: weights["unknown"][name])
    assert low in (FEATURES[2], FEATURES[5]) and set(weights["unknown"]) == {*FEATURES, "constant"}


def test_a_kind_is_judged_without_its_like() -> None:
    """A case of a kind is predicted from cases of other models and other kinds; a case without one, of other models."""
    value_CF = np.array([[1.0], [0.5], [1.5], [-1.0], [-0.5], [1.0], [2.0]])
    is_CK = np.array([[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 2 + [[1.0, 0.0]] * 2)
    models, kinds = ["m", "n", "n", "m", "n", "n", "m"], ["k", "k", "", "", "", "l", ""]
    held_CK = left_out(value_CF, is_CK, models, kinds, 0.3)
    for place, chosen in ((0, [2, 4, 5]), (3, [1, 2, 4, 5]), (1, [3, 6]), (5, [0, 3, 6])):
        expected_K = scores(value_CF[[place]], fit(value_CF[chosen], is_CK[chosen], 0.3))[0]
        np.testing.assert_allclose(held_CK[place], expected_K, atol=1e-3)


def test_parts_of_a_cause_are_one_cause() -> None:
    columns = ["a", "b", "a/x", "a/y"]
    marked = of_causes(np.array([[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]), columns)
    assert marked.tolist() == [[1, 0, 1, 1], [0, 1, 0, 0], [1, 0, 1, 1]]


def test_a_penalty_shrinks_weights_and_no_constant() -> None:
    """With hardly any weights the probabilities are the shares of the causes; either of two counts."""
    value_CF = np.array([[-1.0], [1.0], [1.0], [1.0]])
    is_CK = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    weak_KD, strong_KD = fit(value_CF, is_CK, 0.1), fit(value_CF, is_CK, 1e6)
    assert weak_KD[0, 0] - weak_KD[1, 0] > 1 and np.abs(strong_KD[:, 0]).max() < 1e-3
    assert 1 / (1 + np.exp(strong_KD[1, 1] - strong_KD[0, 1])) == pytest.approx(0.75, abs=0.01)
    both_KD = fit(value_CF, np.array([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]), 1e6)
    assert both_KD[0, 1] - both_KD[1, 1] > 3, "the second cause has no case of its own"


def test_tables() -> None:
    def one(
        planted: tuple[str, ...],
        named: list[tuple[str, float]],
        k3: float = 1e-3,
        two: bool = False,
        weights: bool = False,
    ) -> Answer:
        case = Case("judge", "m", 0, planted, {"floor": 0.1}, 1e-6, None)  # type: ignore[arg-type]
        causes = tuple(Cause(name, sure, ()) for name, sure in named)
        return Answer(case, k3, causes, tuple(name for name, _ in named[: 1 + two]), weights)

    answers = [
        one((), []),
        one((), [("floor", 0.6)]),
        one(("floor",), [("floor", 0.95), ("stale", 0.2)]),
        one(("floor",), [("stale", 0.8)]),
        one(("floor",), [("stale", 0.5), ("floor", 0.4)], two=True, weights=True),
        one(("floor",), [("stale", 0.8)], k3=1e-6),  # no larger than the noise floor: does not count
        one(("nan",), [("nan", 0.95)], k3=0.0),  # a fault of the log counts always
        one(("nan", "floor"), [("nan", 0.95), ("floor", 0.4)]),
    ]
    rows = {row["group"]: (row["right"], row["cases"]) for row in group_rows(answers)}
    assert rows == {
        "all causes": (4, 5),
        "floor": (2, 3),
        "nan": (1, 1),
        "two causes": (1, 1),
        "clean logs": (1, 2),
        "the planted cause first": (3, 5),
        "answers with two causes": (1, 5),
        "weights where a fix is due": (1, 5),
        "two causes, both named": (0, 1),
    }
    confusion = {row["truth"]: row for row in confusion_rows(answers)}
    assert confusion["floor"]["stale"] == 2 and confusion["none"]["floor"] == 1 and confusion["none"]["none"] == 1
    calibration = {row["sure"]: (row["answers"], row["right"]) for row in calibration_rows(answers)}
    assert calibration == {"0.5 to 0.7": (1, "0.000"), "0.7 to 0.9": (1, "0.000"), "0.9 to 1": (3, "1.000")}
    tables = {"groups": group_rows(answers), "confusion": confusion_rows(answers), "cases": case_rows(answers)}
    plan = {
        "limits": {"right": 0.85, "two": 0.3334, "weights": 0.03, "false_alarms": 0.025},
        "words": {"age": "old weights"},
        "notes": "",
    }
    text = page(
        answers, tables | {"calibration": [{"tokens": "whole"} | row for row in calibration_rows(answers)]}, plan
    )
    assert "- All causes: 80.0% right. The limit is **missed**." in text
    assert "- Two causes in 20.0% of the answers. The limit is met." in text
    assert "- Weights where a fix is due in 20.0%. The limit is **missed**." in text
    assert "- Clean logs: 50.0% with a cause. The limit is **missed**." in text
    mistakes = [
        Answer(Case("judge", "m", i, ("prompt",), {}, 0.0, None, ("mistake",), i > 0), 1.0, causes, named)  # type: ignore[arg-type]
        for i, (causes, named) in enumerate([((), ()), ((Cause("prompt", 0.9, ()),), ("prompt",))])
    ]
    apart = {row["group"]: (row["right"], row["cases"]) for row in group_rows(mistakes)}
    assert apart["mistake"] == (1, 2) and apart["mistakes of new kinds"] == (1, 1)
    assert confusion_rows(mistakes)[0]["truth"] == "mistake" and confusion_rows(mistakes)[0]["prompt"] == 1
    assert "| setting | age | old weights |" in text and "| cause | floor | tail floor |" in text
    assert "| m | floor | floor=0.1 | 0.001 | stale | stale:0.80 |" in text and "85% right" in text


def test_three_causes_are_no_answer() -> None:
    case = Case("judge", "m", 0, ("floor",), {}, 0.0, None)  # type: ignore[arg-type]
    assert not Answer(case, 1.0, (Cause("floor", 0.4, ()),), ("floor", "stale", "prompt")).right


def test_the_first_tokens_of_a_log(trained: Trained) -> None:
    log = with_words(make_log(trained, Fault(), 3, 8)[0])
    part = first_tokens(log, 20)
    assert part.sampler_T.tolist() == log.sampler_T[:20].tolist() and len(part.start_S) == part.sequence_T[-1] + 1


def test_few_tokens_halve_how_sure_an_answer_is() -> None:
    """Where parts of 100 tokens are right as often as not, and the fit is certain, some hundred tokens halve it."""
    random = np.random.default_rng(0)
    value_CF = np.repeat([[4.0], [-4.0]], 40, 0) + random.normal(0, 0.1, (80, 1))
    value_CF = np.column_stack([value_CF, np.zeros((80, len(FEATURES) - 1))])
    is_CK = np.repeat([[1.0, 0.0], [0.0, 1.0]], 40, 0)
    models = [str(i % 4) for i in range(80)]
    data, _ = settle(value_CF, is_CK, models, [""] * 80, ["a", "b"])
    half = [(i, 100, (value_CF[i] * (1 if i % 2 else -1)).tolist()) for i in range(80)]
    sound = [(i, 100, value_CF[i].tolist()) for i in range(80)]
    assert few_tokens(value_CF, is_CK, models, half, data, ["a", "b"]) == pytest.approx(100, rel=0.3)
    assert few_tokens(value_CF, is_CK, models, sound, data, ["a", "b"]) == pytest.approx(20, rel=0.01), "no fewer"


def test_what_the_other_models_say_of_settling_cases() -> None:
    case = Case("settle", "m", 0, ("floor",), {}, 0.0, None)  # type: ignore[arg-type]
    two = Case("settle", "m", 1, ("floor", "stale"), {}, 0.0, None)  # type: ignore[arg-type]
    fault = Case("settle", "m", 2, ("nan",), {}, 0.0, None)  # type: ignore[arg-type]
    chances_CK = [[0.8, 0.1, 0.1, 0, 0], [0.1, 0.8, 0.1, 0, 0], [0.8, 0.1, 0.1, 0, 0], [0.28, 0.27, 0.15, 0.15, 0.15]]
    logit_CK = np.log(np.array(chances_CK) + 1e-9)
    rows = left_out_rows([case, two, fault, case], logit_CK, ["floor", "stale", "unknown", "raw", "prompt"])
    assert [(row["left out"], row["right"], row["cases"], row["else"]) for row in rows] == [
        ("all", 2, 3, ""),
        ("floor", 1, 2, "unknown"),
        ("floor+stale", 1, 1, ""),
    ]
    parts = left_out_rows([case], np.log([[0.3, 0.4, 0.3]]), ["floor", "stale", "floor/part"])
    assert parts[0]["right"] == 1, "parts of a cause count together"


def test_published_tables_are_of_the_published_cases() -> None:
    """The groups' shares follow from the cases beside them."""
    folder = Path(__file__).parents[3] / "docs/results/diagnose_exam"
    for own in (folder, *(folder / name for name in ("first", "second", "third", "fourth"))):
        cases, groups = (list(csv.DictReader((own / f"{n}.csv").open(encoding="utf-8"))) for n in ("cases", "groups"))
        counted = [row for row in cases if row["counts"] == "1" and row["truth"] != "none"]
        assert groups[0]["group"] == "all causes" and int(groups[0]["cases"]) == len(counted)
        assert int(groups[0]["right"]) == sum(row["right"] == "1" for row in counted)
