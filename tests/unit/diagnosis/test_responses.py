"""The worst responses of a log: the right ones, bounded, whatever its parts are."""

import numpy as np
import pytest
from diagnosis_fixture import noisy_rows

from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.diagnosis.responses import MOST_RESPONSES, Worst
from tailrl.page_parts.explorer import read_tokenizer, with_texts
from tailrl.runtime.errors import StudyError


def row(size: float, length: int = 5) -> LoggedRow:
    return LoggedRow("", np.full(length, -2.0 - size), np.full(length, -2.0))


def sizes(worst: Worst) -> list[float]:
    return [round(float((one.trainer_T - one.sampler_T).mean()), 3) for one in worst.responses()]


@pytest.mark.parametrize("part", [1, 7, 50])
def test_the_worst_are_kept_in_any_parts(part: int) -> None:
    rows = [row(number / 100) for number in np.random.default_rng(0).permutation(50)]
    worst = Worst()
    for begin in range(0, 50, part):
        worst.add(pack(rows[begin : begin + part]))
    assert sizes(worst) == [number / 100 for number in range(49, 49 - MOST_RESPONSES, -1)]


def test_a_token_without_log_probs_counts_as_one_nat() -> None:
    worst = Worst()
    worst.add(pack([row(0.5), LoggedRow("", np.array([-1.0, np.nan]), np.array([-1.0, -1.0])), row(0.4, 3)]))
    first, second, third = worst.responses()
    assert len(first.trainer_T) == 5 and np.isnan(second.sampler_T[1]) and len(third.trainer_T) == 3


def test_a_kept_response_holds_its_own_tokens_alone() -> None:
    log = pack(noisy_rows(3, 20))
    worst = Worst()
    worst.add(log)
    for one in worst.responses():
        assert one.trainer_T.base is None, "a view would keep the whole part in memory"
        place = int(np.flatnonzero(log.trainer_T == one.trainer_T[0])[0])
        assert place % 20 == 0 and one.rank_T.tolist() == log.rank_T[place : place + 20].tolist()


def test_a_tokenizer_gives_texts_where_ids_are_logged(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(path))
    worst = Worst()
    worst.add(pack([LoggedRow("", np.full(2, -1.5), np.full(2, -1.0), token_T=np.array([1, 0])), row(0.1)]))
    known, unknown = with_texts(worst.responses(), read_tokenizer(tmp_path))
    assert [text.strip() for text in known.texts] == ["b", "a"] and unknown.texts == ()
    path.write_text("{}")
    with pytest.raises(StudyError, match=r"tokenizer\.json: is no tokenizer"):
        read_tokenizer(path)
