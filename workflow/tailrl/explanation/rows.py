"""Rows of logits, reduced to what transforms of logits need: one forward serves all of them in bounded memory.

A row keeps the largest logits, those of the tokens that the sequence has so far, and those of some watched tokens, one
entry each. The rest of the vocabulary is summed up in bins: an entry has the log of its number of tokens as a weight,
and the logit that gives the bin's exact mass. At temperature 1 the sums are exact. At others they are close, since a
bin is narrow and lies in the tail.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LARGEST = 256  # so many of a row's largest logits stay entries of their own
BINS = 192  # for the rest of the vocabulary
CHUNK = 64  # so many rows have their whole vocabulary in memory at once
NEVER = -1e30  # the logit of a probability of 0; unlike -inf it makes no NaN
FILLS = {
    "value_TE": NEVER,
    "weight_TE": -torch.inf,
    "id_TE": -1,
    "before_TE": False,
    "count_TE": 0.0,
}  # in place of an entry


@dataclass(frozen=True)
class Rows:
    """T reduced rows of E entries.

    Attributes:
        value_TE: float32, logits.
        weight_TE: float32, the log of the number of tokens in the entry; -inf: none.
        id_TE: int64, token ids; -1: a bin or nothing.
        before_TE: bool, whether the token occurs in prompt or response before the position.
        count_TE: float32, how often it occurs in the response before it.
        target_T: int64, the entry of the sampled token.
        ends: the ids of the model's end tokens.
    """

    value_TE: Tensor
    weight_TE: Tensor
    id_TE: Tensor
    before_TE: Tensor
    count_TE: Tensor
    target_T: Tensor
    ends: tuple[int, ...] = ()

    def with_values(self, value_TE: Tensor) -> "Rows":
        return replace(self, value_TE=value_TE)

    def kept(self, keep_TE: Tensor) -> "Rows":
        """Other entries get the probability 0. The sampled token stays: the sampler had it."""
        at_target_TE = torch.zeros_like(keep_TE).scatter_(1, self.target_T[:, None], True)
        return self.with_values(torch.where(keep_TE | at_target_TE, self.value_TE, NEVER))

    def logprobs(self) -> Tensor:
        """Log-probs of the sampled tokens, nats, float64 [T], exact to about 1e-7."""
        high_T, rest_T = self._norm()
        return (self.value_TE.gather(1, self.target_T[:, None])[:, 0] - high_T).double() - rest_T

    def top_logprobs(self) -> Tensor:
        """The largest log-prob of each row, nats, float64 [T]."""
        high_T, rest_T = self._norm()
        return (self.value_TE.where(self.weight_TE == 0, -torch.inf).amax(-1) - high_T).double() - rest_T

    def _norm(self) -> tuple[Tensor, Tensor]:
        """The log of the sum in two parts: the largest term, and what the others add; exponents are float32."""
        term_TE = self.value_TE + self.weight_TE
        high_T = term_TE.amax(-1)
        return high_T, (term_TE - high_T[:, None]).exp().sum(-1, dtype=torch.float64).log()

    def cpu(self) -> "Rows":
        return replace(self, **{name: getattr(self, name).cpu() for name in (*FILLS, "target_T")})

    @classmethod
    def joined(cls, parts: list["Rows"]) -> "Rows":
        """All parts' rows, in order, padded to one number of entries."""
        entries = max(part.value_TE.shape[1] for part in parts)
        columns = {
            name: torch.cat([_padded(getattr(part, name), entries, fill) for part in parts])
            for name, fill in FILLS.items()
        }
        return cls(**columns, target_T=torch.cat([part.target_T for part in parts]), ends=parts[0].ends)


def _padded(values_TE: Tensor, entries: int, fill: float) -> Tensor:
    missing = entries - values_TE.shape[1]
    return torch.nn.functional.pad(values_TE, (0, missing), value=fill)


