"""Tiny sequence models: all K prompts and N = V^T responses are enumerated, and every expectation is a sum.

The policy is a table of logits in float64 with a row for each state: for the first token one per prompt, then one per
position and previous token. No response reads a row twice, so that its tokens' gradients lie in different rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrl.objective.safe_set import safe_set
from tailrl.runtime.seeding import derive_seed

MODULUS = 3
"""A response is right if its tokens' digits sum to the prompt's target modulo this number."""

TAIL_DEPTH = (3.0, 15.0)
"""How far the tail's first and last token lie below the head, nats."""


@dataclass(frozen=True, slots=True)
class SequenceModel:
    """A trainer's policy and the reward of every response; `sequence_model` makes one.

    Attributes:
        logits_SV: float64, S = K + (T − 1) V states.
        reward_KN: float64, 1 for a right response to the prompt, else 0.
        tokens_NT: int64, every response.
        state_KNT: int64, the row of the table that each token is drawn from.
    """

    logits_SV: Tensor
    reward_KN: Tensor
    tokens_NT: Tensor
    state_KNT: Tensor

    def gather(self, values_SV: Tensor) -> Tensor:
        """The entries of a table over states and tokens for each token of each response: [K, N, T]."""
        return values_SV[self.state_KNT, self.tokens_NT.expand_as(self.state_KNT)]


def sequence_model(logits_SV: Tensor, reward_KN: Tensor, length: int) -> SequenceModel:
    """The model with all its responses and their states; `length` is T."""
    prompts, vocabulary = len(reward_KN), logits_SV.shape[1]
    tokens_NT = all_sequences(vocabulary, length)
    position_X = torch.arange(length - 1)
    later_NX = prompts + position_X * vocabulary + tokens_NT[:, :-1]
    first_KN1 = torch.arange(prompts)[:, None, None].expand(-1, len(tokens_NT), 1)
    state_KNT = torch.cat([first_KN1, later_NX.expand(prompts, -1, -1)], dim=-1)
    return SequenceModel(logits_SV, reward_KN, tokens_NT, state_KNT)


def all_sequences(vocabulary_size: int, length: int) -> Tensor:
    """Every sequence of that length: int64 [V^T, T]."""
    return torch.cartesian_prod(*[torch.arange(vocabulary_size)] * length).reshape(-1, length)


def random_model(vocabulary_size: int, length: int, prompts: int, seed: int) -> SequenceModel:
    """A random policy whose vocabulary's last third is a long tail, with a reward like arithmetic's.

    Logits are standard normal; the tail's are lower by TAIL_DEPTH, evenly spaced. Each token stands for a random digit.
    A response is right if its digits sum to the prompt's target modulo MODULUS and no token is in the tail.
    """
    generator = torch.Generator().manual_seed(seed)
    tail = vocabulary_size // 3
    states = prompts + (length - 1) * vocabulary_size
    logits_SV = torch.randn(states, vocabulary_size, dtype=torch.float64, generator=generator)
    logits_SV[:, -tail:] -= torch.linspace(*TAIL_DEPTH, tail, dtype=torch.float64)
    digit_V = torch.randint(MODULUS, (vocabulary_size,), generator=generator)
    target_K = torch.randint(MODULUS, (prompts,), generator=generator)
    tokens_NT = all_sequences(vocabulary_size, length)
    clean_N = (tokens_NT < vocabulary_size - tail).all(-1)
    right_KN = (digit_V[tokens_NT].sum(-1) % MODULUS == target_K[:, None]) & clean_N
    return sequence_model(logits_SV, right_KN.double(), length)


# --- mismatch: from the trainer's logits to the sampler's, by a dose; the seed gives the direction ----------
# Not `objective.disturbance`: its random numbers and the rounding of its floor would change published numbers.


