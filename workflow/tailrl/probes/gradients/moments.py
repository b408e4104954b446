"""Mean and variance of a step's gradient as exact sums, for any estimator and any weights.

A step has n responses y to each of K prompts, B = K n in all. Its gradient is ĝ = (1/B) Σ_i |A_i| d(y_i). The term
d(y), the gradient of −loss for an advantage of 1 or −1, depends on the response alone. Rewards are 0 or 1, and every
estimator subtracts an average between them. So a right response's advantage is never negative, a wrong one's never
positive: the reward gives the sign. |A_i| depends on the reward, and on how many of the other responses that the
estimator compares with are right. Given the rewards, the responses are independent. Hence, with k the prompt, r the
reward and u_kr = E[1(R = r) d(y)],

    E ĝ = (1/K) Σ_kr E[|A| | k, r] u_kr
    B² E|ĝ|² = n Σ_kr E[A² | k, r] E[1(R = r) |d(y)|²] + Σ_{i ≠ j} E[|A_i| |A_j| | k, r, l, s] u_kr · u_ls

What remains to enumerate is the number of right ones among the others: a sum of independent binomials.
"""

from dataclasses import dataclass
from functools import cache, reduce
from itertools import product

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from tailrl.artifacts.metrics import FloatArray
from tailrl.objective.advantages import ESTIMATORS, STEP_WIDE
from tailrl.runtime.errors import ConfigurationError
from tailrl.runtime.import_path import is_import_path


