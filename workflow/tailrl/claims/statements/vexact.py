"""What the paper on VeXact states."""

from functools import partial

from tailrl.claims.finding import VEXACT
from tailrl.claims.statements.statement import WARNING, Statement

_own = partial(Statement, f"VeXact ({VEXACT})")

COLLAPSE, REMEDIES, ISOLATED = "make collapse", "make remedies", "make tim_isolated"

STATEMENTS = [
    _own(
        "statement.vexact.zero_mismatch",
        "Zero-mismatch reference: the engine's log-probs are the trainer's, bit for bit",
        by=("vexact.zero_mismatch.k3", "vexact.zero_mismatch.distributions"),
        figures=("distributions",),
        command="make distributions",
    ),
    _own(
        "statement.vexact.ratios",
        "Three ratios, K1, K3 and C(r) = −(r − 1) A",
        held_by="tests/unit/objective/test_diagnostics.py",
    ),
    _own(
        "statement.vexact.a",
        "(a) The mismatch alone makes training collapse; without it the run does not",
        by=("vexact.a.collapse", "vexact.a.collapse.matched"),
        figures=("survival",),
        command=COLLAPSE,
    ),
    _own(
        "statement.vexact.a.score",
        "(a) The same in scores: a mismatch makes naive end lower",
        by=("vexact.a.score", "vexact.a.score.matched"),
        figures=("evaluation",),
        command=COLLAPSE,
    ),
    _own(
        "statement.vexact.a.tiny",
        "(a) That tiny differences between the engines are enough for it",
        beyond="a small policy's few tokens are not the thousands of a large one's response; what the engines' own "
        "mismatch does at this scale is said by the lines above whose dose is undisturbed",
        command=ISOLATED,
    ),
    _own(
        "statement.vexact.b",
        "(b) Recompute and bypass fail differently: K1 and K3 rise early under bypass (here: rise more over a run), "
        "under recompute the reward falls while they stay flat (here: K3)",
        by=("vexact.b.k3", "vexact.b.k1", "vexact.b.reward"),
        figures=("mismatch",),
        command=ISOLATED,
    ),
    _own(
        "statement.vexact.b.skew",
        "(b) Under recompute the loss, weighted by advantages, is skewed by their sign",
        by=("vexact.b.skew",),
        figures=("mismatch",),
        command=ISOLATED,
    ),
    _own(
        "statement.vexact.c",
        "(c) Remedies: token truncation, sequence rejection, and both, which comes closest to zero mismatch (here: "
        "which ends highest)",
        by=("vexact.c.tis", "vexact.c.rejection", "vexact.c.both"),
        figures=("evaluation",),
        command=REMEDIES,
    ),
    _own(
        "statement.vexact.c.k1_or_k3",
        "(c) Rejection by K1 does as well as by K3",
        by=("vexact.c.k1_or_k3",),
        figures=("evaluation",),
        command="make ablate_reject",
    ),
    _own(
        "statement.vexact.c.r_corr",
        "(c) Rejection by r_corr does better than by r_ppo",
        by=("vexact.c.r_corr",),
        figures=("evaluation",),
        command="make ablate_reject",
    ),
    _own(
        "statement.vexact.large_run",
        "K3 from 1e-3 to 40, the gradient norm from 2e-3 to 35 and the score gone, within 120 steps of a 30B model",
        beyond="it is one run of one large model; what all three do in runs that collapse here is in the figures that "
        "this makes",
        command=COLLAPSE,
    ),
    _own(
        "statement.vexact.plateau",
        "K3 leaves its plateau 30 to 50 steps before the reward drops (here: to half of its best)",
        by=("warning.k3.collapse.lead",),
        figures=("early_warning",),
        command=WARNING,
    ),
]
