"""A study that is killed at random and started again ends as one that nobody disturbed; `make chaos` is longer."""

from pathlib import Path

import chaos
import pytest


def test_two_kills(tmp_path: Path) -> None:
    assert chaos.run(tmp_path, 2, "exact", seed=2).startswith("2 kills (")


@pytest.mark.slow
@pytest.mark.vllm
def test_ten_kills_with_vllm(tmp_path: Path) -> None:
    assert chaos.run(tmp_path, 10, "vllm", seed=1).startswith("10 kills (")


def test_a_difference_is_named() -> None:
    with pytest.raises(SystemExit, match=r"^not as undisturbed: b, d, c$"):
        chaos.compare({"a": b"1", "b": [1], "d": 0}, {"a": b"1", "b": [2], "c": {"x": b""}})
