"""The words: each verdict for its intervals, arms from their settings, and what ran."""

import dataclasses
from typing import Any, get_args, get_origin

import numpy as np
import pytest
from pydantic import BaseModel

from tailrl.artifacts.records import Hardware
from tailrl.artifacts.results import Results, read_results
from tailrl.config.arm import Arm
from tailrl.config.base import Kinds
from tailrl.config.study import Study
from tailrl.config.words import describe
from tailrl.reports import arm_pairs
from tailrl.reports.overview.arms import describe_arms
from tailrl.reports.overview.headline import headline
from tailrl.reports.overview.summary import summarize
from tailrl.reports.overview.verdicts import judge
from tailrl.reports.page import page
from tailrl.reports.scores.numbers import compare_arms, gains_over_base
from tailrl.reports.what_ran import what_ran, work_share


def words_of(**arm: Any) -> list[str]:
    return describe(Arm.model_validate({"deliberate": True, **arm}))


def test_describe() -> None:
    assert words_of()[:2] == ["RLOO on all tokens", "no weights"]
    assert not any("veto" in clause for clause in words_of())
    min_p = {"rule": "min_p", "rho": "e-13"}
    assert words_of(vocabulary=min_p, correction={"sequence": "mis", "veto": 1e-4})[:3] == [
        "RLOO on the min-p set, rho = e-13",
        "sequence weights mis, C = 2",
        "veto below a token ratio of 0.0001",
    ]
    other = {"sequence": "tis", "sequence_threshold": 3.0}
    assert words_of(correction=other)[1] == "sequence weights tis, C = 3"
    rules = [{"of": "k2", "by": "max", "above": 0.1}, {"of": "tv", "by": "token", "above": 0.2, "below": -0.2}]
    rules[1] |= {"ratio": "r_rollout", "when": "outward"}
    later = {"token": "tis", "token_threshold": 2.0, "token_lower": 0.5}
    later |= {"reject": rules, "normalise": True, "veto_above": 100.0}
    assert words_of(correction=later)[1:6] == [
        "token weights tis, C = 2, from 0.5",
        "rejected: a response's max of k2 above 0.1",
        "rejected: tv of a token by r_rollout above 0.2 or below -0.2 where A widens it",
        "normalised to a mean weight of 1",
        "veto above a token ratio of 100.0",
    ]
    both = {**other, "token": "mask", "token_threshold": 1.5}
    assert words_of(correction=both, clip={"ratio": "recompute", "high": 0.28})[1:4] == [
        "clipped ratio, recompute, from 1 - 0.2 to 1 + 0.28",
        "token weights mask, C = 1.5",
        "sequence weights tis, C = 3",
    ]


@pytest.mark.parametrize(
    ("estimator", "vocabulary", "clause"),
    [
        ("grpo", {"rule": "top_k", "k": 20}, "GRPO on the top-k set, k = 20"),
        ("rloo", {"rule": "top_p", "p": 0.9}, "RLOO on the top-p set, p = 0.9"),
        (
            "reinforce",
            {"rule": "entropy", "rho": "e-5", "adapt": "budget", "budget": 0.01},
            "REINFORCE on the entropy set, rho = e-5, adapted to the budget of 0.01",
        ),
        (
            "rloo",
            {"rule": "min_p", "rho": "e-5", "side": "sampler"},
            "RLOO on the min-p set, rho = e-5, in the sampler only",
        ),
        (
            "rloo",
            {"rule": "min_p", "rho": "e-5", "outside": "paper_fill"},
            "RLOO on the min-p set, rho = e-5, paper's fill outside",
        ),
    ],
)
def test_describe_a_vocabulary(estimator: str, vocabulary: dict[str, Any], clause: str) -> None:
    arm = Arm.model_validate({"estimator": estimator, "vocabulary": vocabulary, "deliberate": True})
    assert describe(arm)[0] == clause


