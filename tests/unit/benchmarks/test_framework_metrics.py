"""The published comparison with frameworks' own functions is whole and of today's formulas; a difference is seen."""

import csv
import subprocess
from pathlib import Path

import pytest
from framework_calls import METRICS, WEIGHTS, make_batch, settings
from framework_metrics import compare, our_weights, wrong

from tailrl.config.arm import Correction
from tailrl.diagnosis.diagnosis import diagnose
from tailrl.diagnosis.metrics import frameworks, named_metrics
from tailrl.diagnosis.replay import catalogue

PUBLISHED = Path(__file__).parents[3] / "docs/results/framework_metrics.csv"
BATCH = make_batch()


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return list(csv.DictReader(PUBLISHED.open(encoding="utf-8")))


def test_no_number_differs(rows: list[dict[str, str]]) -> None:
    assert len(rows) > 80 and not [row for row in rows if wrong(row)]
    assert wrong(rows[0] | {"difference": "1e-3"}) and wrong(rows[0] | {"difference": "nan"})
    assert {row["framework"] for row in rows} == {*METRICS, *WEIGHTS}


def test_every_metric_of_these_frameworks_is_compared(rows: list[dict[str, str]]) -> None:
    found = {(row["framework"], row["quantity"]) for row in rows}
    assert found >= {(framework, name) for framework in METRICS for name in frameworks()[framework]}


def test_our_numbers_are_todays(rows: list[dict[str, str]]) -> None:
    log = {"sampler_logprobs": BATCH.rows(BATCH.infer_NL), "trainer_logprobs": BATCH.rows(BATCH.train_NL)}
    ours = {(one.framework, one.name): one.value.mean for one in named_metrics(diagnose(log).measured)}
    for name, remedy in catalogue().remedies.items():
        for threshold, given in remedy.settings():
            if isinstance(given, Correction):
                mean = our_weights(BATCH, given)[BATCH.mask_NL].mean().item()
                ours |= {(framework, f"weights of {name} at {threshold:g}"): mean for framework in WEIGHTS}
    for row in rows:
        if not row["quantity"].startswith("loss of "):
            assert float(row["ours"]) == pytest.approx(ours[row["framework"], row["quantity"]], rel=1e-9), row


def test_a_wrong_formula_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "src/prime_rl/trainer/rl/loss.py"
    file.parent.mkdir(parents=True)
    text = (
        "import nowhere\n\ndef compute_importance_ratio_and_mismatch_kl(a: nowhere.Tensor, b):\n    return 0, 0, {}\n"
    )
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    for formula, differs in (("torch.exp(a - b) - (a - b) - 1", False), ("(a - b) ** 2 / 2", True)):
        file.write_text(text.format(formula))
        [row] = compare({"prime-rl": tmp_path}, BATCH)
        assert row["quantity"] == "mismatch_kl" and wrong(row) == differs


def test_settings_are_read_from_lines() -> None:
    text = 'a.b.low=0.5\na.b.bounds="0.5_2"\na.b.kind=token\nother=1'
    assert settings(text, "a.b") == {"low": 0.5, "bounds": "0.5_2", "kind": "token"}
