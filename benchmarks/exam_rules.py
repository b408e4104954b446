"""How sure each cause is, settled on logs of known cause: one multinomial logistic model of a few numbers."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize
from scipy.special import log_softmax, logsumexp, softmax

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.features import FEATURES

PENALTIES = (0.1, 0.3, 1.0, 3.0)
"""Of squared weights, against a sum over cases: the one with the best log-loss on models left out is taken."""


def standardised(value_CF: FloatArray, mean_F: FloatArray, scale_F: FloatArray) -> FloatArray:
    """Features in standard deviations, cut to 3, so that a stranger log is no stranger than the strangest known."""
    found: FloatArray = np.clip((value_CF - mean_F) / scale_F, -3, 3)
    return found


def fit(value_CF: FloatArray, is_CK: FloatArray, penalty: float) -> FloatArray:
    """Each cause's weights of the features and a constant, [K, F + 1], by penalised maximum likelihood.

    Where two causes act, the probability of either counts.
    """
    design_CD = np.column_stack([value_CF, np.ones(len(value_CF))])
    shape = is_CK.shape[1], design_CD.shape[1]

    def loss(weights: FloatArray) -> tuple[float, FloatArray]:
        weight_KD = weights.reshape(shape)
        logp_CK = log_softmax(design_CD @ weight_KD.T, axis=1)
        of_truth_CK = np.where(is_CK > 0, logp_CK, -np.inf)
        known_KD = np.column_stack([weight_KD[:, :-1], np.zeros(len(weight_KD))])
        slope_KD = (np.exp(logp_CK) - softmax(of_truth_CK, axis=1)).T @ design_CD + penalty * known_KD
        return float(-logsumexp(of_truth_CK, axis=1).sum() + penalty / 2 * (known_KD**2).sum()), slope_KD.ravel()

    found: FloatArray = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B").x.reshape(shape)
    return found


def scores(value_CF: FloatArray, weight_KD: FloatArray) -> FloatArray:
    """Logits of each cause, [C, K]."""
    found: FloatArray = value_CF @ weight_KD[:, :-1].T + weight_KD[:, -1]
    return found


def log_loss(score_CK: FloatArray, is_CK: FloatArray) -> float:
    """Mean over cases of −log of the probability of what was planted."""
    of_truth_CK = np.where(is_CK > 0, log_softmax(score_CK, axis=1), -np.inf)
    return float(-logsumexp(of_truth_CK, axis=1).mean())


def settle(
    value_CF: FloatArray, is_CK: FloatArray, model_C: Sequence[str], causes: Sequence[str]
) -> tuple[dict[str, object], FloatArray]:
    """The model as data, and its logits of every case from the other models' cases.

    These logits settle the penalty and one factor for all causes, which makes the probabilities hold.
    """
    mean_F, scale_F = value_CF.mean(0), np.maximum(value_CF.std(0), 1e-3)
    known_CF, names_C = standardised(value_CF, mean_F, scale_F), np.array(model_C)
    best: tuple[float, float, FloatArray] | None = None
    for penalty in PENALTIES:
        held_CK = np.zeros(is_CK.shape)
        for name in np.unique(names_C):
            out_C = names_C == name
            held_CK[out_C] = scores(known_CF[out_C], fit(known_CF[~out_C], is_CK[~out_C], penalty))
        if best is None or log_loss(held_CK, is_CK) < best[0]:
            best = log_loss(held_CK, is_CK), penalty, held_CK
    assert best is not None
    _, penalty, held_CK = best
    factor = float(minimize(lambda a: log_loss(a[0] * held_CK, is_CK), [1.0], bounds=[(0.1, 3.0)]).x[0])
    weight_KD = factor * fit(known_CF, is_CK, penalty)
    data: dict[str, object] = {
        "penalty": penalty,
        "factor": round(factor, 3),
        "mean": dict(zip(FEATURES, mean_F.round(4).tolist(), strict=True)),
        "scale": dict(zip(FEATURES, scale_F.round(4).tolist(), strict=True)),
        "weights": {
            cause: dict(zip([*FEATURES, "constant"], weight_D.round(3).tolist(), strict=True))
            for cause, weight_D in zip(causes, weight_KD, strict=True)
        },
    }
    return data, factor * held_CK
