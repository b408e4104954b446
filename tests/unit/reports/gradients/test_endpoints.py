"""The claims about exact gradients: each outcome, from synthetic numbers."""

import math
from typing import Any

import pytest

from tailrl.claims.finding import ASIDE, CONTRADICTED, NOT_SEEN, REPRODUCED, UNTESTABLE
from tailrl.config.arm import Arm
from tailrl.reports.gradients.endpoints import BIASED, CONSTRAINED, TRADED, UNBIASED, judge_gradients
from tailrl.reports.gradients.numbers import Range, Summary

ARMS = {
    "plain": {},
    "grpo": {"estimator": "grpo"},
    "safe_is": {"vocabulary": {"rule": "min_p", "rho": "e-5"}, "correction": {"sequence": "is"}},
    "is": {"correction": {"sequence": "is"}},
    "mis": {"correction": {"sequence": "mis"}},
}
SETTINGS = {name: Arm.model_validate(arm) for name, arm in ARMS.items()}
ZERO = 1e-15


def summary(
    arm: str, mismatch: str, dose: float, bias: float, constrained: float, deviation: float = 1.0,
    nested: tuple[int, float] | None = None,
) -> Summary:  # fmt: skip
    """Values of models that lie a fifth apart on either side; the sets are nested in all of them, or in so many."""

    def around(value: float) -> Range:
        return Range(value, 0.8 * value, 1.2 * value)

    one = around(1.0)
    biases = around(bias), around(constrained)
    kept = nested or (12, biases[1].high)
    return Summary(
        mismatch, dose, arm, 12, 0, *kept, 0.01, one, *biases, one, one, one, one, around(deviation), one, one
    )


def gradients(**biases: tuple[float, float, float]) -> list[Summary]:
    """Of each arm: the bias without mismatch, and at two doses of noise."""
    doses = (("none", 0.0), ("noise", 0.1), ("noise", 1.0))
    spread = {"is": 3.0}
    return [
        summary(arm, *dose, bias, bias, spread.get(arm, 1.0))
        for arm, own in biases.items()
        for dose, bias in zip(doses, own, strict=True)
    ]


def outcomes(claim: str, **biases: tuple[float, float, float]) -> list[str]:
    return [line.verdict for line in judge_gradients(gradients(**biases), SETTINGS) if line.id == claim]


@pytest.mark.parametrize(
    ("claim", "biases", "expected"),
    [
        (UNBIASED, {"plain": (ZERO, 0.1, 1.0)}, [REPRODUCED]),
        (UNBIASED, {"plain": (1e-6, 0.1, 1.0)}, [CONTRADICTED]),
        (BIASED, {"plain": (ZERO, 0.1, 1.0)}, [REPRODUCED]),
        (BIASED, {"plain": (ZERO, 0.1, 0.05)}, [CONTRADICTED]),  # it does not grow
        (BIASED, {"plain": (ZERO, ZERO, 0.1)}, [CONTRADICTED]),
        (CONSTRAINED, {"safe_is": (ZERO, ZERO, ZERO)}, [REPRODUCED, REPRODUCED]),
        (CONSTRAINED, {"safe_is": (ZERO, ZERO, 0.1)}, [REPRODUCED, CONTRADICTED]),
        (TRADED, {"is": (ZERO, ZERO, ZERO), "mis": (ZERO, 0.1, 0.5)}, [REPRODUCED]),
        (TRADED, {"is": (ZERO, ZERO, ZERO), "mis": (ZERO, ZERO, ZERO)}, [NOT_SEEN]),
        (BIASED, {"grpo": (ZERO, 0.1, 1.0)}, []),  # another estimator
    ],
)
def test_exact_gradients(claim: str, biases: dict[str, Any], expected: list[str]) -> None:
    assert outcomes(claim, **biases) == expected


def test_a_flat_objective_says_nothing_of_the_theorem() -> None:
    lines = [summary("safe_is", "none", 0.0, ZERO, math.nan, nested=(12, math.nan))]
    (line,) = [line for line in judge_gradients(lines, SETTINGS) if line.id == CONSTRAINED]
    assert (line.verdict, line.seen) == (UNTESTABLE, "J_mp is flat in every model")


@pytest.mark.parametrize(
    ("nested", "verdict", "seen"),
    [
        (
            (5, ZERO),
            ASIDE,
            "in models where V_S ⊄ V'_S; of 1.2e-15 at most in those where it holds, 5 to 12 of 12 models by the dose",
        ),
        ((0, math.nan), ASIDE, "bias against ∇J_mp of up to 0.12 |∇J_mp| in models where V_S ⊄ V'_S"),
        ((5, 0.01), CONTRADICTED, "bias against ∇J_mp of up to 0.12 |∇J_mp|"),
    ],
)
def test_a_theorem_is_set_aside_if_its_premise_fails(nested: tuple[int, float], verdict: str, seen: str) -> None:
    lines = [
        summary("safe_is", "none", 0.0, ZERO, ZERO),
        summary("safe_is", "noise", 0.1, ZERO, ZERO),
        summary("safe_is", "noise", 1.0, 0.1, 0.1, nested=nested),
    ]
    own = [line for line in judge_gradients(lines, SETTINGS) if line.id == CONSTRAINED]
    assert [line.verdict for line in own] == [REPRODUCED, verdict]
    assert seen in own[1].seen and "nan" not in own[1].seen


def test_lines_have_their_scope() -> None:
    lines = judge_gradients(gradients(plain=(ZERO, 0.1, 1.0)), SETTINGS)
    (line,) = [line for line in lines if line.id == BIASED]
    assert (line.arms, line.seeds, line.effect) == ("plain", 12, 1.0)
    assert line.dose == "noise σ on every logit (nats)"
    assert line.seen == "its bias is 0.1 at 0.1 to 1 at 1 |∇J|, above rounding in all 12 models at every dose"


def test_at_equal_k3_a_dose_is_no_dose_of_its_kind() -> None:
    lines = judge_gradients(gradients(plain=(ZERO, 0.1, 1.0)), SETTINGS, equal=True)
    assert any("k3 per token (nats)" in line.dose for line in lines)
    assert not any("k3" in line.dose for line in judge_gradients(gradients(plain=(ZERO, 0.1, 1.0)), SETTINGS))
