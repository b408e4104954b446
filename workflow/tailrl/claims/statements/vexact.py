"""What the paper on VeXact states."""

from functools import partial

from tailrl.claims.finding import VEXACT
from tailrl.claims.statements.statement import WARNING, Statement

_own = partial(Statement, f"VeXact ({VEXACT})")

COLLAPSE, REMEDIES, ISOLATED = "make collapse", "make remedies", "make tim_isolated"

STATEMENTS = [
    _own(
        "Zero-mismatch reference: the engine's log-probs are the trainer's, bit for bit",
        by=(
            "The exact engine's k3 is 0 at every step",
            "The exact engine's distributions are the trainer's, to the bit",
        ),
        figures=("distributions",),
        command="make distributions",
    ),
    _own("Three ratios, K1, K3 and C(r) = −(r − 1) A", held_by="tests/unit/objective/test_diagnostics.py"),
    _own(
        "(a) The mismatch alone makes training collapse; without it the run does not",
        by=(
            "Naive collapses sooner under a mismatch than without one",
            "Naive collapses sooner by mismatch alone: than as disturbed without one",
        ),
        figures=("survival",),
        command=COLLAPSE,
    ),
    _own(
        "(a) The same in scores: a mismatch makes naive end lower",
        by=(
            "Naive ends lower under a mismatch than without one",
            "Naive ends lower by mismatch alone: than as disturbed without one",
        ),
        figures=("evaluation",),
        command=COLLAPSE,
    ),
    _own(
        "(a) That tiny differences between the engines are enough for it",
        beyond="a small policy's few tokens are not the thousands of a large one's response; what the engines' own "
        "mismatch does at this scale is said by the lines above whose dose is undisturbed",
        command=ISOLATED,
    ),
    _own(
        "(b) Recompute and bypass fail differently: K1 and K3 rise early under bypass (here: rise more over a run), "
        "under recompute the reward falls while they stay flat (here: K3)",
        by=(
            "K3 grows more under bypass than under recompute",
            "K1 grows more under bypass than under recompute",
            "Under recompute the reward falls while K3 stays flat",
        ),
        figures=("mismatch",),
        command=ISOLATED,
    ),
    _own(
        "(b) Under recompute the loss, weighted by advantages, is skewed by their sign",
        by=("Under recompute C(r) is skewed by the sign of the advantage",),
        figures=("mismatch",),
        command=ISOLATED,
    ),
    _own(
        "(c) Remedies: token truncation, sequence rejection, and both, which comes closest to zero mismatch (here: "
        "which ends highest)",
        by=(
            "Token truncation (TIS) ends above naive",
            "Sequence rejection ends above naive",
            "Truncation with rejection ends above either alone",
        ),
        figures=("evaluation",),
        command=REMEDIES,
    ),
    _own(
        "(c) Rejection by K1 does as well as by K3",
        by=("Rejection by K1 ends as rejection by K3",),
        figures=("evaluation",),
        command="make ablate_reject",
    ),
    _own(
        "(c) Rejection by r_corr does better than by r_ppo",
        by=("Rejection by r_corr ends above rejection by r_ppo",),
        figures=("evaluation",),
        command="make ablate_reject",
    ),
    _own(
        "K3 from 1e-3 to 40, the gradient norm from 2e-3 to 35 and the score gone, within 120 steps of a 30B model",
        beyond="it is one run of one large model; what all three do in runs that collapse here is in the figures that "
        "this makes",
        command=COLLAPSE,
    ),
    _own(
        "K3 leaves its plateau 30 to 50 steps before the reward drops (here: to half of its best)",
        by=("k3 announces a collapse 30 to 50 steps before",),
        figures=("early_warning",),
        command=WARNING,
    ),
]
