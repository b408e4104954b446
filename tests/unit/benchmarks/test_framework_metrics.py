"""The published comparison with frameworks' own functions is whole and of today's formulas; a difference is seen."""

import csv
from pathlib import Path

import pytest
from framework_metrics import FRAMEWORKS, wrong
from peer_metrics import LEVELS, NOT_EXECUTED, OF_TRAINING, UPDATES_OF, metric_rows, ours_of
from peer_sources import peers
from peer_updates import ours_of_updates

from tailrl.diagnosis.metrics import frameworks
from tailrl.reports.metrics.page import ALIASES
from tailrl.tracking.metrics import CORR_VERL
from tailrl.tracking.metrics import METRICS as LOGGED

PUBLISHED = Path(__file__).parents[3] / "docs/results/framework_metrics.csv"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return list(csv.DictReader(PUBLISHED.open(encoding="utf-8")))


def test_no_number_differs(rows: list[dict[str, str]]) -> None:
    assert len(rows) > 75 and not [row for row in rows if wrong(row)]
    assert wrong(rows[0] | {"difference": "1e-3"}) and wrong(rows[0] | {"difference": "nan"})
    assert sorted({row["framework"] for row in rows}) == FRAMEWORKS


def test_every_metric_with_a_frameworks_name_is_compared(rows: list[dict[str, str]]) -> None:
    """Those of a log, and those that training logs under verl's names and definitions."""
    compared = {(row["framework"], row["quantity"]) for row in rows}
    assert sorted(frameworks()) == FRAMEWORKS
    assert compared >= {(framework, name) for framework, metrics in frameworks().items() for name in metrics}
    verls = {f"{key} ({level})" for key in LOGGED if key.startswith(f"{CORR_VERL}/") for level in LEVELS}
    same = {name for name, alias in ALIASES["verl"].items() if name == alias["ours"] and "note" not in alias}
    verls |= {f"{OF_TRAINING}{name.removeprefix('rollout_corr/')}" for name in same}
    assert len(verls) == 2 * 16 + 11 and compared >= {("verl", name) for name in verls}


def test_every_name_of_a_framework_is_compared_or_has_a_reason(rows: list[dict[str, str]]) -> None:
    """Of `tailrl metrics`; a key under rollout_corr_verl has rows of its own."""
    compared = {(row["framework"], row["quantity"].removeprefix(OF_TRAINING)) for row in rows}
    for framework, aliases in ALIASES.items():
        open_names = set()
        for name, alias in aliases.items():
            own = f"{alias['ours']} (token)" if alias["ours"].startswith(f"{CORR_VERL}/") else name
            short = name.removeprefix("rollout_corr/")
            if not compared & {(framework, own), (framework, short)}:
                open_names.add(name)
        assert open_names == NOT_EXECUTED[framework].keys()


def test_they_are_of_the_listed_versions(rows: list[dict[str, str]]) -> None:
    for row in rows:
        peer = peers()[row["framework"].lower()]
        assert (row["version"], row["date"]) == (peer.version or peer.commit[:7], peer.date), row


def test_our_metrics_are_todays(rows: list[dict[str, str]]) -> None:
    assert {int(row["batches"]) for row in rows} >= {150}
    for row in rows:
        framework, batch = row["framework"], int(row["batch"])
        updates = ours_of_updates(framework, batch) if framework in UPDATES_OF else {}
        ours = updates if (framework, row["quantity"]) in updates else ours_of(framework, batch)
        assert float(row["ours"]) == pytest.approx(ours[framework, row["quantity"]], rel=1e-9, nan_ok=True), row


def test_a_wrong_formula_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "src/prime_rl/trainer/rl/loss.py"
    file.parent.mkdir(parents=True)
    text = (
        "import nowhere\n\ndef compute_importance_ratio_and_mismatch_kl(a: nowhere.Tensor, b):\n    return 0, 0, {}\n"
    )
    for formula, differs in (("torch.exp(a - b) - (a - b) - 1", False), ("(a - b) ** 2 / 2", True)):
        file.write_text(text.format(formula))
        [row] = metric_rows("prime-rl", tmp_path, batches=10)
        assert row["quantity"] == "mismatch_kl" and wrong({key: str(value) for key, value in row.items()}) == differs


def test_a_metric_that_a_framework_no_longer_has_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tinker_cookbook/rl/metrics.py"
    file.parent.mkdir(parents=True)
    file.write_text("def compute_kl_sample_train(data, logprobs):\n    return {'optim/kl_sample_train_v1': 0.0}\n")
    with pytest.raises(RuntimeError, match="tinker-cookbook computed no optim/kl_sample_train_v2"):
        metric_rows("tinker-cookbook", tmp_path, batches=1)
