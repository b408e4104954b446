"""Names that would share a file are refused, before Snakemake finds two rules for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tailrl.config.load import read_study
from tailrl.runtime.errors import StudyError

RATES = {"base": "a", "field": "training.learning_rate", "values": [1e-3, 2e-3]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"arms": {"a": {}, "a.manifest": {}}}, ("arms.a.manifest: files of results end so",)),
        ({"ablations": {"x_claims": RATES}}, ("ablations.x_claims: files of results end so",)),
        ({"distributions": {"engines": {"claims.csv": {}}}}, ("distributions.engines.claims.csv: files of",)),
        (
            {
                "arms": {"a": {}, "b": {"estimator": "grpo"}},
                "ablations": {
                    "rate": {**RATES, "base": ["a", "b"]},
                    "b+rate": {"base": "b", "field": "training.weight_decay", "values": [1e-3]},
                },
            },
            ("b+rate", "'b+rate=0.001'"),
        ),
    ],
)
def test_names_that_would_share_a_file_are_refused(
    tmp_path: Path, changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    (tmp_path / "my.yaml").write_text(json.dumps({"name": "s", "arms": {"a": {}}, **changes}), encoding="utf-8")
    with pytest.raises(StudyError) as caught:
        read_study(tmp_path / "my.yaml")
    sentence = str(caught.value)
    assert all(word in sentence for word in named) and "\n" not in sentence


def test_names_that_look_alike_are_accepted(tmp_path: Path) -> None:
    arms = {name: {} for name in ("a", "a.samples", "a.json", "A", "train", "eval", "a.parts")}
    (tmp_path / "my.yaml").write_text(json.dumps({"name": "s", "arms": arms}), encoding="utf-8")
    assert read_study(tmp_path / "my.yaml").arms.keys() == arms.keys()
