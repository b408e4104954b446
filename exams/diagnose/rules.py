"""How sure each cause is, settled on logs of known cause: one multinomial logistic model of a few numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.special import log_softmax, logsumexp, softmax

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.features import FEATURES

PENALTIES = (1.0, 3.0)
"""Of squared weights, against a sum over cases: the one with the best log-loss on models left out is taken."""


EASE_F = np.array([0.1 if name in ("older", "later", "moved") else 1.0 for name in FEATURES])
"""By feature, a factor of the penalty: versions and recomputed log-probs say much, and few logs have them."""

FEWEST = (20.0, 3000.0)
"""Tokens: the ends of what is asked for `few_tokens`. Below, two tokens would name a cause."""


def standardised(value_CF: FloatArray, mean_F: FloatArray, scale_F: FloatArray) -> FloatArray:
    """Features in standard deviations, cut to 3, so that a stranger log is no stranger than the strangest known."""
    found: FloatArray = np.clip((value_CF - mean_F) / scale_F, -3, 3)
    return found


def fit(value_CF: FloatArray, is_CK: FloatArray, penalty: float, start_KD: FloatArray | None = None) -> FloatArray:
    """Each column's weights of the features and a constant, [K, F + 1], by penalised maximum likelihood.

    Where two causes act, the probability of either counts. `start_KD`: weights to begin from.
    """
    design_CD = np.column_stack([value_CF, np.ones(len(value_CF))])
    shape = is_CK.shape[1], design_CD.shape[1]
    least_D = np.append(penalty * EASE_F[: value_CF.shape[1]], 0.0)

    def loss(weights: FloatArray) -> tuple[float, FloatArray]:
        weight_KD = weights.reshape(shape)
        logp_CK = log_softmax(design_CD @ weight_KD.T, axis=1)
        of_truth_CK = np.where(is_CK > 0, logp_CK, -np.inf)
        slope_KD = (np.exp(logp_CK) - softmax(of_truth_CK, axis=1)).T @ design_CD + least_D * weight_KD
        missed = float(-logsumexp(of_truth_CK, axis=1).sum())
        return missed + float((least_D * weight_KD**2).sum()) / 2, slope_KD.ravel()

    start = np.zeros(shape) if start_KD is None else start_KD
    found: FloatArray = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B").x.reshape(shape)
    return found


def scores(value_CF: FloatArray, weight_KD: FloatArray) -> FloatArray:
    """Logits of each column, [C, K]."""
    found: FloatArray = value_CF @ weight_KD[:, :-1].T + weight_KD[:, -1]
    return found


def log_loss(score_CK: FloatArray, is_CK: FloatArray) -> float:
    """Mean over cases of −log of the probability of what was planted."""
    of_truth_CK = np.where(is_CK > 0, log_softmax(score_CK, axis=1), -np.inf)
    return float(-logsumexp(of_truth_CK, axis=1).mean())


def left_out(
    value_CF: FloatArray, is_CK: FloatArray, model_C: Sequence[str], kind_C: Sequence[str], penalty: float
) -> FloatArray:
    """Each case's logits from the other models' cases, [C, K]; a case with a kind also without all of its kind."""
    models, kinds = np.array(model_C), np.array(kind_C)
    held_CK = np.zeros(is_CK.shape)
    whole_KD = fit(value_CF, is_CK, penalty)
    for model in np.unique(models):
        in_C = models != model
        weight_KD = fit(value_CF[in_C], is_CK[in_C], penalty, whole_KD)
        for kind in np.unique(kinds[models == model]):
            out_C, known_C, own_KD = ~in_C & (kinds == kind), in_C & (kinds != kind), weight_KD
            if kind:
                own_KD = fit(value_CF[known_C], is_CK[known_C], penalty, weight_KD)
            held_CK[out_C] = scores(value_CF[out_C], own_KD)
    return held_CK


def of_causes(is_CK: FloatArray, columns: Sequence[str]) -> FloatArray:
    """Marks all columns of each marked column's cause: `cause/part` are parts of one cause."""
    causes = np.array([column.partition("/")[0] for column in columns])
    found: FloatArray = (is_CK @ (causes[:, None] == causes[None]) > 0).astype(np.float64)
    return found


