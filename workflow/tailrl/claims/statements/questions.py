"""What neither paper answers, and what neither varies."""

from functools import partial

from tailrl.claims.statements.statement import ABLATION, ACROSS, AS_GOOD, LASTS, WARNING, Statement

_own = partial(Statement, "Open questions")
_further = partial(Statement, "What neither paper varies")


def _ablated(field: str) -> tuple[str, str]:
    return f"{ABLATION}{field}", f"{ABLATION}{field}{LASTS}"


STATEMENTS = [
    _own(
        "1. Does DVP help at zero mismatch?",
        by=("DVP ends above naive with zero mismatch too", "DVP ends above naive where the samples are noisy alone"),
        figures=("evaluation",),
        command="make dvp_at_zero",
    ),
    _own(
        "2. Dose and response: scores and steps before a collapse against the size of a floor, of naive, token TIS, "
        "MIS and DVP (no other remedy, nor another cause)",
        by=(f"{ABLATION}disturbance…",),
        figures=("floor",),
        command="make dose_response",
    ),
    _own(
        "3. DVP taken apart: mask in the sampler, in the trainer, in both; veto",
        by=(*_ablated("vocabulary.side"), f"{ABLATION}vocabulary.side{AS_GOOD}", f"{ABLATION}correction…"),
        figures=("side",),
        command="make ablate_mask_side",
    ),
    _own(
        "4. Does ρ = e⁻¹³ bind at all, where no floor lifts the tail above it?",
        by=("DVP's set at ρ = e⁻¹³ leaves out a token of one response in a hundred",),
        figures=("kept",),
        command="make dvp_at_zero",
    ),
    _own(
        "4. Does the score depend on ρ? (KL, kept mass and sampled tokens that it prunes: the figure)",
        by=_ablated("vocabulary.rho"),
        figures=("rho",),
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
        figures=("distributions",),
        command="make distributions",
    ),
    _own(
        "6. A fair KL: is the unmasked one lower too, over the tokens that each arm samples?",
        by=("DVP lowers the unmasked k3 of what it samples, too",),
        figures=("mismatch",),
        command="make stress",
    ),
    _own(
        "7. Which metric warns first, and how often falsely?",
        by=("… announces a collapse…", "… warns before the falling reward does"),
        figures=("early_warning",),
        command=WARNING,
    ),
    _own(
        "8. Seeds: every score with an interval, every curve with the range of its seeds, collapses as survival curves",
        held_by="tests/unit/report/test_figures.py",
    ),
    _own(
        "9. The price of masking and of each correction",
        by=("What pruning or weighting costs a step",),
        figures=("time",),
        command="make remedies",
        only="remedies",
    ),
    _own(
        "9. The price of determinism",
        by=("What zero mismatch costs a step",),
        figures=("time",),
        command="make reproduce",
        only="default",
    ),
    _further(
        "The optimizer: the score with AdamW and with SGD, and how far MIS ends from naive",
        by=(*_ablated("training.optimizer"), f"{ABLATION}training.optimizer on…"),
        figures=("optimizer",),
        command="make ablate_optimizer",
    ),
    _further(
        "The loss as a mean over all responses, or over those that the weights keep",
        by=_ablated("training.loss_mean"),
        figures=("loss_mean",),
        command="make ablate_optimizer",
    ),
    _further(
        "The sampling temperature: the score, and how far the mismatch takes it down",
        by=(*_ablated("training.temperature"), f"{ABLATION}training.temperature on…"),
        figures=("temperature",),
        command="make ablate_temperature",
    ),
    _further(
        "The engine's number format",
        by=_ablated("sampler.dtype"),
        figures=("dtype",),
        command="make ablate_engine",
    ),
    _further(
        "The length of a response: what adds up over its tokens",
        by=(f"{ACROSS}…",),
        figures=("across",),
        command="make ablate_length",
        only="ablate_length",
    ),
]
