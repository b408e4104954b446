"""Finds the k of top-k and the p of top-p that keep the same mean mass as min-p at a given ρ.

Rules are comparable at equal kept mass, which depends on the policy. It is measured on the policy's own responses:
the trainer samples them from all tokens and scores them.
"""

import csv
import math
from pathlib import Path

from torch import Tensor

from tailrl.artifacts.manifest import policy_digest, vouched_checksum
from tailrl.config.distributions import Distributions
from tailrl.model.policy import named_weights
from tailrl.objective.safe_set import safe_set
from tailrl.probes.distributions.measure import make_requests, read_inputs, trainer_logits
from tailrl.rollout import Decoding, make_sampler
from tailrl.runtime.errors import ConfigurationError

MOST_LOGITS = 2**28
"""Most logits in memory: 2 GiB in float64."""

COLUMNS = ("rho", "kept_mass", "lost_per_response", "k", "k_mass", "p", "p_mass")


def write_equal_mass(settings: Distributions, policy_folder: Path, problems_file: Path, out: Path) -> None:
    """Writes a CSV file of `COLUMNS`, a row for each ρ.

    A row has min-p's mean kept mass, the mass that a whole response loses (E[Σ_t (1 − Z_t)]), the k and the p that come
    closest to this kept mass, and the mass that each of them keeps.

    Raises:
        StudyError: an unreadable input, a prompt too long for the policy, a ρ above 1 in its vocabulary, or too many
            positions for the memory.
    """
    policy_digest(policy_folder)
    vouched_checksum(problems_file)
    model, prompts, length, log_rhos = read_inputs(settings, policy_folder, problems_file)
    vocabulary = model.config.vocab_size
    positions = settings.responses * -(-settings.max_new_tokens // settings.every)
    if positions * vocabulary > MOST_LOGITS:
        raise ConfigurationError(
            f"distributions: up to {positions} positions of {vocabulary} logits each are too many to compare rules on; "
            "raise every or lower responses"
        )
    sampler = make_sampler(settings.engine.sampler, policy_folder, length, settings.seed, model)
    sampler.load_weights(named_weights(model))
    requests = make_requests(settings, prompts)
    rollouts = sampler.generate(requests, Decoding(settings.temperature, settings.max_new_tokens))
    logits_PV = trainer_logits(model, requests, rollouts, settings, settings.token_budget).double()
    if not len(logits_PV):
        raise ConfigurationError(
            f"distributions: none of {settings.responses} responses has a position to compare; lower every"
        )
    per_response = sum(len(rollout.tokens) for rollout in rollouts) / len(rollouts)
    rows = []
    for rho, log_rho in zip(settings.rho, log_rhos, strict=True):
        kept = kept_mass(logits_PV, "min_p", log_rho)
        k, p = closest_k(logits_PV, kept), closest_p(logits_PV, kept)
        masses = [kept_mass(logits_PV, *rule) for rule in (("top_k", float(k)), ("top_p", p))]
        rows.append((rho, kept, (1 - kept) * per_response, k, masses[0], p, masses[1]))
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def kept_mass(logits_PV: Tensor, rule: str, threshold: float) -> float:
    """Mean over P states of the mass of a rule's safe set."""
    safe_PV = safe_set(logits_PV, rule, threshold)
    return logits_PV.softmax(-1).masked_fill(~safe_PV, 0.0).sum(-1).mean().item()


def closest_k(logits_PV: Tensor, mass: float) -> int:
    """The k whose mean kept mass over the states is closest to this mass."""
    mean_V = logits_PV.softmax(-1).sort(-1, descending=True).values.cumsum(-1).mean(0)
    return int((mean_V - mass).abs().argmin()) + 1


def closest_p(logits_PV: Tensor, mass: float) -> float:
    """The p whose mean kept mass is closest to this mass; 1 − p has four significant digits.

    By bisection of ln(1 − p): a larger p never keeps less mass.
    """
    low, high = -36.0, -1e-4
    while high - low > 1e-5:
        middle = (low + high) / 2
        keeps_more = kept_mass(logits_PV, "top_p", _rounded(middle)) > mass
        low, high = (middle, high) if keeps_more else (low, middle)
    return min((_rounded(low), _rounded(high)), key=lambda p: abs(kept_mass(logits_PV, "top_p", p) - mass))


def _rounded(log_rest: float) -> float:
    """p = 1 − exp(`log_rest`), the exponential rounded to four digits."""
    return 1 - float(f"{math.exp(log_rest):.3e}")
