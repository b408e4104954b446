"""How sure each cause is, settled on logs of known cause: a logistic model of a few numbers for each cause."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.features import FEATURES

PENALTIES = (0.1, 0.3, 1.0, 3.0)
"""Of squared weights, against a sum over cases: the one with the best log-loss on models left out is taken."""


def standardised(value_CF: FloatArray, mean_F: FloatArray, scale_F: FloatArray) -> FloatArray:
    """Features in standard deviations, cut to 3, so that a stranger log is no stranger than the strangest known."""
    found: FloatArray = np.clip((value_CF - mean_F) / scale_F, -3, 3)
    return found


def fit_one(value_CF: FloatArray, is_C: FloatArray, penalty: float) -> FloatArray:
    """Weights of the features and a constant, by penalised maximum likelihood."""
    design_CD = np.column_stack([value_CF, np.ones(len(value_CF))])

    def loss(weight_D: FloatArray) -> tuple[float, FloatArray]:
        score_C = design_CD @ weight_D
        known_D = np.append(weight_D[:-1], 0.0)
        slope_D = design_CD.T @ (1 / (1 + np.exp(-score_C)) - is_C) + penalty * known_D
        return float((np.logaddexp(0, score_C) - is_C * score_C).sum() + penalty / 2 * (known_D**2).sum()), slope_D

    found: FloatArray = minimize(loss, np.zeros(design_CD.shape[1]), jac=True, method="L-BFGS-B").x
    return found


def scores(value_CF: FloatArray, weight_KD: FloatArray) -> FloatArray:
    """Log-odds of each cause, [C, K]."""
    found: FloatArray = value_CF @ weight_KD[:, :-1].T + weight_KD[:, -1]
    return found


def log_loss(score_CK: FloatArray, is_CK: FloatArray) -> float:
    """Mean over cases of the causes' summed log-loss."""
    return float((np.logaddexp(0, score_CK) - is_CK * score_CK).sum(1).mean())


def settle(
    value_CF: FloatArray, is_CK: FloatArray, model_C: Sequence[str], causes: Sequence[str]
) -> tuple[dict[str, object], FloatArray]:
    """The model as data, and its log-odds of every case from the other models' cases.

    These log-odds settle the penalty and one factor for all causes, which makes the probabilities hold.
    """
    mean_F, scale_F = value_CF.mean(0), np.maximum(value_CF.std(0), 1e-3)
    known_CF, names_C = standardised(value_CF, mean_F, scale_F), np.array(model_C)
    best: tuple[float, float, FloatArray] | None = None
    for penalty in PENALTIES:
        held_CK = np.zeros(is_CK.shape)
        for name in np.unique(names_C):
            out_C = names_C == name
            weights = np.array([fit_one(known_CF[~out_C], is_C[~out_C], penalty) for is_C in is_CK.T])
            held_CK[out_C] = scores(known_CF[out_C], weights)
        if best is None or log_loss(held_CK, is_CK) < best[0]:
            best = log_loss(held_CK, is_CK), penalty, held_CK
    assert best is not None
    _, penalty, held_CK = best
    factor = float(minimize(lambda a: log_loss(a[0] * held_CK, is_CK), [1.0], bounds=[(0.1, 3.0)]).x[0])
    weight_KD = factor * np.array([fit_one(known_CF, is_C, penalty) for is_C in is_CK.T])
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