def reduced(logits_CV: Tensor, ids_P: Tensor, place_C: Tensor, first: int, watched: Collection[int]) -> Rows:
    """Reduced rows of one sequence.

    Args:
        logits_CV: float32, the logits that predict the tokens at `place_C`.
        ids_P: int64, the whole sequence.
        place_C: int64, places in it of the predicted tokens.
        first: the place of the response's first token.
        watched: token ids that get entries of their own.
    """
    count, vocabulary = logits_CV.shape
    device = logits_CV.device
    watch_W = torch.tensor(sorted({*watched} & {*range(vocabulary)}), dtype=torch.int64, device=device)
    own = torch.unique(torch.cat([ids_P[: int(place_C.max()) + 1], watch_W]))
    own = own[own < vocabulary]
    top_CE = logits_CV.topk(min(LARGEST, vocabulary), -1).indices
    repeated_CE = torch.isin(top_CE, own)
    id_CE = torch.cat([top_CE, own.expand(count, -1)], 1)
    value_CE = logits_CV.gather(1, id_CE)
    weight_CE = torch.zeros_like(value_CE)
    weight_CE[:, : top_CE.shape[1]].masked_fill_(repeated_CE, -torch.inf)
    id_CE = id_CE.masked_fill(weight_CE < 0, -1)
    value_CE = value_CE.masked_fill(weight_CE < 0, NEVER)
    before_CE, count_CE = _occurrences(ids_P, place_C, first, own, top_CE.shape[1])
    target_C = top_CE.shape[1] + torch.searchsorted(own, ids_P[place_C].clamp(max=vocabulary - 1))
    rest_CV = logits_CV.scatter(1, torch.cat([top_CE, own.expand(count, -1)], 1), -torch.inf)
    bin_value_CE, bin_weight_CE = _bins(rest_CV)
    bins = bin_value_CE.shape[1]
    return Rows(
        torch.cat([value_CE, bin_value_CE], 1),
        torch.cat([weight_CE, bin_weight_CE], 1),
        _padded(id_CE, id_CE.shape[1] + bins, -1),
        _padded(before_CE, id_CE.shape[1] + bins, False),
        _padded(count_CE, id_CE.shape[1] + bins, 0.0),
        target_C,
    )


def _occurrences(ids_P: Tensor, place_C: Tensor, first: int, own: Tensor, skipped: int) -> tuple[Tensor, Tensor]:
    """Of each entry: whether it occurs before, and how often in the response before; `skipped` entries do not."""
    number_P = torch.searchsorted(own, ids_P.clamp(max=int(own.max())))

    def counted(begin: int) -> Tensor:
        # One row a place: a table of all positions and tokens would take gigabytes for a long sequence.
        return torch.stack([number_P[begin:place].bincount(minlength=len(own)) for place in place_C.tolist()]).float()

    nothing_C = number_P.new_zeros(len(place_C), skipped).float()
    return torch.cat([nothing_C, counted(0)], 1) > 0, torch.cat([nothing_C, counted(first)], 1)


def _bins(rest_CV: Tensor) -> tuple[Tensor, Tensor]:
    """The rest of each row in bins: values and log-counts [C, BINS]; no entry has a value of -inf."""
    finite_CV = rest_CV.isfinite()
    high_C1 = rest_CV.amax(-1, keepdim=True).clamp(min=NEVER)
    low_C1 = torch.where(finite_CV, rest_CV, torch.inf).amin(-1, keepdim=True).clamp(max=1e30)
    width_C1 = ((high_C1 - low_C1) / BINS).clamp(min=1e-6)
    bin_CV = torch.where(finite_CV, (rest_CV - low_C1) / width_C1, 0.0).clamp(0, BINS - 1).long()
    shifted_CV = torch.where(finite_CV, (rest_CV - high_C1), -torch.inf).double()
    mass_CE = shifted_CV.new_zeros(len(rest_CV), BINS).scatter_add_(1, bin_CV, shifted_CV.exp())
    number_CE = torch.zeros_like(mass_CE).scatter_add_(1, bin_CV, finite_CV.double())
    full_CE = (number_CE > 0) & (mass_CE > 0)
    weight_CE = torch.where(full_CE, number_CE.clamp(min=1).log(), -torch.inf)
    value_CE = torch.where(full_CE, mass_CE.clamp(min=1e-300).log() - number_CE.clamp(min=1).log() + high_C1, NEVER)
    return value_CE.float(), weight_CE.float()
