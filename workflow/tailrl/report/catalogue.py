"""Every statement of the two papers, and every question that they leave open, with the claims that speak to it.

A statement is decided by the lines of `claims.csv` files whose claim is one of `by`, whichever study they are from. One
that is a definition is held by tests; one that no run of this scale can decide says why; one that no run has spoken to
yet names the command that makes one.
"""

from tailrl.report.findings import DVP, VEXACT
from tailrl.report.statement import ABLATION, ACROSS, Statement

PAPER, REFERENCE, QUESTIONS = f"Dynamic Vocabulary Pruning ({DVP})", f"VeXact ({VEXACT})", "Open questions"

STRESS, COLLAPSE, REMEDIES, ISOLATED = "make stress", "make collapse", "make remedies", "make tim_isolated"
GRADIENTS, WHOLE = "make gradient_quality", "snakemake --cores 1 distributions"

HARM = (
    "Naive collapses under a mismatch but not without one",
    "Naive collapses by mismatch alone: as disturbed without one it does not",
    "Naive ends lower under a mismatch than without one",
    "Naive ends lower by mismatch alone: than as disturbed without one",
)
MIS_OR_DVP = ("DVP ends above MIS", "MIS alone ends above naive")
UNTRUNCATED = "On the safe sets the untruncated sequence weight is unbiased for the constrained policy's gradient"