VARIED: list[tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = [
    (
        {},
        {
            "estimator": ("grpo", "reinforce"),
            "sampler.dtype": ("float32", "float16"),
            "sampler.verify": (True,),
            "sampler.kv_cache_dtype": ("fp8_e4m3", "fp8_e5m2"),
            "sampler.quantization": ("int8", "int4", "fp8"),
            "sampler.routes": (True,),
            "sampler.gpu_memory_utilization": (0.5, 0.50000001),
            "sampler.tensor_parallel": (2, 4),
            "sampler.enforce_eager": (True, False),
            "correction.token": ("is", "tis", "mask"),
            "correction.sequence": ("is", "tis", "mis", "geometric", "reject_k1", "reject_k3"),
            "correction.veto": (1e-4, 1e-5),
            "correction.veto_above": (100.0, 1000.0),
            "correction.centering": ("full",),
            "correction.reject": (
                ({"of": "k3", "by": "max", "above": 0.01},),
                ({"of": "k3", "by": "token", "above": 0.01},),
                ({"of": "k1", "by": "mean", "above": 0.01},),
                ({"of": "k1", "by": "mean", "above": 0.01, "below": -0.01},),
                ({"of": "k1", "by": "mean", "above": 0.01, "when": "negative"},),
                ({"of": "k1", "by": "mean", "above": 0.01, "ratio": "r_rollout"},),
            ),
            "disturbance.staleness": (1, 2),
            "disturbance.weights": ("float16", "float8_e4m3"),
            "disturbance.bias": (0.1, 0.2),
            "disturbance.noise": (0.1, 0.10000001),
            "disturbance.floor": (0.1, 0.2),
        },
    ),
    (
        {"clip": {"ratio": "recompute"}},
        {
            "clip.ratio": ("bypass", "decoupled"),
            "clip.loss": ("free", "gspo", "cispo", "sapo", "vespo"),
            "clip.low": (0.1,),
            "clip.high": (0.3,),
            "clip.log_ratio_limit": (20.0, 20.5),
            "clip.dual": (3.0, 3.5),
        },
    ),
    (
        {"correction": {"sequence": "mis"}},
        {
            "correction.sequence_threshold": (3.0, 3.0000001),
            "correction.sequence_lower": (0.5,),
            "correction.normalise": (True,),
        },
    ),
    ({"sampler": {"quantization": "int4"}}, {"sampler.group_size": (32, 64)}),
    (
        {"reference_kl": {"coefficient": 0.01, "estimator": "k3", "where": "loss"}, "deliberate": True},
        {
            "reference_kl.coefficient": (0.1, 0.10000001),
            "reference_kl.estimator": ("k1", "k2"),
            "reference_kl.where": ("reward",),
        },
    ),
    (
        {"correction": {"token": "tis"}},
        {
            "correction.token_lower": (0.5, 0.25),
            "correction.token_threshold": (3.0, 3.0000001),
            "correction.log_ratio_limit": (20.0,),
            "correction.log_ratio_penalty": (1e-3, 2e-3),
        },
    ),
    ({"clip": {"ratio": "recompute"}, "disturbance": {"staleness": 2}}, {"clip.proximal": ("loglinear",)}),
    ({"sampler": {"quantization": "int8"}}, {"sampler.quantized_trainer": (True,)}),
    ({"correction": {"centering": "top_k", "centering_k": 5}}, {"correction.centering_k": (6,)}),
    ({"correction": {"sequence": "reject_k3"}}, {"correction.rejects": ("r_ppo",)}),
    ({"disturbance": {"noise": 0.1}}, {"disturbance.side": ("both",)}),
    ({"sampler": {"engine": "mine:Engine"}}, {"sampler.options": ({"most": 8}, {"most": 9})}),
    ({"sampler": {"dtype": "float32"}}, {"sampler.engine": ("exact", "transformers")}),
    ({"vocabulary": {"rule": "top_k", "k": 5}}, {"vocabulary.k": (6,)}),
    ({"vocabulary": {"rule": "top_p", "p": 0.5}}, {"vocabulary.p": (0.6,)}),
    (
        {"vocabulary": {"rule": "min_p", "rho": "e-5"}, "deliberate": True},
        {
            "vocabulary.rule": ("entropy",),
            "vocabulary.rho": ("e-6", "0.3/V", 1e-5),
            "vocabulary.side": ("sampler", "trainer", "replay"),
            "vocabulary.outside": ("paper_fill",),
        },
    ),
    (
        {"vocabulary": {"rule": "min_p", "rho": "e-5", "adapt": "budget", "budget": 0.1}},
        {"vocabulary.budget": (0.2, 0.20000001)},
    ),
    (
        {"vocabulary": {"rule": "min_p", "rho": "e-5", "adapt": "difficulty", "rho_easy": "e-4"}},
        {"vocabulary.rho_easy": ("e-3",)},
    ),
]
"""Arms, and other values of some of their fields: every field of an arm is in one of them."""
COMPARED = {"training", "seeds", "deliberate", "correction.preset"}
"""What is compared between arms and not described by itself; an arm's seeds are in a column of their own, a preset
is replaced by its settings, and `deliberate` changes nothing."""


def every_arm() -> list[Arm]:
    arms = []
    for base, fields in VARIED:
        arms.append(Arm.model_validate(base))
        for field, values in fields.items():
            for value in values:
                *parents, leaf = field.split(".")
                block = {**base.get(parents[0], {}), leaf: value} if parents else value
                arms.append(Arm.model_validate({**base, (parents or [leaf])[0]: block}))
    # One whose adapted threshold alone tells it apart, and all causes at once.
    arms.append(Arm.model_validate({"disturbance": {"noise": 0.1, "floor": 0.1, "bias": 0.1, "staleness": 2}}))
    return arms


def leaves(model: type[BaseModel], prefix: str = "") -> set[str]:
    """The dotted names of a block's fields, down to those that are no blocks."""
    found = set()
    for name, field in model.model_fields.items():
        parts = () if get_origin(field.annotation) is tuple else get_args(field.annotation)
        blocks = [b for b in (field.annotation, *parts) if isinstance(b, type)]
        blocks = [b for b in blocks if issubclass(b, BaseModel)]
        blocks = [kind for b in blocks for kind in (b.kinds().values() if issubclass(b, Kinds) else (b,))]
        found |= set().union(*(leaves(b, f"{prefix}{name}.") for b in blocks)) if blocks else {prefix + name}
    return found


@pytest.mark.parametrize(
    ("arm", "clause"),
    [
        ({"clip": {"ratio": "bypass", "loss": "sapo"}}, "sapo of the ratio, bypass"),
        ({"clip": {"ratio": "bypass", "loss": "free"}}, "free of the ratio, bypass"),
        ({"clip": {"ratio": "bypass", "loss": "vespo"}}, "vespo of the ratio, bypass"),
        ({"clip": {"ratio": "bypass", "loss": "gspo"}}, "gspo of the ratio, bypass, from 1 - 0.2 to 1 + 0.2"),
        ({"correction": {"sequence": "is"}}, "sequence weights is"),
        ({"correction": {"token": "is"}}, "token weights is"),
        (
            {"correction": {"preset": "verl/decoupled_token_is"}},
            "token weights tis, C = 2, log-ratios clamped to 20 nats",
        ),
        (
            {"clip": {"ratio": "bypass", "log_ratio_limit": 20.0}},
            "clipped ratio, bypass, from 1 - 0.2 to 1 + 0.2, log-ratios clamped to 20 nats",
        ),
    ],
)
def test_only_what_acts_is_stated(arm: dict[str, Any], clause: str) -> None:
    assert clause in describe(Arm.model_validate(arm))


def test_every_field_of_an_arm_is_varied() -> None:
    """Fails where a setting is added, until it is in `VARIED`; what `describe` makes of it is tested below."""
    adapt = {"vocabulary.adapt"}
    assert leaves(Arm) - COMPARED == {field for _, fields in VARIED for field in fields} | adapt


def test_arms_that_differ_in_any_field_are_described_differently() -> None:
    described: dict[str, Arm] = {}
    for arm in every_arm():
        words = "; ".join(describe(arm))
        arm = arm.model_copy(update={"deliberate": False})
        assert described.setdefault(words, arm) == arm, words
    assert len(described) > 50


@pytest.mark.parametrize(
    ("disturbance", "clauses"),
    [
        ({}, []),
        ({"noise": 0.1}, ["disturbed sampler: noise of 0.1 nats"]),
        (
            {"staleness": 2, "weights": "float16", "bias": 0.5, "floor": 0.01},
            ["disturbed sampler: weights of 2 steps ago, weights rounded to float16, bias of 0.5 nats, floor of 0.01"],
        ),
        ({"floor": 0.1, "side": "both"}, ["disturbed sampler and trainer (matched control): floor of 0.1"]),
    ],
)
def test_describe_a_disturbance(disturbance: dict[str, Any], clauses: list[str]) -> None:
    arm = Arm.model_validate({"disturbance": disturbance})
    sampled = "sampled by vllm in bfloat16"
    assert describe(arm)[2:] == [*clauses, sampled]


@pytest.fixture
def results(whole: tuple[Study, object]) -> Results:
    study, folder = whole
    return read_results(study, folder, study.arms)  # type: ignore[arg-type]


def with_records(results: Results, **changes: object) -> Results:
    """The same results, with keys of the first naive run's record replaced."""
    first, *rest = results.runs["naive"]
    first = dataclasses.replace(first, record=first.record.model_copy(update=changes))
    return dataclasses.replace(results, runs={**results.runs, "naive": (first, *rest)})


def test_arms_are_told_apart_by_other_settings_too(results: Results) -> None:
    assert "training.steps" not in describe_arms(results)["naive"]
    settings = {**results.runs["naive"][0].record.settings, "training": {"steps": 7}}
    changed = describe_arms(with_records(results, settings=settings))
    assert "training.steps = 7" in changed["naive"]
    assert "training.steps = 60" in changed["dvp"]


def test_a_threshold_that_no_paper_confirms_is_said_of_the_arms_that_have_one(results: Results) -> None:
    (line,) = [line for line in what_ran(results).splitlines() if "correction.sequence_threshold" in line]
    assert line.endswith("2.0 in mis, 2.0 in dvp_mis.")


def test_what_ran(results: Results) -> None:
    text = what_ran(results)
    for fact in ("12, seeds 0, 1, 2", "abc1234.", "torch 2.13.0", "lm-eval 0.4.13", "16 GB, no GPU", "80 to 80 s"):
        assert fact in text
    # 60 steps with 0.92 s of the four phases, in 80 - 15 s.
    assert work_share(results.runs["naive"][0]) == pytest.approx(60 * 0.92 / 65)
    assert "at least 85 % of a job" in text
    dirty = what_ran(with_records(results, dirty=True, wall_seconds=160.0))
    assert "abc1234 with uncommitted changes; also abc1234" in dirty
    assert "80 to 160 s" in dirty
    assert "at least 38 % of a job" in dirty


def test_what_ran_says_what_was_skipped_and_what_was_interrupted(results: Results) -> None:
    """An older run recorded neither."""
    assert "skipped" not in what_ran(results) and "interruption" not in what_ran(results)
    runs = {arm: [*own] for arm, own in results.runs.items()}
    for own in runs.values():
        own[:] = [dataclasses.replace(r, metrics={**r.metrics, "train/skipped": np.zeros(60)}) for r in own]
    clean = dataclasses.replace(results, runs={arm: tuple(own) for arm, own in runs.items()})
    assert "- Updates skipped for a NaN or Inf: none.\n" in what_ran(clean) + "\n"
    first = runs["naive"][0]
    skipped_N = np.array([1.0, 0.0, 1.0, *[0.0] * 57])
    runs["naive"][0] = dataclasses.replace(first, metrics={**first.metrics, "train/skipped": skipped_N})
    runs["dvp"][2] = dataclasses.replace(
        runs["dvp"][2], record=first.record.model_copy(update={"resumed_at_steps": [10, 40]})
    )
    runs["mis"][1] = dataclasses.replace(
        runs["mis"][1], record=first.record.model_copy(update={"stopped": "the run ends after step 9"})
    )
    text = what_ran(dataclasses.replace(results, runs={arm: tuple(own) for arm, own in runs.items()}))
    assert "- Ended early by a rule: mis, seed 1: the run ends after step 9." in text
    assert "- Updates skipped for a NaN or Inf: naive, seed 0: 2 of 60.\n" in text
    assert "- Went on from a checkpoint after an interruption: dvp, seed 2: from step 10, 40." in text


def test_what_could_not_be_found_out(results: Results) -> None:
    hardware = Hardware(cpu=None, cores=None, memory_gb=16.0, gpu=None)
    text = what_ran(with_records(results, commit=None, dirty=None, hardware=hardware))
    assert "Commit: unknown; also abc1234." in text
    assert "CPU not recorded, ? cores" in text


def summary_of(study: Study, results: Results) -> str:
    compared = compare_arms(results, arm_pairs.references(results))
    return summarize(study, results, judge(results), gains_over_base(results), compared)


def test_summary_has_every_arm_and_comparison(whole: tuple[Study, object], results: Results) -> None:
    study, _ = whole
    verdicts = judge(results)
    text = summary_of(study, results)
    gains, compared = gains_over_base(results), compare_arms(results, arm_pairs.references(results))
    listed = "".join(f"- {sentence}\n" for sentence in headline(results, gains, compared, verdicts))
    assert text.startswith(f"# synthetic\n\n{listed}\nA made-up study for the report's tests. The same policy")
    for arm in study.arms:
        assert text.count(f"\n| {arm} | ") >= 3
    asked = [c for c in compared if c.why]
    differences = text.partition("\n## Differences between arms\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[:3] for line in differences.splitlines() if line.startswith("| ")]
    assert rows[2:] == [[f"| {c.first}", c.second, c.why] for c in asked]
    claims = text.partition("\n## Claims\n")[2].partition("\n## ")[0]
    spoken = [line for line in verdicts if line.arms]
    assert len([line for line in claims.splitlines() if line.startswith("| ")]) == 2 + len(spoken)
    assert all(f"| **{line.verdict}** | {line.where} | {line.arms} | " in claims for line in spoken)
    assert all(f" | `{line.id}` |\n" in claims for line in spoken)
    assert all(line.claim.replace("|", "\\|" if line.arms else "|") in claims for line in verdicts)
    base = results.base.scores[0].avg_at_k
    assert f"| base | {100 * base:.1f} % [" in text
    assert text.count("nan") == 0


def test_a_baseline_has_its_row_below_the_untrained_policys(whole: tuple[Study, object], results: Results) -> None:
    study = whole[0]
    assert "base@T" not in summary_of(study, results)
    colder = dataclasses.replace(results.base, arm="base@0.3")
    text = summary_of(study, dataclasses.replace(results, baselines={"base@0.3": colder}))
    above, below = (line for line in text.splitlines() if line.startswith("| base"))
    assert below.split(" | ")[:3] == ["| base@0.3", *above.split(" | ")[1:3]] and "| +0.0 [+0.0, +0.0] |" in below
    assert "base@T is the untrained policy sampled at temperature T" in text


def test_a_description_is_text(whole: tuple[Study, object], results: Results) -> None:
    """Neither a script nor an image of another machine, in Markdown and in HTML made of it; and no heading."""
    hostile = "See <script>alert(1)</script> ![x](http://a/b.png)\n\n## Claims\n"
    text = summary_of(whole[0].model_copy(update={"description": hostile}), results)
    first = "See &lt;script>alert(1)&lt;/script> !\\[x](http://a/b.png) ## Claims. The same policy"
    assert text.startswith("# synthetic\n\n- ") and f"\n\n{first}" in text
    shown = page(text, [])
    assert "<p>See &lt;script&gt;alert(1)&lt;/script&gt; ![x](http://a/b.png) ## Claims. The same policy" in shown
    assert "<img" not in shown and "<script" not in shown
