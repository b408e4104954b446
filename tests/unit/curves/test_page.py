"""What curves say: the first line, the rules, and the pages."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tailrl.cli.command_line import run as run_command
from tailrl.curves.history import Curve, History
from tailrl.curves.page import answer, curves_html, curves_record, curves_text, since
from tailrl.curves.reading import RunReading, read_curves
from tailrl.diagnosis.record import as_json
from tailrl.diagnosis.sizes import sizes
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
    ("k3", "level", "title"),
    [
        (1e-9, "Not bad", "as good as none (below 1e-07)"),
        (1.7e-5, "Not bad", "the size of rounding in 16 bits (below 0.002)"),
        (0.0019, "Not bad", "the size of rounding in 16 bits (below 0.002)"),
        (0.0046, "Bad, unless weights or caches have few bits", "the size of coarse number formats (0.002 to 0.03)"),
        (0.11, "Bad", "larger than number formats alone usually give (0.03 to 0.2)"),
        (1.7, "Bad", "large (from 0.2 on)"),
    ],
)
def test_a_size_is_bad_or_not_by_its_band(k3: float, level: str, title: str) -> None:
    words = answer(reading_of({"rollout_corr/k3_kl": k3}))
    assert words.startswith(f"{level}: rollout_corr/k3_kl is {k3:.2g}, {title}.")


def test_another_quantity_is_turned_into_a_k3_roughly() -> None:
    # Δ of one size: k3 = e^Δ − 1 − Δ is Δ²/2 to its first order, so mean |Δ|² is at most twice it.
    run = reading_of({"sampling/sampling_logp_difference/mean": 0.011})
    assert run.main.k3 == pytest.approx(0.011**2)
    assert "roughly a k3 of 0.00012" in answer(run)


def test_the_best_metric_speaks_and_the_others_are_listed() -> None:
    run = reading_of({"training/rollout_probs_diff_mean": 0.02, "rollout_corr/k3_kl": 1e-3, "rollout_corr/kl": -0.2})
    assert run.main.metric.name == "rollout_corr/k3_kl"
    broken = {one.metric.name: [holds for _, holds in one.rules] for one in run.others}
    assert broken == {"training/rollout_probs_diff_mean": [False, False], "rollout_corr/kl": [False]}


def test_a_probability_is_judged_by_its_framework_alone() -> None:
    run = reading_of({"training/rollout_probs_diff_mean": 0.004})
    assert run.band is None
    assert answer(run).startswith("Not bad: training/rollout_probs_diff_mean is 0.004, within normal is at most 0.005")
    assert answer(reading_of({"training/rollout_probs_diff_mean": 0.007})).startswith("Bad: ")


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
    (drawing,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    path = re.search(r'<path d="([^"]*)"[^>]*stroke: var\(--arm-0\)', drawing)
    assert path and path[1].count("L") == len(STEPS) - 1
    assert all(row.source in page for row in sizes().normal)
    assert page.count("<td>0.099</td>") == 1 + sum(row.of == "k3" for row in sizes().normal), (
        "the reader's own number, in the table of numbers and beside each published one"
    )
    assert "yours: 0.099" in page
    assert json.loads(as_json(curves_record(read_curves(told))))["runs"][0]["shape"] == "growth"


def test_twenty_normal_values_have_a_model_an_engine_a_format_and_a_source() -> None:
    rows = sizes().normal
    assert len({row.source for row in rows}) >= 12 and len(rows) >= 20
    assert all(row.model and row.engines and row.format and row.value and row.source for row in rows)
    assert [band.below for band in sizes().bands] == sorted(band.below for band in sizes().bands)


@pytest.mark.slow
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
    assert capsys.readouterr().out.startswith("**Not bad: rollout_corr/k3_kl is 0.001, the size of rounding in 16 bits")
    assert page.read_text(encoding="utf-8").count("<svg") == 1


def test_the_size_is_that_of_the_very_end_if_it_is_the_larger_one() -> None:
    values = np.where(STEPS >= 97, 1.0, 1e-3)
    run = reading_of({"rollout_corr/k3_kl": values})
    assert answer(run).startswith("Bad: rollout_corr/k3_kl is 1, large")
    assert since(run) == "From step 97 to step 99 it leaves its usual size, as far as 1000 times that size."


def test_a_curve_that_ends_in_nan_is_bad_from_there_on() -> None:
    values = np.where(STEPS > 50, np.nan, 1e-3)
    words = answer(reading_of({"rollout_corr/k3_kl": values}))
    assert words.startswith("Bad: rollout_corr/k3_kl became NaN or infinite at step 51. Until then:")


def test_a_negative_k3_is_none_and_a_negative_k1_is_one() -> None:
    words = answer(reading_of({"rollout_corr/k3_kl": -0.1}))
    assert words == "Nothing can be said: rollout_corr/k3_kl is -0.1, and such a number is never below 0."
    for values in ({"rollout_corr/kl": -0.1}, {"rollout_corr/k3_kl": -1e-9}):
        assert "Nothing can be said" not in answer(reading_of(values))


def test_the_command_takes_names_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.csv"
    path.write_text("iter,gap\n" + "".join(f"{step},0.5\n" for step in range(30)), encoding="utf-8")
    words = ["tailrl", "diagnose", str(path), "--max", "k3=0.4", "--columns"]
    monkeypatch.setattr("sys.argv", [*words, "k3=gap,step=iter"])
    with pytest.raises(SystemExit, match="1"):
        run_command()
    assert "gap is 0.5" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*words, "k3=gip,step=iter"])
    with pytest.raises(SystemExit, match="2"):
        run_command()
    assert "holds no metrics over steps with the names of --columns k3=gip" in capsys.readouterr().err
