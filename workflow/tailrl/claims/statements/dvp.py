"""What the paper on Dynamic Vocabulary Pruning states, and what it leaves to others."""

from functools import partial

from tailrl.claims.finding import DVP
from tailrl.claims.statements.statement import Statement

_own = partial(Statement, f"Dynamic Vocabulary Pruning ({DVP})")

STRESS, GRADIENTS, WHOLE = "make stress", "make gradient_quality", "make distributions"

STATEMENTS = [
    _own(
        "statement.dvp.thm4_1",
        "Thm 4.1: naive policy gradients on the engine's samples are biased, E[(e^−Δ − 1) ∇log π R]",
        by=("dvp.thm4_1.bias",),
        figures=("gradient_quality",),
        command=GRADIENTS,
    ),
    _own(
        "statement.dvp.prop4_2",
        "Prop. 4.2: |Δ| ≤ 2 ε_max (1 − p) to first order in ε, so that the tail is the vulnerable part",
        by=("dvp.prop4_2.growth", "dvp.prop4_2.bound"),
        figures=("delta", "distributions"),
        command=WHOLE,
    ),
    _own(
        "statement.dvp.prop4_2.every_order",
        "Prop. 4.2 to every order: |Δ| ≤ log(p + (1 − p) e^{2ε})",
        held_by="tests/unit/objective/test_propositions.py",
    ),
    _own(
        "statement.dvp.prop4_3",
        "Prop. 4.3: of sampled tail tokens −Δ > 0, the signature of failure",
        by=("dvp.prop4_3.sign", "dvp.prop4_3.sign.whole"),
        figures=("delta", "distributions"),
        command=WHOLE,
    ),
    _own(
        "statement.dvp.prop4_3.size",
        "Prop. 4.3: its mode of −Δ, and the mean to second order, σ² [½ − 2p + (3/2) Σ p_k²]",
        by=("dvp.prop4_3.mode", "dvp.prop4_3.second_order"),
        figures=("distributions",),
        command=WHOLE,
    ),
    _own(
        "statement.dvp.safe_set",
        "Safe set: each engine computes V_S by itself; the sampler's V'_S has every token of the trainer's",
        by=("dvp.safe_set.nested",),
        figures=("distributions",),
        command=WHOLE,
    ),
    _own(
        "statement.dvp.constrained_policy",
        "Constrained policy: π on the safe set, renormalised by Z",
        held_by="tests/unit/objective/test_safe_set.py",
    ),
    _own(
        "statement.dvp.mask_value",
        "The −50 that the paper writes into masked logits: its gradient is not zero without a veto",
        held_by="tests/unit/objective/test_safe_set.py",
    ),
    _own(
        "statement.dvp.thm5_3",
        "Thm 5.3: the weighted gradient on the safe sets is unbiased for the constrained policy's, given V_S ⊆ V'_S",
        by=("dvp.thm5_3.unbiased",),
        figures=("gradient_quality",),
        command=GRADIENTS,
    ),
    _own(
        "statement.dvp.prop5_5",
        "Prop. 5.5: |J_mp − J| ≤ R_max T (1 − Z_min), and range(R) E[Σ (1 − Z_t)], which can be estimated",
        held_by="tests/unit/objective/test_theory.py",
    ),
    _own(
        "statement.dvp.prop5_5.size",
        "Prop. 5.5: its bound is below the range of the reward, so that it says something",
        by=("dvp.prop5_5.bound",),
        figures=("kept",),
        command="make reproduce",
    ),
    _own(
        "statement.dvp.rloo",
        "RLOO: A_i = R_i less the mean of the others, an unbiased estimator",
        by=("dvp.rloo.unbiased",),
        figures=("gradient_quality",),
        command=GRADIENTS,
    ),
    _own(
        "statement.dvp.veto",
        "Veto: a token ratio below 1e-4 discards the sequence, tokens outside the trainer's set among them",
        by=("dvp.veto.catches",),
        figures=("mismatch",),
        command=STRESS,
    ),
    _own(
        "statement.dvp.mis",
        "MIS: the weight e^Δ_y where it is at most C, else 0",
        by=("dvp.mis.variance", "dvp.mis.score"),
        figures=("gradient_quality",),
        command=GRADIENTS,
    ),
    _own(
        "statement.dvp.figure1",
        "Figure 1: naive's KL explodes, and naive collapses; DVP's does neither",
        by=("dvp.figure1.explosion", "dvp.figure1.collapse"),
        figures=("mismatch", "survival"),
        command=STRESS,
    ),
    _own(
        "statement.dvp.small_kl",
        "DVP's KL stays < 0.001",
        by=("dvp.small_kl",),
        figures=("mismatch",),
        command=STRESS,
    ),
    _own("statement.dvp.score", "DVP ends above naive", by=("dvp.score",), figures=("evaluation",), command=STRESS),
    _own(
        "statement.dvp.with_mis",
        "DVP + MIS ends above naive",
        by=("dvp.with_mis.score",),
        figures=("evaluation",),
        command=STRESS,
    ),
    _own(
        "statement.dvp.aime25",
        "By 26.55 % on AIME25",
        beyond="it takes a base model of billions of parameters, DAPO-Math and AIME25; the lines on DVP + MIS say "
        "whether their intervals hold 26.55, as points or relative",
        command="make figure1",
    ),
    _own(
        "statement.dvp.adaptive",
        "Future work: ρ that adapts to entropy or difficulty",
        by=("dvp.adaptive.score",),
        figures=("evaluation",),
        command="make ablate_adaptive_rho",
    ),
    _own(
        "statement.dvp.estimators",
        "Open there: PPO and GRPO (here: GRPO, and RLOO's advantages under PPO's clip; RLOO and REINFORCE beside them)",
        by=("dvp.score", "dvp.with_mis.score"),
        figures=("evaluation",),
        command="make ablate_estimator",
        only="ablate_estimator",
    ),
    _own(
        "statement.dvp.domains",
        "Open there: domains other than mathematics",
        by=("dvp.score", "across.lost_mass.*"),
        figures=("across", "evaluation"),
        command="make ablate_domain",
        only="ablate_domain_words",
    ),
    _own(
        "statement.dvp.dvp_or_mis",
        "Missing there: DVP against MIS",
        by=("open.dvp_or_mis.score", "dvp.mis.score"),
        figures=("evaluation",),
        command=STRESS,
    ),
]
