"""Where the mismatch is: planted places are found, with their numbers; clean logs have none."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from diagnosis_fixture import VOCABULARY

from tailrl.diagnosis.diagnosis import diagnose_parts
from tailrl.diagnosis.log import Log, LoggedRow, pack
from tailrl.diagnosis.parts import Sample, joined, part_of
from tailrl.diagnosis.where import Place, find_places, percent, where_words

Planted = Callable[[int, LoggedRow], np.ndarray]


def row_of(random: np.random.Generator, number: int, length: int, heavy: bool, noise: float) -> LoggedRow:
    """A response sampled from noisy logits; sources differ in how sure the policy is of their tokens."""
    source = int(random.integers(4))
    logits_TV = random.normal(0, 6.0 if source == 0 else 3.0, (length, VOCABULARY))
    errors_TV = random.standard_t(3, logits_TV.shape) if heavy else random.normal(size=logits_TV.shape)
    trainer_TV, sampler_TV = logits_TV, logits_TV + noise * errors_TV
    trainer_TV, sampler_TV = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (trainer_TV, sampler_TV))
    token_T = (sampler_TV + random.gumbel(size=sampler_TV.shape)).argmax(-1)
    at = np.arange(length), token_T
    return LoggedRow(
        where="",
        sampler_T=sampler_TV[at],
        trainer_T=trainer_TV[at],
        token_T=token_T,
        step=float(number // 6),
        version=float(number // 6 - random.integers(3)),
        reward=float(random.integers(2)),
        labels={"source": "abcd"[source], "rank": str(random.integers(8))},
    )


def clean_rows(seed: int, responses: int = 60, heavy: bool = False, noise: float = 0.05) -> list[LoggedRow]:
    random = np.random.default_rng(seed)
    lengths = random.integers(5, 80, responses).tolist()
    return [row_of(random, number, length, heavy, noise) for number, length in enumerate(lengths)]


def planted(where: Planted, seed: int = 0, size: float = 1.0) -> Log:
    """A clean log whose sampler gives some tokens more or less by about `size` nats."""
    random = np.random.default_rng(100 + seed)
    rows = []
    for number, row in enumerate(clean_rows(seed)):
        chosen_T = where(number, row)
        moved_T = row.sampler_T - size * random.exponential(1.0, len(chosen_T)) * random.choice([-1, 1], len(chosen_T))
        sampler_T = np.where(chosen_T, np.minimum(moved_T, -1e-3), row.sampler_T)
        rows.append(replace(row, sampler_T=sampler_T))
    return pack(rows)


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("responses", [12, 60])
def test_a_clean_log_has_no_place(responses: int, heavy: bool) -> None:
    """Also where the sources differ in entropy, and noise has a long tail."""
    found = [find_places(pack(clean_rows(seed, responses, heavy))) for seed in range(25)]
    assert not [place.sentence() for places in found for place in places]


def everywhere(row: LoggedRow) -> np.ndarray:
    return np.ones(len(row.sampler_T), bool)


PLANTED: dict[str, tuple[Planted, str]] = {
    "step": (lambda number, row: everywhere(row) & (number // 6 == 4), "in 1 of 10 steps (4)"),
    "column": (
        lambda _, row: everywhere(row) & (row.labels["source"] == "b"),
        "in 1 of 4 values of source (b)",
    ),
    "responses": (lambda number, row: everywhere(row) & (number % 10 == 3), "in 6 of 60 responses (10 %)"),
    "after": (lambda _, row: np.arange(len(row.sampler_T)) >= 60, "after token 60 of the responses"),
    "first": (lambda _, row: np.arange(len(row.sampler_T)) < 2, "in the first 2 tokens of the responses"),
    "last": (
        lambda _, row: np.arange(len(row.sampler_T)) >= len(row.sampler_T) - 3,
        "in the last 3 tokens of the responses",
    ),
    "ids": (lambda _, row: np.isin(row.token_T, [5, 17]), "on the token ids 5, 17"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_place_is_found_with_its_numbers(name: str) -> None:
    where, words = PLANTED[name]
    log = planted(where)
    [place, *others] = find_places(log)
    assert place.grouping == name
    chosen_T = np.concatenate([where(number, row) for number, row in enumerate(clean_rows(0))])
    delta_T = log.trainer_T - log.sampler_T
    amount_T = np.where(delta_T <= 1, np.expm1(delta_T) - delta_T, np.e - 2 + (np.e - 1) * (delta_T - 1))
    assert (place.chosen_T == chosen_T).mean() > 0.99
    assert place.share.mean == pytest.approx(amount_T[place.chosen_T].sum() / amount_T.sum())
    assert place.share.low <= place.share.mean <= place.share.high <= 1
    assert place.tokens == pytest.approx(place.chosen_T.mean())
    assert all(other.grouping in where_words() for other in others)
    if name == "after":  # the cut is estimated
        assert abs(int(place.words.split()[2]) - 60) <= 2
    else:
        assert words == place.words


def test_a_group_with_a_few_times_the_rate_is_no_place() -> None:
    """Engines are noisier on some texts than on others: four times the k3, and no more."""
    louder, usual = clean_rows(0, noise=0.1), clean_rows(0, noise=0.05)
    rows = [
        replace(own, labels={"half": str(number % 2)})
        for number, own in enumerate(louder[i] if i % 2 else usual[i] for i in range(len(usual)))
    ]
    k3_S = [float(np.mean(np.expm1(d) - d)) for d in (row.trainer_T - row.sampler_T for row in rows)]
    assert 2.5 < np.mean(k3_S[1::2]) / np.mean(k3_S[::2]) < 5
    assert not find_places(pack(rows))


def test_the_last_tokens_at_the_limit_are_told_from_all_last_tokens() -> None:
    rows = [
        replace(row, sampler_T=row.sampler_T[:20], trainer_T=row.trainer_T[:20], token_T=row.token_T[:20])
        for row in clean_rows(3)
        if row.token_T is not None
    ]
    random = np.random.default_rng(1)
    faulty = [
        row
        if len(row.sampler_T) < 20
        else replace(row, sampler_T=np.append(row.sampler_T[:17], row.sampler_T[17:] - random.exponential(2.0, 3)))
        for row in rows
    ]
    [place] = find_places(pack(faulty))
    assert place.words == "in the last 3 tokens of the responses of 20 tokens, the longest ones"


def test_one_token_is_no_place() -> None:
    """However large: one token says nothing of its step, its response, its source or its id."""
    for seed in range(20):
        rows = clean_rows(seed)
        row = rows[seed]
        rows[seed] = replace(row, sampler_T=np.append(row.sampler_T[:-1], row.trainer_T[-1] - 8.0))
        places = find_places(pack(rows))
        assert [place.words.split(" of ")[0] for place in places if place.grouping == "tokens"] in ([], ["in 1"])
        assert all(place.grouping == "tokens" for place in places)


def test_few_tokens_that_hold_nearly_all_of_k3_are_counted() -> None:
    rows = clean_rows(0)
    for number in (3, 30):
        sampler_T = np.append(rows[number].sampler_T[:-1], rows[number].trainer_T[-1] - 8.0)
        rows[number] = replace(rows[number], sampler_T=sampler_T)
    [place] = find_places(pack(rows))
    tokens = sum(len(row.sampler_T) for row in rows)
    assert place.words == f"in 2 of {tokens} tokens" and place.share.mean > 0.99
    found = diagnose_parts([("", pack(rows))])
    assert found.elsewhere[0].name == "precision"


def penalised(strength: float, seed: int) -> Log:
    """A sampler that divides positive logits of tokens that occurred by `strength`, and multiplies negative ones."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(40):
        length, seen = 40, np.zeros(VOCABULARY, bool)
        tokens, sampler, trainer = [], [], []
        for logits_V in random.normal(0, 3, (length, VOCABULARY)):
            punished_V = np.where(seen, np.where(logits_V > 0, logits_V / strength, logits_V * strength), logits_V)
            trainer_V, sampler_V = (
                x - np.log(np.exp(x).sum()) for x in (logits_V, punished_V + random.normal(0, 0.01))
            )
            token = int((sampler_V + random.gumbel(size=VOCABULARY)).argmax())
            tokens.append(token)
            sampler.append(sampler_V[token])
            trainer.append(trainer_V[token])
            seen[token] = True
        rows.append(LoggedRow("", np.array(sampler), np.array(trainer), token_T=np.array(tokens)))
    return pack(rows)