def noise(logits_SV: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """Independent Gaussian noise on every logit, fixed for each state, as for one engine."""
    return logits_SV + sigma * torch.randn(logits_SV.shape, dtype=logits_SV.dtype, generator=generator)


def floor(logits_SV: Tensor, eta: float, _: torch.Generator) -> Tensor:
    """π_infer = (1 − η) π + η/V: a tail that is too heavy."""
    return ((1 - eta) * logits_SV.softmax(-1) + eta / logits_SV.shape[1]).log()


def bias(logits_SV: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """One Gaussian per token, added in every state: an error that does not average out over a response."""
    return logits_SV + size * torch.randn(logits_SV.shape[1], dtype=logits_SV.dtype, generator=generator)


def rounding(logits_SV: Tensor, step: float, _: torch.Generator) -> Tensor:
    """Logits on a grid whose step is a share of the state's largest: as symmetric quantisation rounds a row of weights.

    A step of 1/7 is that of 4 bits, 1/127 of 8 bits.
    """
    grid_S1 = step * logits_SV.abs().amax(-1, keepdim=True)
    return (logits_SV / grid_S1).round() * grid_S1


MISMATCHES: dict[str, Callable[[Tensor, float, torch.Generator], Tensor]] = {
    function.__name__: function for function in (noise, floor, bias, rounding)
}

OLD = "old"
"""The kind of mismatch of a sampler with the policy's earlier weights."""

DOSES = {"noise": (1e-5, 10.0), "floor": (1e-8, 0.99), "bias": (1e-5, 10.0), "rounding": (1e-4, 2.0), OLD: (1e-3, 1e3)}
"""The smallest and the largest dose that `dose_at` tries."""

DOSES_TRIED, TIMES_NARROWED = 64, 3
"""Doses of a search, and how often it is repeated between the neighbours of the best."""


def sampler_logits(logits_SV: Tensor, mismatch: str, dose: float, *seed: object) -> Tensor:
    """The sampler's logits: kind and seed give the direction of the mismatch, the dose its size."""
    generator = torch.Generator().manual_seed(derive_seed("mismatch", mismatch, *seed))
    return MISMATCHES[mismatch](logits_SV, dose, generator)


def old_weights(model: SequenceModel, dose: float) -> Tensor:
    """The logits before a step of exact gradient ascent on the return: −dose ∇J/|∇J|, float64 [S, V].

    It is no random direction: the trainer has moved towards reward, as in a run whose engine lags behind.
    """
    step_SV = return_gradient(model)
    direction_SV: Tensor = step_SV / step_SV.norm()
    return model.logits_SV - dose * direction_SV


def disturbed(model: SequenceModel, mismatch: str, dose: float, *seed: object) -> Tensor:
    """The sampler's logits of a model, by a kind of `MISMATCHES` or `OLD`, float64 [S, V]."""
    if mismatch == OLD:
        return old_weights(model, dose)
    return sampler_logits(model.logits_SV, mismatch, dose, *seed)


def dose_at(model: SequenceModel, mismatch: str, nats: float, *seed: object) -> float:
    """The dose at which the mismatch has this divergence per token; of several, or of none, one of the nearest.

    Rounding jumps where a logit changes its place on the grid, so that a bisection would not do.
    """
    low, high = DOSES[mismatch]
    best = low
    for _ in range(TIMES_NARROWED):
        doses = torch.logspace(math.log10(low), math.log10(high), DOSES_TRIED, dtype=torch.float64).tolist()
        apart = [abs(divergence(model, disturbed(model, mismatch, d, *seed)) - nats) for d in doses]
        place = min(range(DOSES_TRIED), key=apart.__getitem__)
        best, low, high = doses[place], doses[max(place - 1, 0)], doses[min(place + 1, DOSES_TRIED - 1)]
    return best


def constrained(logits_SV: Tensor, rule: str, threshold: float) -> Tensor:
    """log π^mp of every token in every state, [S, V]; −inf outside the safe set, whose choice has no gradient."""
    return logits_SV.masked_fill(~safe_set(logits_SV, rule, threshold), -torch.inf).log_softmax(-1)


def return_gradient(model: SequenceModel, safe_SV: Tensor | None = None) -> Tensor:
    """∇ of the mean over prompts of Σ_y π^mp(y) R(y), with respect to the table of logits: float64 [S, V].

    With a safe set it is ∇J_mp, the gradient of the pruned objective. Without one, over the full vocabulary, it is ∇J.
    """
    logits_SV = model.logits_SV.clone().requires_grad_()
    kept_SV = logits_SV if safe_SV is None else logits_SV.masked_fill(~safe_SV, -torch.inf)
    chance_KN = model.gather(kept_SV.log_softmax(-1)).sum(-1).exp()
    (gradient_SV,) = torch.autograd.grad((chance_KN * model.reward_KN).sum(-1).mean(), logits_SV)
    return gradient_SV


def divergence(model: SequenceModel, logits_sampler_SV: Tensor) -> float:
    """KL(π_infer ‖ π_train) per token over the full vocabulary, nats: the expectation of k3."""
    logp_trainer_KNT = model.gather(model.logits_SV.log_softmax(-1))
    logp_sampler_KNT = model.gather(logits_sampler_SV.log_softmax(-1))
    chance_KN = logp_sampler_KNT.sum(-1).exp()
    return (chance_KN * (logp_sampler_KNT - logp_trainer_KNT).mean(-1)).sum(-1).mean().item()
