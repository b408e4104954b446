"""Each rule on a log of its cause, and on the logs that look nearly like it."""

import inspect
import re
from dataclasses import replace
from string import Formatter

import numpy as np
import pytest
from causes_fixture import floor, rows, same, top_p

from tailrl.diagnosis import evidence as evidence_module
from tailrl.diagnosis.advice import tells_age
from tailrl.diagnosis.causes import (
    LEAST_SURE,
    NAMED,
    Cause,
    agrees,
    cause_words,
    find_causes,
    find_faults,
    fitting,
)
from tailrl.diagnosis.diagnosis import diagnose_parts
from tailrl.diagnosis.evidence import evidence, numbers
from tailrl.diagnosis.features import FEATURES, falls, features
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.diagnosis.measure import Measured, measure
from tailrl.diagnosis.sure import beyond_sixteen_bits, settled, shapes
from tailrl.diagnosis.where import where_words


def measured(found: list[LoggedRow]) -> Measured:
    return measure([("a", pack(found))])


def say(name: str, of: Measured) -> tuple[str, ...]:
    """The evidence for a cause."""
    return evidence(cause_words()[name].evidence, numbers(of))


def names(causes: tuple[Cause, ...]) -> list[str]:
    return [cause.name for cause in causes]


def test_every_cause_has_words_evidence_and_a_probability() -> None:
    sure, known = settled(), cause_words()
    assert all(said.evidence for said in known.values() if not said.by_place)
    assert set(sure.checks) == {name for name, said in known.items() if said.fault}
    by_place = {name for name, said in known.items() if said.by_place}
    of_places = {words.cause for words in where_words().values() if words.cause}
    assert by_place <= of_places and set(sure.places) == of_places | {"penalty"} <= set(known)
    shapes = {name for name, said in known.items() if not (said.fault or said.by_place)}
    assert {column.partition("/")[0] for column in sure.weights} == shapes
    for settled_numbers in (sure.mean, sure.scale, *(dict(w) for w in sure.weights.values())):
        assert {*FEATURES} <= set(settled_numbers)


def test_evidence_names_numbers_that_there_are() -> None:
    """A sentence is left out where one of its numbers is missing: a misspelt name would always leave it out."""
    sentences = "".join(sentence for said in cause_words().values() for sentence in said.evidence)
    given = {*re.findall(r'"(\w+)"', inspect.getsource(evidence_module)), "seen", "new"}
    given |= {f"times_{name}" for name in evidence_module.TIMES}
    assert {name for _, name, _, _ in Formatter().parse(sentences) if name} <= given


def test_an_agreement_has_no_cause() -> None:
    assert find_causes(measured(rows())) == ()
    assert find_causes(measured(rows(noise=1e-6))) == ()


