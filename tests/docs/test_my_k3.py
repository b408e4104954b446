"""The table "My k3 is X" of the README and the home page: by the sizes that `diagnose` has."""

import re

import yaml

from my_k3 import ROWS
from tailrl.diagnosis.advice import advice_rules


def test_its_sizes_are_those_that_diagnose_advises_by_and_leave_no_gap() -> None:
    sizes = [re.findall(r"\d[\d.]*", row["k3"]) for row in yaml.safe_load(ROWS.read_text(encoding="utf-8"))][:-1]
    edges = [float(size) for row in sizes for size in row]
    assert len(sizes) == 4 and edges[0::2] == edges[1::2], "each row begins where the one above ends"
    advised = {rule.k3_upto for rule in advice_rules().rules} - {float("inf")}
    assert advised <= set(edges)
