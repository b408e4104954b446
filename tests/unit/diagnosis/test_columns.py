"""Any value in any column of a log ends in a reading or in one sentence."""

import math
import warnings
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from log_fixture import slime

from tailrl.artifacts.tokens import ARRAYS
from tailrl.cli.command_line import run
from tailrl.diagnosis.columns import ids, last, numbers
from tailrl.diagnosis.diagnosis import diagnose
from tailrl.diagnosis.page import terminal_page
from tailrl.runtime.errors import StudyError


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will do without them
        return torch.quantize_per_tensor(torch.tensor([-1.0, -2.0, -3.0]), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises its newer layout, which gives a shape
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)])


VALUES: dict[str, Callable[[], Any]] = {
    "a meta tensor": lambda: torch.zeros(3, device="meta"),
    "numbers of meta tensors": lambda: [torch.zeros((), device="meta")] * 3,
    "a quantised tensor": quantised,
    "a complex tensor": lambda: torch.tensor([1j, 2, 3]),
    "a conjugate tensor": lambda: torch.tensor([1j, 2, 3]).conj(),
    "a sparse tensor": lambda: torch.tensor([0.0, -1.0, -2.0]).to_sparse(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged),
    "a nested tensor of the old layout": nested,
    "a tensor of truths": lambda: torch.tensor([True, False, True]),
    "a tensor with a gradient": lambda: torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
    "a table": lambda: torch.zeros(3, 2),
    "a cube": lambda: np.zeros((3, 2, 2)),
    "a batch of one": lambda: torch.zeros(1, 3) - 1,
    "a number as a tensor": lambda: torch.tensor(-1.0),
    "an empty tensor": lambda: torch.tensor([]),
    "8 bits": lambda: torch.tensor([-1.0, -2.0, -3.0]).to(torch.float8_e4m3fn),
    "complex numbers": lambda: np.array([1j, 2, 3]),
    "a list of complex numbers": lambda: [1j, 2, 3],
    "objects": lambda: np.array([-1, None, "x"], dtype=object),
    "times": lambda: np.array(["2020-01-01"] * 3, dtype="datetime64[s]"),
    "records": lambda: np.zeros(3, dtype=[("a", "f4")]),
    "the smallest floats": lambda: [-1e308, -1, -2],
    "the largest floats": lambda: [1e308, -1e308, 1e200],
    "of float32 the largest": lambda: [3.4e38, -3.4e38, 0],
    "beyond 64 bits": lambda: [10**30, -(10**30), 2**63],
    "beyond any float": lambda: [10**400, 1, 2],
    "infinities": lambda: [math.inf, -math.inf, math.nan],
    "an infinity": lambda: math.inf,
    "a large number": lambda: 1e308,
    "a larger number": lambda: 10**400,
    "nothing": lambda: [None, None, None],
    "texts": lambda: ["a", "b", "c"],
    "text": lambda: "a\nb\ud800\0",
    "bytes": lambda: b"abc",
    "a block": lambda: {"a": 1},
    "a set": lambda: {1, 2, 3},
    "a ragged list": lambda: [[-1], [-2, -3]],
    "a deep list": lambda: [[[-1, -2, -3]]],
    "decimals": lambda: [Decimal("-1"), Decimal("-1e400"), Decimal("nan")],
    "fractions": lambda: [Fraction(-1, 3)] * 3,
    "dates": lambda: [datetime(2020, 1, 1)] * 3,
    "an object": object,
}
COLUMNS = (
    *("token_ids", "sampler_logprobs", "trainer_logprobs", "recomputed_logprobs", "mask", "advantage", "rank"),
    *("trainer_again_logprobs", "trainer_top_logprobs", "sampler_set_size", "step", "version", "reward", "text"),
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", VALUES)
def test_any_value_is_read_or_refused_in_one_sentence(value: str) -> None:
    plain = {"token_ids": [5, 6, 7], "sampler_logprobs": [-1.0, -2.0, -0.5], "trainer_logprobs": [-1.1, -2.0, -0.6]}
    for column in COLUMNS:
        rows = [{**plain, "step": 1, "reward": float(n)} for n in range(3)]
        rows[1][column] = VALUES[value]()
        try:
            assert terminal_page(diagnose(rows), None)
        except StudyError as error:
            assert "\n" not in str(error) and column in str(error)


def test_what_float32_lacks_is_its_largest_and_null_is_nan() -> None:
    largest = float(np.finfo(np.float32).max)
    given = [-1.5, None, 3.5e38, -1e308, math.inf]
    np.testing.assert_array_equal(numbers(given), [-1.5, np.nan, largest, -largest, np.inf])
    assert numbers(torch.tensor([[1, 2]])).tolist() == [[1.0, 2.0]]
    with pytest.raises(ValueError, match="complex"):
        numbers(np.array([1j]))


def test_the_last_number_and_ids() -> None:
    assert last([1, 2]) == 2 and last(torch.tensor(3)) == 3
    assert all(math.isnan(last(value)) for value in ([], math.inf, None))
    assert ids(np.array([0.0, 5.0, 2.0**53, 2.0**54, 1e30, np.nan, np.inf])).tolist() == [0, 5, 2**53, -1, -1, -1, -1]


# --- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 2, 1), (1, 1, 1)])
def test_arrays_of_three_dimensions_in_an_npz_file_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    file = tmp_path / "tokens.npz"
    np.savez(file, **{name: np.zeros(shape) for name in ARRAYS})  # type: ignore[arg-type]
    with pytest.raises(StudyError, match=r"tokens\.npz.*: logp_infer is no list of numbers"):
        diagnose(file)


def test_odd_numbers_in_an_npz_file_are_read(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {name: np.array([-1.0, -1e308, np.nan, 1e300]) for name in ARRAYS}
    np.savez(tmp_path / "tokens.npz", **arrays)
    assert diagnose(tmp_path / "tokens.npz").measured.sequences


@pytest.mark.parametrize(
    "changed",
    [
        lambda dump: {**dump, 1: "x", None: 2},
        lambda dump: {**dump, "samples": [{1: 2, "a": 3, (1, 2): 4}]},
        lambda dump: {**dump, "samples": [{**dump["samples"][0], 1: torch.zeros(2), None: 3}]},
        lambda _: {"rollout_data": {"response_lengths": [1]}, "cp_size": torch.zeros(2)},
        lambda dump: {1: dump["samples"], "two": 3},
    ],
)
def test_keys_of_several_types_in_a_dump(changed: Callable[[Any], Any], tmp_path: Path) -> None:
    dump = torch.load(slime(tmp_path), weights_only=True)
    torch.save(changed(dump), tmp_path / "3.pt")
    try:
        assert diagnose(tmp_path / "3.pt").measured.sequences
    except StudyError as error:
        assert str(error).startswith(str(tmp_path / "3.pt")) and "\n" not in str(error)


@pytest.mark.parametrize("name", ["a\nb.jsonl", "a\rb.jsonl", "a\u2028b.jsonl", "\x1b[2Ja.jsonl"])
def test_a_name_with_a_line_feed_stays_on_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_text("{", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["tailrl", "diagnose", str(tmp_path / name)])
    with pytest.raises(SystemExit) as ended:
        run()
    sentence = str(ended.value.code)
    assert sentence.startswith("tailrl: ") and sentence.isprintable() and "not valid JSON" in sentence
