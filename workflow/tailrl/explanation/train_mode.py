"""Dropout left on: its random numbers cannot be recomputed, but its size can: a column is held against other draws."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tailrl.explanation.catalogue import Choice, Entry, Hypothesis
from tailrl.explanation.columns import Finding
from tailrl.explanation.inputs import Context
from tailrl.explanation.search import Laboratory

# The column looks like one more draw of the dropout if both shares lie in their ranges.
DRAWS = 9  # each with its own seed
EXTREME = (0.1, 0.32)  # of tokens beyond all draws; a tenth draw is beyond nine others in 0.2
CENTRED = (0.4, 0.6)  # of draws below the logged number, on average; 0.5 is expected


def probabilities(model: PreTrainedModel) -> Iterator[float]:
    """The dropout probabilities of a model's modules that are not 0."""
    for module in model.modules():
        own = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if isinstance(own, float) and own > 0:
            yield own


def _drawn(model: PreTrainedModel, value: float, context: Context) -> PreTrainedModel:  # noqa: ARG001 - of all
    torch.manual_seed(int(value))
    return model.train()


TRAIN_MODE = Hypothesis(
    "train_mode",
    Entry(kind="model", words="dropout, draw {value}", look="model.eval()"),
    _drawn,
)


def left_on(side: str, sample: Laboratory) -> Finding | None:
    """What is said where a column cannot be told from a draw of the model's own dropout; None where it can."""
    column_T, plain_T = sample.column(side), sample.plain_logprobs
    draws = [sample.predicted((Choice(TRAIN_MODE, float(seed)),)) for seed in range(DRAWS)]
    drawn_DT = np.array([one for one in draws if one is not None])  # D: draws
    below_T = (drawn_DT < column_T).sum(0)
    extreme = float(np.isin(below_T, (0, DRAWS)).mean())
    if not EXTREME[0] <= extreme <= EXTREME[1] or not CENTRED[0] <= below_T.mean() / DRAWS <= CENTRED[1]:
        return None
    far, size = np.abs(column_T - plain_T).mean(), np.abs(drawn_DT - plain_T).mean()
    share = max(probabilities(sample.scorer.model))
    words = (
        f"The {side}'s numbers look like a draw of this model's own dropout (p = {share:g}): {far:.3g} nats from the "
        f"model, where other draws are {size:.3g}. A draw cannot be recomputed, so this is by size alone. Look at "
        f"train mode: model.eval() before the {side}'s log-probs are computed."
    )
    return Finding("train_mode", side, words, 1.0)