@pytest.mark.parametrize("strength", [1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 0.9])
def test_a_penalty_is_told_by_the_signs(strength: float) -> None:
    """On logs that no model made, and for either sign of the penalty."""
    found = diagnose_parts([("", penalised(strength, 0))])
    assert found.causes[0].name == "penalty"
    assert found.advice.kind == "fix" and "repetition_penalty" in found.advice.words


def test_the_signs_of_another_temperature_are_no_penalty() -> None:
    rows = [
        replace(row, sampler_T=np.minimum(0.8 * row.trainer_T, -1e-4), seen_T=row.trainer_T > -0.5)
        for row in clean_rows(0)
    ]
    assert "penalty" not in [cause.name for cause in diagnose_parts([("", pack(rows))]).causes]


def test_causes_there_and_elsewhere() -> None:
    """Whole responses with another prompt, and rounding in the others: each part has causes of its own."""
    log = planted(lambda number, row: everywhere(row) & (number % 10 == 3))
    found = diagnose_parts([("", log)])
    assert found.focus is not None and found.focus.whole
    assert found.elsewhere[0].name == "precision"
    assert found.causes and found.causes[0].name != "precision"
    ends = planted(lambda _, row: np.arange(len(row.sampler_T)) >= len(row.sampler_T) - 3, size=3.0)
    at_ends = diagnose_parts([("", ends)])
    assert at_ends.focus is not None and not at_ends.focus.whole and at_ends.advice.words == at_ends.focus.look
    assert "shape" not in {cause.name for cause in at_ends.causes}


# --- parts ---------------------------------------------------------------------------------------------


