"""What curves say: the first line, the rules, and the pages."""

import json
from pathlib import Path

import numpy as np
import pytest

from tailrl.cli.command_line import run as run_command
from tailrl.curves.history import Curve, History
from tailrl.curves.page import answer, curves_data, curves_html, curves_text, since
from tailrl.curves.reading import RunReading, read_curves, sizes
from tailrl.runtime.errors import StudyError

STEPS = np.arange(100.0)


def history(**values: object) -> History:
    curves = [
        Curve("", name, STEPS, np.broadcast_to(np.asarray(value, float), STEPS.shape)) for name, value in values.items()
    ]
    return History("metrics.jsonl", "metrics as JSON lines", tuple(curves), {})


def reading_of(values: dict[str, object]) -> RunReading:
    [run] = read_curves(history(**values)).runs
    return run


@pytest.mark.parametrize(
    ("k3", "title"),
    [
        (1e-9, "as good as none"),
        (1.7e-5, "rounding"),
        (0.0019, "rounding"),
        (0.0046, "coarse"),
        (0.11, "larger"),
        (1.7, "large"),
    ],
)
def test_a_size_has_its_band(k3: float, title: str) -> None:
    words = answer(reading_of({"rollout_corr/k3_kl": k3}))
    assert words.startswith(f"rollout_corr/k3_kl is {k3:.2g}: ")
    assert title in words


def test_another_quantity_is_turned_into_a_k3_roughly() -> None:
    # Δ of one size: k3 = e^Δ − 1 − Δ is Δ²/2 to its first order, so mean |Δ|² is at most twice it.
    run = reading_of({"sampling/sampling_logp_difference/mean": 0.011})
    assert run.main.k3 == pytest.approx(0.011**2)
    assert "roughly a k3 of 0.00012" in answer(run)


def test_the_best_metric_speaks_and_the_others_are_listed() -> None:
    run = reading_of({"training/rollout_probs_diff_mean": 0.02, "rollout_corr/k3_kl": 1e-3, "rollout_corr/kl": -0.2})
    assert run.main.metric.name == "rollout_corr/k3_kl"
    broken = {one.metric.name: [rule.holds for rule in one.rules] for one in run.others}
    assert broken == {"training/rollout_probs_diff_mean": [False, False], "rollout_corr/kl": [False]}


def test_a_probability_is_judged_by_its_framework_alone() -> None:
    run = reading_of({"training/rollout_probs_diff_mean": 0.004})
    assert run.band is None
    assert "within normal is at most 0.005 (verl's rule)" in answer(run)


def test_growth_at_learning_rate_0_is_the_engines_own() -> None:
    grown = 1e-3 * (1 + STEPS)
    assert reading_of({"rollout_corr/k3_kl": grown, "actor/lr": 0.0}).shape == "growth_without_updates"
    warm_up = np.where(STEPS < 3, 0.0, 1e-6)
    assert reading_of({"rollout_corr/k3_kl": grown, "actor/lr": warm_up}).shape == "growth"


def test_a_jump_at_a_restart_says_so() -> None:
    jump = np.where(STEPS < 60, 1e-3, 1e-2)
    told = History("m", "metrics", (Curve("", "rollout_corr/k3_kl", STEPS, jump),), {"": (60.0,)})
    [run] = read_curves(told).runs
    assert since(run) == "At step 60, by a factor of 10. The log goes back at step 60: the run was started again there."


def test_steps_without_a_number_are_counted() -> None:
    values = np.where(STEPS == 7, np.nan, 1e-3)
    assert since(reading_of({"rollout_corr/k3_kl": values})) == "At 1 step the value is NaN or infinite."


def test_a_history_without_the_mismatch_says_what_it_has() -> None:
    with pytest.raises(StudyError, match="without a metric of the mismatch: it has loss; known are training"):
        read_curves(history(loss=1.0))


def test_the_page_is_whole_and_escaped() -> None:
    name = "<script>alert(1)</script>"
    told = History("m.csv", "a W&B export", (Curve(name, "rollout_corr/k3_kl", STEPS, 1e-3 * (1 + STEPS)),), {})
    page = curves_html(read_curves(told))
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert 'class="curve" d="M' in page
    assert sum(row.source in page for row in sizes().normal if row.of == "k3") >= 10
    data = curves_data(read_curves(told))
    assert json.loads(json.dumps(data, allow_nan=False))["runs"][0]["shape"] == "growth"
    assert "my k3 is x" in page.lower()


def test_twenty_normal_values_have_a_model_an_engine_a_format_and_a_source() -> None:
    rows = sizes().normal
    assert len({row.source for row in rows}) >= 12 and len(rows) >= 20
    assert all(row.model and row.engines and row.format and row.value and row.source for row in rows)
    assert [band.below for band in sizes().bands] == sorted(band.below for band in sizes().bands)


def test_long_curves_are_drawn_by_their_extremes() -> None:
    steps = np.arange(50_000.0)
    values = np.full(len(steps), 1e-3)
    values[31_234] = 5.0
    told = History("m", "metrics", (Curve("", "rollout_corr/k3_kl", steps, values),), {})
    assert len(curves_html(read_curves(told))) < 60_000
    assert "1 spike, at step 31234." in curves_text(read_curves(told))


def test_the_command_reads_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "m.jsonl", tmp_path / "page.html"
    file.write_text("".join(json.dumps({"step": n, "rollout_corr/k3_kl": 1e-3}) + "\n" for n in range(30)), "utf-8")
    monkeypatch.setattr("sys.argv", ["tailrl", "diagnose", str(file), "--out", str(page)])
    run_command()
    assert capsys.readouterr().out.startswith("**rollout_corr/k3_kl is 0.001: the size of rounding in 16 bits.")
    assert page.read_text(encoding="utf-8").count("<svg") == 1
