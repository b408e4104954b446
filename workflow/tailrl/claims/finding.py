"""What a claim is, its id and its words, what arms show of it, and the list of those that arms speak to: what `claims`
fills and `verdicts` decides."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tailrl.artifacts.results import Results
from tailrl.stats.tests import Difference

DVP, VEXACT = "arXiv 2512.23087", "arXiv 2605.14220"
OPEN = "open question"
"""Where claims come from: the papers, and what they leave open."""

REPRODUCED, CONTRADICTED, UNDECIDED = "reproduced", "contradicted", "not decided"
UNTESTABLE = "not testable at this scale"
CHANGES = "a difference is shown"
"""Of a question that has no direction: whether a setting matters."""
MEASURED = "measured"
"""Of a question whose answer is a figure."""
ASIDE = "premise fails"
"""Of a theorem where what it assumes does not hold."""

QUANTITIES = {
    "gain over base, points": "gain",
    "1 − Z": "lost_mass.token",
    "1 − Z of a response, summed": "lost_mass.response",
    "outside": "outside",
    "k3 masked, nats": "k3.masked",
    "k3 unmasked, nats": "k3.unmasked",
    "|Δ| of a response, nats": "delta.response",
    "effective sample size of the responses' weights": "sample_size",
}
"""What studies are compared by, each with its part of the ids."""

WARNINGS = {
    "k3": "k3",
    "masked k3": "masked_k3",
    "effective sample size": "sample_size",
    "smallest weight": "smallest_weight",
    "skew of C(r)": "skew",
    "gradient norm": "gradient_norm",
    "rising entropy": "rising_entropy",
    "falling entropy": "falling_entropy",
    "falling reward": "falling_reward",
    "tokens outside": "tokens_outside",
}
"""What may announce a collapse, each with its part of the ids."""

WORDS = {
    "dvp.prop4_2.growth": "|Δ| grows with 1 − p",
    "dvp.prop4_3.sign": "Sampled tail tokens have −Δ > 0",
    "dvp.small_kl": "DVP keeps the masked KL below 0.001 on average over runs",
    "dvp.figure1.explosion": "Naive's KL explodes, DVP's does not",
    "vexact.zero_mismatch.k3": "The exact engine's k3 is 0 at every step",
    "vexact.a.collapse": "Naive collapses sooner under a mismatch than without one",
    "vexact.a.collapse.matched": "Naive collapses sooner by mismatch alone: than as disturbed without one",
    "dvp.figure1.collapse": "Naive collapses sooner than DVP",
    "vexact.a.score": "Naive ends lower under a mismatch than without one",
    "vexact.a.score.matched": "Naive ends lower by mismatch alone: than as disturbed without one",
    "open.zero_mismatch.score": "DVP ends above naive with zero mismatch too",
    "open.matched_noise.score": "DVP ends above naive where the samples are noisy alone",
    "dvp.score": "DVP ends above naive",
    "dvp.with_mis.score": "DVP + MIS ends above naive",
    "dvp.veto.catches": "The veto acts in every step with a token outside the trainer's set",
    "open.fair_kl": "DVP lowers the unmasked k3 of what it samples, too",
    "vexact.b.k3": "K3 grows more under bypass than under recompute",
    "vexact.b.k1": "K1 grows more under bypass than under recompute",
    "vexact.b.reward": "Under recompute the reward falls while K3 stays flat",
    "vexact.b.skew": "Under recompute C(r) is skewed by the sign of the advantage",
    "dvp.prop5_5.bound": "The measured bias bound is not empty",
    "open.rho.binds": "DVP's set at ρ = e⁻¹³ leaves out a token of one response in a hundred",
    "vexact.c.tis": "Token truncation (TIS) ends above naive",
    "vexact.c.rejection": "Sequence rejection ends above naive",
    "vexact.c.k1_or_k3": "Rejection by K1 ends as rejection by K3",
    "vexact.c.r_corr": "Rejection by r_corr ends above rejection by r_ppo",
    "vexact.c.both": "Truncation with rejection ends above either alone",
    "dvp.mis.score": "MIS alone ends above naive",
    "open.dvp_or_mis.score": "DVP ends above MIS",
    "dvp.adaptive.score": "An adaptive ρ ends above the fixed one",
    "price.remedies": "What pruning or weighting costs a step",
    "price.zero_mismatch": "What zero mismatch costs a step",
    "dvp.thm4_1.bias": "Naive policy gradients are biased under mismatch, the more the larger it is",
    "dvp.rloo.unbiased": "RLOO on all tokens is unbiased without mismatch",
    "dvp.thm5_3.unbiased": "On the safe sets the untruncated sequence weight is unbiased for the constrained "
    "policy's gradient",
    "dvp.mis.variance": "MIS trades the variance of importance sampling for a bias",
    "dvp.prop4_2.bound": "|Δ| stays below 2 ε_max (1 − p)",
    "dvp.prop4_3.sign.whole": "Tail tokens are sampled with −Δ > 0, whole distributions",
    "dvp.prop4_3.mode": "The tail's mean −Δ is the mode of Prop. 4.3",
    "dvp.prop4_3.second_order": "The tail's mean −Δ is what iid noise gives to second order",
    "dvp.safe_set.nested": "The sampler's safe set has every token of the trainer's",
    "vexact.zero_mismatch.distributions": "The exact engine's distributions are the trainer's, to the bit",
    **{f"across.{part}": f"across studies: {name}" for name, part in QUANTITIES.items()},
    "across.lost_mass.*": "across studies: 1 − Z",
    **{f"warning.{part}.collapse": f"{name} announces a collapse" for name, part in WARNINGS.items()},
    "warning.k3.collapse.lead": "k3 announces a collapse 30 to 50 steps before",
    "warning.*.collapse*": "announces a collapse",
    **{
        f"warning.{part}.before_reward": f"{name} warns before the falling reward does"
        for name, part in WARNINGS.items()
    },
    "warning.*.before_reward": "warns before the falling reward does",
}
"""Each claim's words by its id, which never changes; `*` stands for several claims."""

