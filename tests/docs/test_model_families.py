"""The measured families are those of the tests."""

import csv

from families import PACKED, REFUSED

import model_families_table


def test_every_family_was_measured_or_refused() -> None:
    """In float32 both sides agree in both orders; older libraries read the same model or refuse it."""
    with model_families_table.MEASURED.open(encoding="utf-8", newline="") as file:
        rows = {row["family"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {*PACKED, *REFUSED}
    for name, row in rows.items():
        assert (row["verdict"] == "measured") is (name in PACKED)
        if name in REFUSED:
            assert REFUSED[name][1] in row["verdict"]
            continue
        assert all(float(row[f"k3, {order} first"]) < 1e-8 for order in ("trainer", "engine"))
        logits = [row[key] for key in row if key.startswith("logits, ")]
        assert len(logits) == 2 and all(value.startswith("refused: ") or float(value) < 1e-5 for value in logits)
