"""What neither paper answers, and what neither varies."""

from functools import partial

from tailrl.claims.statements.statement import WARNING, Statement

_own = partial(Statement, "Open questions")
_further = partial(Statement, "What neither paper varies")


def _ablated(field: str) -> tuple[str, str]:
    return f"ablation.{field}.score", f"ablation.{field}.steps_before_collapse"


STATEMENTS = [
    _own(
        "question.1",
        "1. Does DVP help at zero mismatch?",
        by=("open.zero_mismatch.score", "open.matched_noise.score"),
        figures=("evaluation",),
        command="make dvp_at_zero",
    ),
    _own(
        "question.2",
        "2. Dose and response: scores and steps before a collapse against the size of a floor, of naive, token TIS, "
        "MIS and DVP (no other remedy, nor another cause)",
        by=("ablation.disturbance.*",),
        figures=("floor",),
        command="make dose_response",
    ),
    _own(
        "question.3",
        "3. DVP taken apart: mask in the sampler, in the trainer, in both; veto",
        by=(*_ablated("vocabulary.side"), "ablation.vocabulary.side.as_good", "ablation.correction.*"),
        figures=("side",),
        command="make ablate_mask_side",
    ),
    _own(
        "question.4.binds",
        "4. Does ρ = e⁻¹³ bind at all, where no floor lifts the tail above it?",
        by=("open.rho.binds",),
        figures=("kept",),
        command="make dvp_at_zero",
    ),
    _own(
        "question.4.score",
        "4. Does the score depend on ρ? (KL, kept mass and sampled tokens that it prunes: the figure)",
        by=_ablated("vocabulary.rho"),
        figures=("rho",),
        command="make ablate_rho",
    ),
    _own(
        "question.5",
        "5. Are Props 4.2 and 4.3 seen on real engines?",
        by=("dvp.prop4_2.bound", "dvp.prop4_3.sign.whole", "dvp.prop4_2.growth", "dvp.prop4_3.sign"),
        figures=("distributions",),
        command="make distributions",
    ),
    _own(
        "question.6",
        "6. A fair KL: is the unmasked one lower too, over the tokens that each arm samples?",
        by=("open.fair_kl",),
        figures=("mismatch",),
        command="make stress",
    ),
    _own(
        "question.7",
        "7. Which metric warns first, and how often falsely?",
        by=("warning.*.collapse*", "warning.*.before_reward"),
        figures=("early_warning",),
        command=WARNING,
    ),
    _own(
        "question.8",
        "8. Seeds: every score with an interval, every curve with the range of its seeds, collapses as survival curves",
        held_by="tests/unit/report/test_figures.py",
    ),
    _own(
        "question.9.price",
        "9. The price of masking and of each correction",
        by=("price.remedies",),
        figures=("time",),
        command="make remedies",
        only="remedies",
    ),
    _own(
        "question.9.determinism",
        "9. The price of determinism",
        by=("price.zero_mismatch",),
        figures=("time",),
        command="make reproduce",
        only="default",
    ),
    _further(
        "question.optimizer",
        "The optimizer: the score with AdamW and with SGD, and how far MIS ends from naive",
        by=(*_ablated("training.optimizer"), "ablation.training.optimizer.contrast"),
        figures=("optimizer",),
        command="make ablate_optimizer",
    ),
    _further(
        "question.loss_mean",
        "The loss as a mean over all responses, or over those that the weights keep",
        by=_ablated("training.loss_mean"),
        figures=("loss_mean",),
        command="make ablate_optimizer",
    ),
    _further(
        "question.temperature",
        "The sampling temperature: the score, and how far the mismatch takes it down",
        by=(*_ablated("training.temperature"), "ablation.training.temperature.contrast"),
        figures=("temperature",),
        command="make ablate_temperature",
    ),
    _further(
        "question.dtype",
        "The engine's number format",
        by=_ablated("sampler.dtype"),
        figures=("dtype",),
        command="make ablate_engine",
    ),
    _further(
        "question.length",
        "The length of a response: what adds up over its tokens",
        by=("across.*",),
        figures=("across",),
        command="make ablate_length",
        only="ablate_length",
    ),
]