ABLATED = {
    "score": "",
    "as_good": ", as good within a margin",
    "steps_before_collapse": ", steps before a collapse",
    "contrast": ", one arm less another",
    "*": "",
}
"""What is asked of a field that an ablation varies: the end of the id, ablation.<field>.<end>, and of the words."""


def words_of(claim: str, otherwise: str = "") -> str:
    """The words of the claim with this id, or of the claims of a pattern; `otherwise` where there is none."""
    field, _, asked = claim.removeprefix("ablation.").rpartition(".")
    if claim.startswith("ablation.") and field and asked in ABLATED:
        return f"ablation of {field}{ABLATED[asked]}"
    return WORDS.get(claim, otherwise)


@dataclass(frozen=True, slots=True)
class Finding:
    """What some arms show of a claim, before the number of tests is accounted for.

    Attributes:
        arms: those compared, first the one that the claim is about.
        seeds: the runs behind it, of the arm with fewest.
        effect, low, high: the endpoint with its interval over seeds, in the claim's unit; NaN where there is none.
        words: what was seen.
        p_for, p_against: one-sided p that the claim's direction holds, and that its opposite does.
        outcome: where no test decides: a fact, or that there is nothing to test.
    """

    arms: tuple[str, ...]
    seeds: int
    effect: float
    low: float
    high: float
    words: str
    p_for: float = math.nan
    p_against: float = math.nan
    outcome: str | None = None


Find = Callable[[Results], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim's id and source; the unit of the effect; the tests that it is counted with; what it takes."""

    id: str
    source: str
    unit: str
    family: str
    needs: str
    find: Find


CLAIMS: list[Claim] = []
"""Every claim that arms speak to, in the order of the report."""


def claim(id: str, source: str, *, unit: str, family: str, needs: str) -> Callable[[Find], Find]:
    """Lists the function that finds where a claim can be tested."""

    def add(find: Find) -> Find:
        CLAIMS.append(Claim(id, source, unit, family, needs, find))
        return find

    return add


def interval(mean: float, low: float, high: float, *, form: str = ".3g") -> str:
    return f"{mean:{form}}" + ("" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]")


def measured(
    arms: tuple[str, ...], measure: Difference, ends: Sequence[float], words: str, p_for: float = math.nan,
    p_against: float = math.nan,
) -> Finding:  # fmt: skip
    """A finding on the runs of a measure; that there is nothing to test where it has none."""
    effect, low, high = ends
    return Finding(arms, measure.n, effect, low, high, words, p_for, p_against) if measure.n else nothing(arms)


def opposite(finding: Finding) -> Finding:
    """The finding for the claim of the other direction: that what was tested to lie above lies below."""
    return replace(finding, p_for=finding.p_against, p_against=finding.p_for)


def nothing(arms: tuple[str, ...]) -> Finding:
    return Finding(arms, 0, math.nan, math.nan, math.nan, "no run recorded what it takes", outcome=UNTESTABLE)
