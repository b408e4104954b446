"""Sums by position and by both probabilities, against plain loops; and bounded, whatever the log."""

import math

import numpy as np
import pytest
from diagnosis_fixture import noisy_rows

from tailrl.diagnosis.log import pack
from tailrl.diagnosis.measure import SEQUENCE_GROUPS, Measured
from tailrl.diagnosis.signature import LOGIT_CELLS, LOGIT_EDGE, POSITION_EDGES, SignatureSums, log_odds


def test_log_odds() -> None:
    p = np.array([0.5, 0.25, 1e-30, 1.0])
    assert log_odds(np.log(p)) == pytest.approx([0, math.log(1 / 3), -LOGIT_EDGE, LOGIT_EDGE])


def test_sums_equal_a_loop_over_tokens() -> None:
    log = pack(noisy_rows(5, [1, 2, 3, 9, 70]))
    measured = Measured()
    measured.add("t", log)
    found = measured.signature
    for n, low in enumerate(POSITION_EDGES[:8]):
        high = POSITION_EDGES[n + 1]
        chosen = [i for i, place in enumerate(log.position_T) if low <= place < high]
        assert found.positions["tokens"][:, n].sum() == len(chosen)
        signed = sum(float(log.trainer_T[i] - log.sampler_T[i]) for i in chosen)
        assert found.positions["signed"][:, n].sum() == pytest.approx(signed)
    assert found.joint.sum() == len(log.trainer_T)
    odds = log_odds(log.trainer_T)
    row = int(np.argmax(found.joint.sum(axis=1)))
    edges = np.linspace(-LOGIT_EDGE, LOGIT_EDGE, LOGIT_CELLS + 1)
    assert found.joint[row].sum() == np.sum((odds >= edges[row]) & (odds < edges[row + 1]))


def test_its_size_does_not_grow() -> None:
    one = SignatureSums(SEQUENCE_GROUPS)
    far_T = np.array([0, 10**7])
    one.add(np.array([-1e-12, -50.0]), np.array([0.0, -90.0]), far_T, np.array([0, 31]))
    assert one.positions["size"].shape == (SEQUENCE_GROUPS, len(POSITION_EDGES))
    assert one.positions["tokens"][31, -1] == 1 and one.joint[-1, -1] == one.joint[0, 0] == 1


def test_the_floor_is_the_trainer_against_itself() -> None:
    measured = Measured()
    measured.add("t", log := pack(noisy_rows(5, 30)))
    assert measured.floor is not None
    expected = np.abs(log.trainer_T - log.again_T).mean()
    assert measured.floor.token_mean("abs_logp").mean == pytest.approx(expected)
    assert measured.floor.floor is None