def test_a_part_keeps_its_places_and_drops_empty_responses() -> None:
    log = pack(clean_rows(0, 5))
    part = part_of(log, (log.position_T >= 3) & (log.sequence_T != 2))
    assert len(part.start_S) == 4 and part.position_T.min() == 3
    np.testing.assert_array_equal(part.step_S, log.step_S[[0, 1, 3, 4]])
    np.testing.assert_array_equal(part.sequence_T[part.start_S], np.arange(4))
    assert part.labels_S == tuple(log.labels_S[i] for i in (0, 1, 3, 4))


def test_logs_are_joined_in_order() -> None:
    rows = clean_rows(0, 6)
    both, whole = joined([pack(rows[:2]), pack(rows[2:])]), pack(rows)
    for name in ("start_S", "sequence_T", "position_T", "sampler_T", "step_S", "prompt_S"):
        np.testing.assert_array_equal(getattr(both, name), getattr(whole, name))
    assert both.labels_S == whole.labels_S


@pytest.mark.parametrize("most", [500, 10_000_000])
def test_a_sample_is_every_nth_response_and_fits(most: int) -> None:
    rows = clean_rows(1, 100)
    sample = Sample(most)
    for begin in range(0, 100, 7):
        sample.add(pack(rows[begin : begin + 7]))
    log = sample.log()
    assert log is not None and len(log.sequence_T) <= most
    expected = pack([row for number, row in enumerate(rows) if number % sample.every == 0])
    np.testing.assert_array_equal(log.sampler_T, expected.sampler_T)
    assert Sample().log() is None


def test_a_response_that_is_too_long_is_cut() -> None:
    sample = Sample(10)
    sample.add(pack(clean_rows(0, 1)))
    log = sample.log()
    assert log is not None and len(log.sequence_T) == min(10, len(clean_rows(0, 1)[0].sampler_T))


@pytest.mark.parametrize(("share", "words"), [(0.5, "50 %"), (0.9987, "99.87 %"), (1.0, "100 %"), (0.99999, "99.99 %")])
def test_shares_near_all_are_told_from_all(share: float, words: str) -> None:
    assert percent(share) == words


def test_signs_are_said_where_they_differ() -> None:
    log = planted(lambda number, row: everywhere(row) & (number % 10 == 3))
    [place] = find_places(log)
    assert isinstance(place, Place) and place.sides == ""
    assert "to 90% of the tokens there, and to 10% elsewhere" in replace(place, above=0.9, above_elsewhere=0.1).sides


@pytest.mark.parametrize(("short", "long", "is_place"), [(1.0, 0.02, False), (0.02, 1.0, True)])
def test_the_longest_responses_are_a_place_and_the_others_are_none(short: float, long: float, is_place: bool) -> None:
    random = np.random.default_rng(0)
    rows = [
        row_of(random, number, 60 if number % 2 else 30, False, long if number % 2 else short) for number in range(60)
    ]
    assert ("longest" in [place.grouping for place in find_places(pack(rows))]) is is_place


@pytest.mark.parametrize(("name", "cause"), [("engine", "engine"), ("vllm_worker", "engine"), ("data_source", None)])
def test_one_of_several_engines_is_told_by_its_column(name: str, cause: str | None) -> None:
    """A few responses of the other engine agree by chance: the column says more than a list of the worst responses."""
    rows = [replace(row, labels={name: "b" if number % 4 == 3 else "a"}) for number, row in enumerate(clean_rows(0))]
    rows = [
        replace(row, sampler_T=np.minimum(row.sampler_T + 0.5 * np.sin(np.arange(len(row.sampler_T))), 0.0))
        if number % 4 == 3 and number % 40 != 3
        else row
        for number, row in enumerate(rows)
    ]
    found = diagnose_parts([("", pack(rows))])
    assert found.places[0].words == f"in 1 of 2 values of {name} (b)"
    assert found.focus is not None and (found.focus.cause or None) == cause
    if cause:
        assert found.causes[0].name == "engine" and found.advice.kind == "fix" and "checksum" in found.advice.words
        assert any(sentence.startswith("There it looks like") for sentence in found.causes[0].evidence)


def test_sides_are_of_tokens_that_have_one() -> None:
    """A pruned policy's sets of one token have no Δ; the penalty shows in the others."""
    log = penalised(1.2, 0)
    many = [
        LoggedRow(
            "",
            np.concatenate([log.sampler_T[part_T], np.zeros(80)]),
            np.concatenate([log.trainer_T[part_T], np.zeros(80)]),
            token_T=np.concatenate([log.token_T[part_T], log.token_T[part_T][np.arange(80) % part_T.sum()]]),
        )
        for part_T in (log.sequence_T == number for number in range(len(log.start_S)))
    ]
    plain, pruned = (find_places(one)[0] for one in (log, pack(many)))
    assert plain.grouping == pruned.grouping == "sides"
    assert (pruned.above, pruned.above_elsewhere) == pytest.approx((plain.above, plain.above_elsewhere))
    assert diagnose_parts([("", pack(many))]).causes[0].name == "penalty"