@dataclass(frozen=True, slots=True)
class Terms:
    """The term d(y) of every response, and the chance that the sampler draws it.

    Attributes:
        term_KNTV: float64, d(y), in the row of each token's state.
        state_KNT: int64, the index of this row among S states.
        chance_KN: float64, probability of each response to a prompt.
        right_KN: int64, the reward.
        states: S.
    """

    term_KNTV: Tensor
    state_KNT: Tensor
    chance_KN: Tensor
    right_KN: Tensor
    states: int


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Moments of |A| given rewards; indices k, l are prompts, r, s rewards of two different responses.

    Attributes:
        first_KR, second_KR: E[|A| | k, r] and E[A² | k, r].
        pair_KRKR: E[|A_i| |A_j| | k, r, l, s].
    """

    first_KR: FloatArray
    second_KR: FloatArray
    pair_KRKR: FloatArray


@cache
def magnitude_table(estimator: str, members: int) -> FloatArray:
    """|A| of a response by its reward r and the number m of right ones among the other members − 1: [2, members].

    Raises:
        ValueError: an advantage whose sign does not follow from its reward, as this module assumes.
    """
    if is_import_path(estimator):
        raise ConfigurationError(f"estimator: {estimator}: the gradients' page knows {', '.join(ESTIMATORS)} alone")
    table_RM = np.empty((2, members))
    for reward in (0, 1):
        for right in range(members):
            others = [1.0] * right + [0.0] * (members - 1 - right)
            table_RM[reward, right] = ESTIMATORS[estimator](torch.tensor([[reward, *others]]).double())[0, 0]
    if (table_RM[0] > 0).any() or (table_RM[1] < 0).any():
        raise ValueError(f"{estimator}: an advantage has another sign than reward 1 (plus) or 0 (minus)")
    return np.abs(table_RM)


def magnitudes(estimator: str, success_K: FloatArray, group_size: int) -> Magnitudes:
    """The moments of |A| if a response to prompt k is right with probability success_K[k]."""
    prompts = len(success_K)
    wide = estimator in STEP_WIDE
    table_RM = magnitude_table(estimator, group_size * prompts if wide else group_size)

    def others(*left_out: int) -> FloatArray:
        """Probability of each number of right ones among the compared responses, minus one for each prompt left out."""
        seen = range(prompts) if wide else left_out[:1]
        counts = [group_size - left_out.count(prompt) for prompt in seen]
        parts = [binom.pmf(np.arange(n + 1), n, success_K[k]) for k, n in zip(seen, counts, strict=True)]
        return np.asarray(reduce(np.convolve, parts))

    first_KR = np.array([table_RM @ others(k) for k in range(prompts)])
    second_KR = np.array([table_RM**2 @ others(k) for k in range(prompts)])
    pair_KRKR = np.einsum("kr,ls->krls", first_KR, first_KR)
    for k in range(prompts):
        for other in range(prompts) if wide else (k,):
            chance_M = others(k, other)
            for r, s in product((0, 1), repeat=2):
                # Each response is one of the other's others: a right one raises the number by one.
                product_M = table_RM[r, s : s + len(chance_M)] * table_RM[s, r : r + len(chance_M)]
                pair_KRKR[k, r, other, s] = chance_M @ product_M
    return Magnitudes(first_KR, second_KR, pair_KRKR)


def mean_and_variance(terms: Terms, estimator: str, group_size: int) -> tuple[Tensor, float]:
    """E ĝ, float64 [S, V], and the trace of the covariance of ĝ."""
    prompts, vocabulary = len(terms.chance_KN), terms.term_KNTV.shape[-1]
    cell_KN = 2 * torch.arange(prompts)[:, None] + terms.right_KN
    weighted_KNTV = terms.chance_KN[..., None, None] * terms.term_KNTV
    row_T = (cell_KN[..., None] * terms.states + terms.state_KNT).flatten()
    u_CSV = torch.zeros(2 * prompts * terms.states, vocabulary, dtype=torch.float64)
    u_CSV = u_CSV.index_add(0, row_T, weighted_KNTV.flatten(0, 2)).view(2 * prompts, terms.states, vocabulary)
    square_KN = (weighted_KNTV * terms.term_KNTV).sum((-1, -2))
    square_KR = torch.zeros(2 * prompts, dtype=torch.float64).index_add(0, cell_KN.flatten(), square_KN.flatten())
    success_K = (terms.chance_KN * terms.right_KN).sum(-1).clamp(0, 1)
    a = magnitudes(estimator, success_K.numpy(), group_size)
    mean_SV = torch.einsum("c,csv->sv", torch.from_numpy(a.first_KR).flatten() / prompts, u_CSV)
    dots_KRKR = (u_CSV.flatten(1) @ u_CSV.flatten(1).T).view(prompts, 2, prompts, 2).numpy()
    pairs_KK = np.full((prompts, prompts), group_size**2) - group_size * np.eye(prompts)
    own = group_size * (a.second_KR.ravel() @ square_KR.numpy())
    cross = np.einsum("kl,krls,krls->", pairs_KK, a.pair_KRKR, dots_KRKR)
    second_moment = (own + cross) / (prompts * group_size) ** 2
    return mean_SV, max(0.0, second_moment - mean_SV.square().sum().item())


def draw_steps(terms: Terms, estimator: str, group_size: int, draws: int, generator: torch.Generator) -> Tensor:
    """The gradient ĝ of sampled steps: float64 [draws, S, V].

    Common random numbers: one per response, which the inverse of the cumulative distribution turns into the response.
    With equal generators, two arms sample equal responses unless their distributions differ there.
    """
    prompts, vocabulary = len(terms.chance_KN), terms.term_KNTV.shape[-1]
    uniform_KX = torch.rand(prompts, draws * group_size, dtype=torch.float64, generator=generator)
    below_KN = terms.chance_KN.cumsum(-1)
    # The first response whose cumulative probability exceeds the number: its own is never 0.
    drawn_KX = torch.searchsorted(below_KN / below_KN[:, -1:], uniform_KX, right=True)
    drawn_DKG = drawn_KX.view(prompts, draws, group_size).transpose(0, 1)
    prompt_K1 = torch.arange(prompts)[:, None]
    reward_DKG = terms.right_KN[prompt_K1, drawn_DKG].double()
    size_DKG = torch.vmap(ESTIMATORS[estimator])(reward_DKG).abs() / (prompts * group_size)
    term_DKGTV = size_DKG[..., None, None] * terms.term_KNTV[prompt_K1, drawn_DKG]
    step_D = torch.arange(draws)[:, None, None, None] * terms.states
    row_X = (step_D + terms.state_KNT[prompt_K1, drawn_DKG]).flatten()
    gradient_XV = torch.zeros(draws * terms.states, vocabulary, dtype=torch.float64)
    return gradient_XV.index_add(0, row_X, term_DKGTV.flatten(0, 3)).view(draws, terms.states, vocabulary)
