"""What neither paper answers."""

from functools import partial

from tailrl.report.statements.statement import ABLATION, Statement

_own = partial(Statement, "Open questions")

STATEMENTS = [
    _own(
        "1. Does DVP help at zero mismatch?",
        by=("DVP ends above naive with zero mismatch too", "DVP ends above naive where the samples are noisy alone"),
        figure="evaluation",
        command="make dvp_at_zero",
    ),
    _own(
        "2. Dose and response: scores and collapses against the size of a floor, with each remedy",
        by=(f"{ABLATION}disturbance…",),
        figure="floor",
        command="make dose_response",
    ),
    _own(
        "3. DVP taken apart: mask in the sampler, in the trainer, in both; veto",
        by=(f"{ABLATION}vocabulary.side", f"{ABLATION}correction…"),
        figure="side",
        command="make ablate_mask_side",
    ),
    _own(
        "4. Does ρ = e⁻¹³ bind at all?",
        by=("DVP's set at ρ = e⁻¹³ leaves out a token of one response in a hundred",),
        command="make dvp_at_zero",
    ),
    _own(
        "4. Does the score depend on ρ? (KL, kept mass and tokens outside: the figure)",
        by=(f"{ABLATION}vocabulary.rho",),
        figure="rho",
        command="make ablate_rho",
    ),
    _own(
        "5. Are Props 4.2 and 4.3 seen on real engines?",
        by=(
            "|Δ| stays below 2 ε_max (1 − p)",
            "Tail tokens are sampled with −Δ > 0, whole distributions",
            "|Δ| grows with 1 − p",
            "Sampled tail tokens have −Δ > 0",
        ),
        figure="distributions",
        command="snakemake --cores 1 distributions",
    ),
    _own(
        "6. A fair KL: is the unmasked one lower too, over the tokens that each arm samples?",
        by=("DVP lowers the unmasked k3 of what it samples, too",),
        figure="mismatch",
        command="make stress",
    ),
    _own(
        "7. Which metric warns first, and how often falsely?",
        by=("… announces a collapse…",),
        figure="early_warning",
        command="snakemake --cores 1 early_warning",
    ),
    _own(
        "8. Seeds: every figure with an interval, collapse times as survival curves",
        held_by="tests/unit/report/test_statistics.py",
    ),
    _own(
        "9. The price of masking and of each correction",
        by=("What pruning or weighting costs a step",),
        figure="time",
        command="make remedies",
        only="remedies",
    ),
    _own(
        "9. The price of determinism",
        by=("What zero mismatch costs a step",),
        figure="time",
        command="make reproduce",
        only="default",
    ),
]