def test_no_more_than_the_noise_floor_has_no_cause() -> None:
    """The trainer differs from itself as much as from the sampler; where it does not, there is a cause."""
    found = rows(noise=0.05)
    random = np.random.default_rng(1)

    def again(size: float) -> list[LoggedRow]:
        return [
            replace(row, again_T=row.trainer_T + size * (row.sampler_T - row.trainer_T) * random.choice([-1, 1]))
            for row in found
        ]

    assert agrees(measured(again(1.0)).signals) and find_causes(measured(again(1.0))) == ()
    assert not agrees(measured(again(0.1)).signals) and find_causes(measured(again(0.1)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
@pytest.mark.parametrize("side", ["sampler_T", "trainer_T"])
def test_numbers_that_are_none(side: str, value: float) -> None:
    found = rows(count=10)
    broken = getattr(found[3], side).copy()
    broken[2] = value
    found[3] = replace(found[3], **{side: broken})
    (cause,) = find_causes(measured(found))
    assert cause.name == "nan" and cause.evidence[0].startswith("1 token: the " + side[:7])
    assert names(find_causes(measured([LoggedRow("here", np.array([np.nan]), np.array([-1.0]))]))) == ["nan"]


def test_a_shift_is_told_from_a_few_sequences_and_from_noise() -> None:
    found = rows(noise=0.02, count=60)
    moved = [replace(row, trainer_T=np.roll(row.trainer_T, 1)) for row in found]
    causes = find_causes(measured(moved))
    assert names(causes) == ["shift"]
    assert "60 sequences of 60" in causes[0].evidence[0] and "1 token later" in causes[0].evidence[1]
    assert "shift" not in find_faults(measured(moved[:10] + found[10:]))
    assert "shift" not in find_faults(measured(rows(noise=2.0)))


def test_a_filling_is_a_mask_and_two_zeros_are_not() -> None:
    found = rows(noise=0.02, count=60)
    filled = [
        replace(
            row,
            sampler_T=np.concatenate([[0.0, 0.0], row.sampler_T]),
            trainer_T=np.concatenate([[-5.0, -1.0], row.trainer_T]),
            token_T=None,
        )
        for row in found
    ]
    causes = find_causes(measured(filled))
    assert causes[0].name == "mask" and "120 tokens" in causes[0].evidence[0]
    assert "mask" not in find_faults(measured(filled[:1] + found[1:]))
    assert "mask" not in find_faults(measured(rows(sampler=top_p(0.8))))
    greedy = measured(rows(sampler=lambda z: np.where(z == z.max(-1, keepdims=True), z, -np.inf)))
    assert "mask" not in find_faults(greedy)


@pytest.mark.parametrize("side", ["sampler_T", "trainer_T"])
def test_a_clip_is_told_from_a_floor_and_from_coarse_numbers(side: str) -> None:
    found = rows(noise=0.02)
    clipped = [replace(row, **{side: np.maximum(getattr(row, side), -4.0)}) for row in found]
    causes = find_causes(measured(clipped))
    assert names(causes) == ["clipped"] and "-4" in causes[0].evidence[0]
    assert "clipped" not in find_faults(measured(rows(sampler=floor(0.05))))
    coarse = [replace(row, **{side: np.round(getattr(row, side) * 8) / 8}) for row in found]
    assert "clipped" not in find_faults(measured(coarse))
    assert "clipped" not in find_faults(measured(rows(sampler=top_p(0.8))))


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("groups", [1, 12])
def test_equal_answers_of_a_group_are_no_clip(groups: int, has_ids: bool) -> None:
    """Each response eight times, or one of many: its least log-prob stands in the log as often."""
    different = rows()
    least = min(different, key=lambda row: row.sampler_T.min())
    found = [*different, *[least] * 12] if groups == 1 else [row for row in different[:groups] for _ in range(8)]
    found = found if has_ids else [replace(row, token_T=None) for row in found]
    assert "clipped" not in find_faults(measured(found))


COOL, WARM = (lambda z: z / 0.7), (lambda z: z / 1.3)


@pytest.mark.parametrize(
    ("name", "log"),
    [
        ("temperature", {"sampler": COOL}),
        ("temperature", {"sampler": WARM}),
        ("temperature", {"trainer": COOL}),
        ("raw", {"sampler": COOL, "trainer": COOL, "logged": same}),
        ("raw", {"sampler": WARM, "trainer": WARM, "logged": same}),
        ("truncation", {"sampler": top_p(0.9)}),
        ("truncation", {"sampler": top_p(0.8), "noise": 0.01}),
        ("floor", {"sampler": floor(0.03)}),
        ("floor", {"sampler": floor(0.1), "noise": 0.01}),
    ],
)
def test_the_probable_cause_is_the_planted_one(name: str, log: dict) -> None:  # type: ignore[type-arg]
    """On states that no model made, of other entropy than any that the rules were settled on."""
    found = shapes(features(measured(rows(**log)).signals))
    assert max(found, key=found.__getitem__) == name


@pytest.mark.parametrize("size", [0.01, 0.05])
def test_noise_is_a_matter_of_precision(size: float) -> None:
    found = shapes(features(measured(rows(noise=size)).signals))
    assert max(found, key=found.__getitem__) == "precision"


def test_the_recomputed_log_probs_say_whose_the_mismatch_is() -> None:
    """If the trainer's own move is all of it, the weights are stale; if the engine's is, they are not."""
    found = rows(noise=0.3)
    moved = [replace(row, recomputed_T=row.sampler_T) for row in found]
    engine = [replace(row, recomputed_T=row.trainer_T) for row in found]
    stale = [shapes(features(measured(log).signals))["stale"] for log in (moved, engine)]
    assert stale[0] > 2 * stale[1]


def test_two_faults_and_a_cause_are_all_named() -> None:
    found = rows(sampler=top_p(0.85))
    for row in found[:5]:
        row.trainer_T[3] = np.nan
    causes = find_causes(measured(found))
    assert names(causes)[:2] == ["nan", "truncation"]


def test_none_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model finds every cause improbable, `unknown` comes first, as sure as the others are not."""
    monkeypatch.setattr(
        "tailrl.diagnosis.causes.shapes", lambda *_, **__: {"stale": LEAST_SURE - 0.1, "floor": NAMED / 2}
    )
    causes = find_causes(measured(rows(noise=0.1)))
    assert names(causes) == ["unknown", "stale"]
    tokens = measured(rows(noise=0.1)).tokens
    enough = tokens / (tokens + settled().few_tokens)
    expected = [enough * (1.1 - LEAST_SURE), enough * (LEAST_SURE - 0.1)]
    assert [cause.sure for cause in causes] == pytest.approx(expected)
    given = {"stale": LEAST_SURE - 0.1, "unknown": LEAST_SURE - 0.2}
    monkeypatch.setattr("tailrl.diagnosis.causes.shapes", lambda *_, **__: given)
    assert names(find_causes(measured(rows(noise=0.1)))) == ["unknown", "stale"]
    monkeypatch.setattr("tailrl.diagnosis.causes.shapes", lambda *_, **__: {"stale": LEAST_SURE + 0.1})
    assert names(find_causes(measured(rows(noise=0.1)))) == ["stale"]


def test_evidence_has_numbers() -> None:
    """Every sentence of every cause can be said of a log without optional columns, and has a number."""
    plain = measured(rows(noise=0.1))
    for name in cause_words():
        for sentence in say(name, plain):
            assert any(letter.isdigit() for letter in sentence), (name, sentence)
            assert "nan" not in sentence.lower().split(), (name, sentence)


def test_evidence_says_what_16_bits_give() -> None:
    """The median of |Δ|/(1 − p) beside the largest of a 16-bit format, and the patterns that rounding lacks."""
    small, large = (say("precision", measured(rows(noise=noise))) for noise in (0.003, 0.3))
    most = f"16 bits gave at most {settled().sixteen_bits:g}:"
    assert "16 bits give as much." in small[0] and most in large[0]
    (pattern,) = say("unknown", measured(rows(trainer=lambda z: 1.3 * z)))[1:]
    share = float(pattern.split(" %")[0].split()[-1])
    assert share > 30 and "the token's probability" in pattern


def test_a_log_prob_of_a_masks_fill_is_counted_and_no_crash() -> None:
    fill = float(np.finfo(np.float32).min)
    found = measured([LoggedRow("here", np.array([-1.0, fill, -2.0]), np.array([-1.0, -1.0, -2.0]))])
    assert found.signals.sums["tokens"] == 3


def test_few_tokens_make_a_cause_less_sure() -> None:
    """By the factor n / (n + few_tokens); of two tokens nothing is named."""
    found = rows(noise=0.1)
    whole = measured(found)
    assert find_causes(whole)[0].sure < whole.tokens / (whole.tokens + settled().few_tokens)
    two = LoggedRow("", found[0].sampler_T[:2], found[0].trainer_T[:2])
    assert find_causes(measured([two])) == ()


def test_evidence_that_is_none_is_not_printed() -> None:
    """No share of 0 %, and no correlation of 0."""
    log = measured(rows(noise=0.02))
    assert not log.signals.sums["sure_and_not"] and not log.signals.sums["impossible"]
    for name in cause_words():
        if name not in ("nan", "mask", "shift", "clipped"):
            sentences = " ".join(say(name, log))
            assert not re.search(r"(?<![\d.])0 %", sentences), (name, sentences)


def of_steps(found: list[LoggedRow], lag: float | None) -> list[LoggedRow]:
    """The rows over eight steps, with versions that are so many steps behind; NaN: without; None: by 0 to 6 steps."""
    made = []
    for number, row in enumerate(found):
        step = 10.0 + number * 8 // len(found)
        made.append(replace(row, step=step, version=step - (2 * (number % 4) if lag is None else lag)))
    return made


def test_a_version_behind_is_no_sign_of_stale_weights() -> None:
    """An asynchronous run has its versions behind, whatever its mismatch is: the same causes as without a version."""
    plain = find_causes(measured(of_steps(rows(noise=0.02), np.nan)))
    for lag in (3.0, 12.0):
        behind = measured(of_steps(rows(noise=0.02), lag))
        assert find_causes(behind) == plain and not tells_age(behind.signals)
    mixed = measured(of_steps(rows(noise=0.02), None))
    assert abs(features(mixed.signals)["older"]) < 0.3 and not tells_age(mixed.signals)


def test_growth_with_the_age_is_one() -> None:
    """Responses of older weights have the larger mismatch; the same mismatch with equal versions tells no age."""
    parts = [rows(noise=noise, seed=seed, count=32) for seed, noise in enumerate((0.01, 0.03, 0.1, 0.2))]
    found = [row for four in zip(*parts, strict=True) for row in four]
    grown, equal = measured(of_steps(found, None)), measured(of_steps(found, 6.0))
    assert features(grown.signals)["older"] > 0.8 and tells_age(grown.signals)
    assert features(equal.signals)["older"] == 0.0 and not tells_age(equal.signals)
    assert shapes(features(grown.signals))["stale"] > shapes(features(equal.signals))["stale"]
    sentence = say("stale", grown)[0]
    assert sentence.startswith("It grows with the age of the sampler's weights") and "3 versions" in sentence


def test_sets_of_one_token_change_no_cause() -> None:
    """A pruned policy has log-probs of exactly 0 on both sides at most places: medians are of the others."""
    random = np.random.default_rng(0)
    found = rows(noise=0.02)
    pruned = []
    for row in found:
        places = np.sort(random.integers(0, len(row.sampler_T) + 1, 4 * len(row.sampler_T)))
        sampler_T, trainer_T = (np.insert(own_T, places, 0.0) for own_T in (row.sampler_T, row.trainer_T))
        pruned.append(replace(row, sampler_T=sampler_T, trainer_T=trainer_T, token_T=np.arange(len(sampler_T)) % 7))
    few, all_tokens = features(measured(found).signals), features(measured(pruned).signals)
    for name in ("size", "quiet", "spread", "tail", "above", "entropy", "law"):
        assert all_tokens[name] == pytest.approx(few[name]), name
    assert names(find_causes(measured(pruned)))[0] == names(find_causes(measured(found)))[0] == "precision"


@pytest.mark.parametrize(("experts", "first"), [(None, "routing"), ("8", "routing"), ("0", "precision")])
def test_routing_is_no_cause_where_no_model_has_experts(
    experts: str | None, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column with the number of experts says it; the others share what is left."""
    found = [replace(row, labels={"experts": experts} if experts else {}) for row in rows(noise=0.02)]
    shape = features(measured(found).signals)
    without = shapes(shape, without={"routing"})
    assert "routing" not in without and sum(without.values()) == pytest.approx(1)
    given = {"routing": 0.6, "precision": 0.4}

    def fake(_: object, without: set[str]) -> dict[str, float]:
        left = {name: value for name, value in given.items() if name not in without}
        return {name: value / sum(left.values()) for name, value in left.items()}

    monkeypatch.setattr("tailrl.diagnosis.causes.shapes", fake)
    assert names(find_causes(measured(found)))[0] == first


def test_above_16_bits_the_page_asks_for_8_or_4() -> None:
    """Rounding within 16 bits needs nothing; above, the answer is one of two, and no weights are set."""
    small, large = (diagnose_parts([("a", pack(rows(noise=noise)))]) for noise in (0.01, 0.1))
    assert not beyond_sixteen_bits(small.measured.signals) and beyond_sixteen_bits(large.measured.signals)
    assert fitting(small.causes, small.measured.signals) == ("precision",) and small.advice.kind == "none"
    assert fitting(large.causes, large.measured.signals) == ("precision", "prompt")
    assert large.advice.kind == "ask" and large.advice.name is None
    assert "8 or 4 bits?" in large.advice.words and "Set no weights" in large.advice.words


def test_weights_exchanged_within_responses() -> None:
    """The mismatch falls where newer weights took over; noise falls as it rises."""
    random = np.random.default_rng(0)
    made = []
    for older, newer in zip(rows(noise=0.2), rows(noise=0.01), strict=True):
        cut = random.integers(4, len(older.sampler_T) - 4)
        made.append(
            replace(
                newer,
                sampler_T=np.concatenate([older.sampler_T[:cut], newer.sampler_T[cut:]]),
                trainer_T=np.concatenate([older.trainer_T[:cut], newer.trainer_T[cut:]]),
            )
        )
    assert falls(measured(made).signals) > 2 > abs(falls(measured(rows(noise=0.1)).signals))
    assert "standard errors" in say("in_flight", measured(made))[0]
