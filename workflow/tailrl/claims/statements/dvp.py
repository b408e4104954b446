"""What the paper on Dynamic Vocabulary Pruning states, and what it leaves to others."""

from functools import partial

from tailrl.claims.finding import DVP
from tailrl.claims.statements.statement import ACROSS, Statement

_own = partial(Statement, f"Dynamic Vocabulary Pruning ({DVP})")

STRESS, GRADIENTS, WHOLE = "make stress", "make gradient_quality", "make distributions"

STATEMENTS = [
    _own(
        "Thm 4.1: naive policy gradients on the engine's samples are biased, E[(e^−Δ − 1) ∇log π R]",
        by=("Naive policy gradients are biased under mismatch, the more the larger it is",),
        figures=("gradient_quality",),
        command=GRADIENTS,
    ),
    _own(
        "Prop. 4.2: |Δ| ≤ 2 ε_max (1 − p) to first order in ε, so that the tail is the vulnerable part",
        by=("|Δ| grows with 1 − p", "|Δ| stays below 2 ε_max (1 − p)"),
        figures=("delta", "distributions"),
        command=WHOLE,
    ),
    _own(
        "Prop. 4.2 to every order: |Δ| ≤ log(p + (1 − p) e^{2ε})", held_by="tests/unit/objective/test_propositions.py"
    ),
    _own(
        "Prop. 4.3: of sampled tail tokens −Δ > 0, the signature of failure",
        by=("Sampled tail tokens have −Δ > 0", "Tail tokens are sampled with −Δ > 0, whole distributions"),
        figures=("delta", "distributions"),
        command=WHOLE,
    ),
    _own(
        "Prop. 4.3: its mode of −Δ, and the mean to second order, σ² [½ − 2p + (3/2) Σ p_k²]",
        by=(
            "The tail's mean −Δ is the mode of Prop. 4.3",
            "The tail's mean −Δ is what iid noise gives to second order",
        ),
        figures=("distributions",),
        command=WHOLE,
    ),
    _own(
        "Safe set: each engine computes V_S by itself; the sampler's V'_S has every token of the trainer's",
        by=("The sampler's safe set has every token of the trainer's",),
        figures=("distributions",),
        command=WHOLE,
    ),
    _own("Constrained policy: π on the safe set, renormalised by Z", held_by="tests/unit/objective/test_safe_set.py"),
    _own(
        "The −50 that the paper writes into masked logits: its gradient is not zero without a veto",
        held_by="tests/unit/objective/test_safe_set.py",
    ),
    _own(
        "Thm 5.3: the weighted gradient on the safe sets is unbiased for the constrained policy's, given V_S ⊆ V'_S",
        by=("On the safe sets the untruncated sequence weight is unbiased for the constrained policy's gradient",),
        figures=("gradient_quality",),
        command=GRADIENTS,
    ),
    _own(
        "Prop. 5.5: |J_mp − J| ≤ R_max T (1 − Z_min), and range(R) E[Σ (1 − Z_t)], which can be estimated",
        held_by="tests/unit/objective/test_theory.py",
    ),
    _own(
        "Prop. 5.5: its bound is below the range of the reward, so that it says something",
        by=("The measured bias bound is not empty",),
        figures=("kept",),
        command="make reproduce",
    ),
    _own(
        "RLOO: A_i = R_i less the mean of the others, an unbiased estimator",
        by=("RLOO on all tokens is unbiased without mismatch",),
        figures=("gradient_quality",),
        command=GRADIENTS,
    ),
    _own(
        "Veto: a token ratio below 1e-4 discards the sequence, tokens outside the trainer's set among them",
        by=("The veto acts in every step with a token outside the trainer's set",),
        figures=("mismatch",),
        command=STRESS,
    ),
    _own(
        "MIS: the weight e^Δ_y where it is at most C, else 0",
        by=("MIS trades the variance of importance sampling for a bias", "MIS alone ends above naive"),
        figures=("gradient_quality",),
        command=GRADIENTS,
    ),
    _own(
        "Figure 1: naive's KL explodes, and naive collapses; DVP's does neither",
        by=("Naive's KL explodes, DVP's does not", "Naive collapses sooner than DVP"),
        figures=("mismatch", "survival"),
        command=STRESS,
    ),
    _own(
        "DVP's KL stays < 0.001",
        by=("DVP keeps the masked KL below 0.001 on average over runs",),
        figures=("mismatch",),
        command=STRESS,
    ),
    _own("DVP ends above naive", by=("DVP ends above naive",), figures=("evaluation",), command=STRESS),
    _own(
        "DVP + MIS ends above naive",
        by=("DVP + MIS ends above naive",),
        figures=("evaluation",),
        command=STRESS,
    ),
    _own(
        "By 26.55 % on AIME25",
        beyond="it takes a base model of billions of parameters, DAPO-Math and AIME25; the lines on DVP + MIS say "
        "whether their intervals hold 26.55, as points or relative",
        command="make figure1",
    ),
    _own(
        "Future work: ρ that adapts to entropy or difficulty",
        by=("An adaptive ρ ends above the fixed one",),
        figures=("evaluation",),
        command="make ablate_adaptive_rho",
    ),
    _own(
        "Open there: PPO and GRPO (here: GRPO, and RLOO's advantages under PPO's clip; RLOO and REINFORCE beside them)",
        by=("DVP ends above naive", "DVP + MIS ends above naive"),
        figures=("evaluation",),
        command="make ablate_estimator",
        only="ablate_estimator",
    ),
    _own(
        "Open there: domains other than mathematics",
        by=("DVP ends above naive", f"{ACROSS}1 − Z…"),
        figures=("across", "evaluation"),
        command="make ablate_domain",
        only="ablate_domain_words",
    ),
    _own(
        "Missing there: DVP against MIS",
        by=("DVP ends above MIS", "MIS alone ends above naive"),
        figures=("evaluation",),
        command=STRESS,
    ),
]