def settle(
    value_CF: FloatArray, is_CK: FloatArray, models: Sequence[str], kinds: Sequence[str], columns: Sequence[str]
) -> tuple[dict[str, object], FloatArray]:
    """The model as data, and its logits of every case as `left_out` has them.

    The logits settle the penalty and one factor for all columns, which makes the probabilities hold. A cause may have
    several columns, `cause/part`. A mistake's kind is left out with its model; other causes have an empty kind.
    """
    mean_F, scale_F = value_CF.mean(0), np.maximum(value_CF.std(0), 1e-3)
    known_CF = standardised(value_CF, mean_F, scale_F)
    held = {penalty: left_out(known_CF, is_CK, models, kinds, penalty) for penalty in PENALTIES}
    whole_CK = of_causes(is_CK, columns)
    penalty = min(held, key=lambda one: log_loss(held[one], whole_CK))
    held_CK = held[penalty]
    factor = float(minimize(lambda a: log_loss(a[0] * held_CK, whole_CK), [1.0], bounds=[(0.1, 3.0)]).x[0])
    weight_KD = factor * fit(known_CF, is_CK, penalty)
    data: dict[str, object] = {
        "penalty": penalty,
        "factor": round(factor, 3),
        "mean": dict(zip(FEATURES, mean_F.round(4).tolist(), strict=True)),
        "scale": dict(zip(FEATURES, scale_F.round(4).tolist(), strict=True)),
        "weights": {
            column: dict(zip([*FEATURES, "constant"], weight_D.round(3).tolist(), strict=True))
            for column, weight_D in zip(columns, weight_KD, strict=True)
        },
    }
    return data, factor * held_CK


def few_tokens(
    value_CF: FloatArray,
    is_CK: FloatArray,
    models: Sequence[str],
    parts: Sequence[tuple[int, int, list[float]]],
    data: Mapping[str, Any],
    columns: Sequence[str],
) -> float:
    """The number of tokens that halves how sure a cause is: by the log-loss of first answers to parts of logs.

    `parts`: the number of the log, the tokens of the part, its features. A part is answered by a fit to the logs of
    other models.
    """
    mean_F, scale_F = np.array([*data["mean"].values()]), np.array([*data["scale"].values()])
    known_CF = standardised(value_CF, mean_F, scale_F)
    whole_CK = of_causes(is_CK, columns)
    causes = [column.partition("/")[0] for column in columns]
    same_KK = np.array([[a == b for b in causes] for a in causes], float)
    sure, right, tokens = [], [], []
    for model in sorted(set(models)):
        in_C = np.array(models) != model
        weight_KD = fit(known_CF[in_C], is_CK[in_C], data["penalty"])
        for number, size, values in parts:
            if models[number] == model:
                part_1F = standardised(np.array([values]), mean_F, scale_F)
                chances_K = softmax(data["factor"] * scores(part_1F, weight_KD)[0]) @ same_KK
                first = int(chances_K.argmax())
                sure.append(min(float(chances_K[first]), 0.999))
                right.append(whole_CK[number, first] > 0)
                tokens.append(size)
    sure_N, right_N, tokens_N = np.array(sure), np.array(right), np.array(tokens)

    def loss(log_few: float) -> float:
        scaled_N = sure_N * tokens_N / (tokens_N + np.exp(log_few))
        return float(-np.where(right_N, np.log(scaled_N), np.log1p(-scaled_N)).mean())

    low, high = np.log(FEWEST)
    return float(np.exp(minimize_scalar(loss, bounds=(low, high), method="bounded").x))
