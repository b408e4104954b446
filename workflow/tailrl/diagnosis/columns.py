"""Turns any value of a log into numbers: the only place where a reader meets what other programs wrote."""

import json
from typing import Any

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.runtime.limits import out_of_memory

LARGEST = float(np.finfo(np.float32).max)
"""In float32 every framework computes. The square of a larger number may be beyond float64 too."""

LARGEST_ID = 2**53  # token ids up to here are exact in float64. A larger one is none of a vocabulary.


def is_json_list(value: Any) -> bool:
    """Whether this is the text of a list."""
    return isinstance(value, str) and value.lstrip().startswith("[")


def json_list(text: str) -> Any:
    """A list that was written as JSON or by Python; raises ValueError or RecursionError for no such text."""
    return json.loads(text.replace("nan", "NaN").replace("None", "null").replace("inf", "Infinity"))


def numbers(value: Any) -> FloatArray:
    """The numbers in a list, its text, an array or a tensor, float64, in its shape; null is NaN.

    A finite number beyond float32 is float32's largest, with its sign.

    Raises:
        ValueError: these are no real numbers: words, complex numbers, a ragged list, a tensor without data.
    """
    try:
        if is_json_list(value):
            value = json_list(value)
        if hasattr(value, "detach"):  # a tensor
            value = value.detach()
            if value.is_quantized:
                value = value.dequantize()
            if value.is_sparse:
                value = value.to_dense()
            if not value.is_complex():
                value = value.double()
            value = value.cpu().resolve_conj().numpy()
        if np.iscomplexobj(value):
            raise ValueError("complex numbers")
        with np.errstate(all="ignore"):
            found: FloatArray = np.array(value, np.float64)
            return np.where(np.isfinite(found), np.clip(found, -LARGEST, LARGEST), found)
    # Whatever a tensor of another library, or an object with __array__ or __float__, raises.
    except Exception as error:
        if out_of_memory(error):
            raise
        raise ValueError(str(error)) from None


def last(value: Any) -> float:
    """The last of the numbers in a value that belongs to a whole sequence; NaN for none and for an infinity.

    Raises:
        ValueError: see `numbers`; or it is a table.
    """
    found = numbers(value)
    if found.ndim > 1:
        raise ValueError("a table")
    return float(found.reshape(-1)[-1]) if found.size and np.isfinite(found.reshape(-1)[-1]) else np.nan


def ids(values: FloatArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Token ids, int64; −1, not logged, for what can be none."""
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(values) <= LARGEST_ID, values, -1).astype(np.int64)