STATEMENTS = [
    Statement(
        PAPER,
        "Thm 4.1: naive policy gradients on the engine's samples are biased, E[(e^−Δ − 1) ∇log π R]",
        DVP,
        ("Naive policy gradients are biased under mismatch, the more the larger it is",),
        "gradient_quality",
        GRADIENTS,
    ),
    Statement(
        PAPER,
        "Prop. 4.2: |Δ| ≤ 2 ε_max (1 − p), so that the tail is the vulnerable part",
        DVP,
        ("|Δ| grows with 1 − p", "|Δ| stays below 2 ε_max (1 − p)"),
        "delta",
        WHOLE,
    ),
    Statement(
        PAPER,
        "Prop. 4.3: of sampled tail tokens −Δ > 0, the signature of failure",
        DVP,
        ("Sampled tail tokens have −Δ > 0", "Tail tokens are sampled with −Δ > 0, whole distributions"),
        "delta",
        WHOLE,
    ),
    Statement(
        PAPER,
        "Safe set: each engine computes V_S by itself; the sampler's V'_S has every token of the trainer's",
        DVP,
        ("The sampler's safe set has every token of the trainer's",),
        "distributions",
        WHOLE,
    ),
    Statement(
        PAPER,
        "Constrained policy: π on the safe set, renormalised by Z",
        DVP,
        held_by="tests/unit/test_vocabulary.py",
    ),
    Statement(
        PAPER,
        "Thm 5.3: the weighted gradient on the safe sets is unbiased for the constrained policy's, given V_S ⊆ V'_S",
        DVP,
        (UNTRUNCATED,),
        "gradient_quality",
        GRADIENTS,
    ),
    Statement(
        PAPER,
        "Prop. 5.5: |J_mp − J| ≤ R_max T (1 − Z_min), a bound that says something",
        DVP,
        ("The measured bias bound is not empty",),
        "kept",
        "make reproduce",
        held_by="tests/unit/objective/test_propositions.py",
    ),
    Statement(
        PAPER,
        "RLOO: A_i = R_i less the mean of the others, an unbiased estimator",
        DVP,
        ("RLOO on all tokens is unbiased without mismatch",),
        "gradient_quality",
        GRADIENTS,
    ),
    Statement(
        PAPER,
        "Veto: a token ratio below 1e-4 discards the sequence, tokens outside the trainer's set among them",
        DVP,
        ("The veto acts in every step with a token outside the trainer's set",),
        "mismatch",
        STRESS,
        held_by="tests/unit/objective/test_corrections.py",
    ),
    Statement(
        PAPER,
        "MIS: the weight e^Δ_y where it is at most C, else 0",
        DVP,
        ("MIS trades the variance of importance sampling for a bias", "MIS alone ends above naive"),
        "gradient_quality",
        GRADIENTS,
    ),
    Statement(
        PAPER,
        "Figure 1: naive's KL explodes, and naive collapses; DVP's does not",
        DVP,
        ("Naive's KL explodes, DVP's does not",),
        "mismatch",
        STRESS,
    ),
    Statement(PAPER, "DVP's KL stays < 0.001", DVP, ("DVP keeps the masked KL below 0.001",), "mismatch", STRESS),
    Statement(PAPER, "DVP ends above naive", DVP, ("DVP ends above naive",), "evaluation", STRESS),
    Statement(
        PAPER,
        "DVP + MIS ends above naive",
        DVP,
        ("DVP + MIS ends above naive (by 26.55 %)",),
        "evaluation",
        STRESS,
    ),
    Statement(
        PAPER,
        "By 26.55 % on AIME25",
        DVP,
        beyond="it takes a base model of billions of parameters, DAPO-Math and AIME25",
    ),
    Statement(
        PAPER,
        "Future work: ρ that adapts to entropy or difficulty",
        DVP,
        ("An adaptive ρ ends above the fixed one",),
        command="make ablate_adaptive_rho",
    ),
    Statement(
        PAPER,
        "Open there: PPO and GRPO",
        DVP,
        ("DVP ends above naive", "DVP + MIS ends above naive (by 26.55 %)"),
        command="make ablate_estimator",
        only="ablate_estimator",
    ),
    Statement(
        PAPER,
        "Open there: domains other than mathematics",
        DVP,
        ("DVP ends above naive", f"{ACROSS}1 − Z…"),
        command="make ablate_domain",
        only="ablate_domain_words",
    ),
    Statement(PAPER, "Missing there: DVP against MIS", DVP, MIS_OR_DVP, "evaluation", STRESS),
    Statement(
        REFERENCE,
        "Zero-mismatch reference: the engine's log-probs are the trainer's, bit for bit",
        VEXACT,
        ("The exact engine's k3 is 0 at every step", "The exact engine's distributions are the trainer's, to the bit"),
        "distributions",
        WHOLE,
    ),
    Statement(
        REFERENCE,
        "Three ratios, K1, K3 and C(r) = −(r − 1) A",
        VEXACT,
        held_by="tests/unit/test_mismatch.py",
    ),
    Statement(
        REFERENCE, "(a) The mismatch alone makes training collapse; without it the run does not", VEXACT, HARM,
        "survival", COLLAPSE,
    ),
    Statement(
        REFERENCE,
        "(b) Recompute and bypass fail differently: K3 rises early under bypass and stays flat under recompute",
        VEXACT,
        ("K3 rises under bypass and not under recompute", "Under recompute the reward falls while K3 stays flat"),
        "mismatch",
        ISOLATED,
    ),
    Statement(
        REFERENCE,
        "(b) Under recompute the loss, weighted by advantages, is skewed by their sign",
        VEXACT,
        ("Under recompute C(r) is skewed by the sign of the advantage",),
        "mismatch",
        ISOLATED,
    ),
    Statement(
        REFERENCE,
        "(c) Remedies: token truncation, sequence rejection, and both, which is closest to zero mismatch",
        VEXACT,
        (
            "Token truncation (TIS) ends above naive",
            "Sequence rejection ends above naive",
            "Truncation with rejection ends above either alone",
        ),
        "evaluation",
        REMEDIES,
    ),
    Statement(
        REFERENCE, "(c) Rejection by K1 does as well as by K3", VEXACT, ("Rejection by K1 ends as rejection by K3",),
        "evaluation", "make ablate_reject",
    ),
    Statement(
        REFERENCE, "(c) Rejection by r_corr does better than by r_ppo", VEXACT,
        beyond="corrections here reject by r_corr alone; with one update a step, as in most studies, r_ppo is always 1",
    ),
    Statement(
        REFERENCE, "K3 from 1e-3 to 40, and the gradient norm from 2e-3 to 35, within 120 steps of a 30B model", VEXACT,
        beyond="it is one run of one large model; what both do here is in each study's figures",
    ),
    Statement(
        REFERENCE,
        "K3 leaves its plateau 30 to 50 steps before the reward drops",
        VEXACT,
        ("k3 leaves its level 30 to 50 steps before a collapse",),
        "early_warning",
        "snakemake --cores 1 early_warning",
    ),
    Statement(
        QUESTIONS,
        "1. Does DVP help at zero mismatch?",
        "",
        ("DVP ends above naive with zero mismatch too",),
        "evaluation",
        "make dvp_at_zero",
    ),
    Statement(
        QUESTIONS,
        "2. Dose and response: the harm against the size of the mismatch, for each remedy",
        "",
        (f"{ABLATION}disturbance…",),
        "floor",
        "make dose_response",
    ),
    Statement(
        QUESTIONS,
        "3. DVP taken apart: mask in the sampler, in the trainer, in both; veto",
        "",
        (f"{ABLATION}vocabulary.side", f"{ABLATION}correction…"),
        command="make ablate_mask_side",
    ),
    Statement(
        QUESTIONS,
        "4. Does ρ = e⁻¹³ bind at all?",
        "",
        ("DVP's set at ρ = e⁻¹³ leaves out a token of one response in a hundred",),
        command="make dvp_at_zero",
    ),
    Statement(
        QUESTIONS, "4. Does the score depend on ρ?", "", (f"{ABLATION}vocabulary.rho",), "rho", "make ablate_rho",
    ),
    Statement(
        QUESTIONS,
        "5. Are Props 4.2 and 4.3 seen on real engines?",
        "",
        (
            "|Δ| stays below 2 ε_max (1 − p)",
            "Tail tokens are sampled with −Δ > 0, whole distributions",
            "|Δ| grows with 1 − p",
            "Sampled tail tokens have −Δ > 0",
        ),
        "distributions",
        WHOLE,
    ),
    Statement(
        QUESTIONS, "6. A fair KL: is the unmasked one lower too, over the tokens that each arm samples?", "",
        ("DVP lowers the unmasked k3 of what it samples, too",), "mismatch", STRESS,
    ),
    Statement(
        QUESTIONS,
        "7. Which metric warns first, and how often falsely?",
        "",
        ("… announces a collapse…",),
        "early_warning",
        "snakemake --cores 1 early_warning",
    ),
    Statement(
        QUESTIONS,
        "8. Seeds: every figure with an interval, collapse times as survival curves",
        "",
        held_by="tests/unit/report/test_statistics.py",
    ),
    Statement(
        QUESTIONS,
        "9. The price of masking and of each correction",
        "",
        ("What pruning or weighting costs a step",),
        "time",
        REMEDIES,
        only="remedies",
    ),
    Statement(
        QUESTIONS,
        "9. The price of determinism",
        "",
        ("What zero mismatch costs a step",),
        "time",
        "make reproduce",
        only="default",
    ),
]  # fmt: skip
