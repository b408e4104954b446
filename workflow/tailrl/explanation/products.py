"""Matrix products in 16 bits on a CPU: computed in float32, then rounded."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HALVES = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


class RoundedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it a CPU's products of two 16-bit matrices are those of float32, rounded to the 16 bits.

    A GPU and a processor with such instructions do the same: products and sums in float32, one rounding at the end. A
    processor without them computes a 135M policy five times slower in 16 bits than in float32; here it is as fast,
    and every processor gives the same numbers but for the order of the sums.
    """

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        first = arguments[0] if arguments else None
        if operation in PRODUCTS and isinstance(first, Tensor) and first.dtype in HALVES and first.device.type == "cpu":
            exact = [one.float() if isinstance(one, Tensor) else one for one in arguments]
            return operation(*exact, **(options or {})).to(first.dtype)
        return operation(*arguments, **(options or {}))
