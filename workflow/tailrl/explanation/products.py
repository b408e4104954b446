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
    """Within it a CPU multiplies two 16-bit matrices in float32 and rounds the product to 16 bits.

    A GPU does the same: it multiplies and adds in float32, and rounds once, at the end. So does a CPU with 16-bit
    instructions. Other CPUs have their own way, which took five times as long for a policy of 135M. Within it CPUs
    differ by the order of their sums alone. Every operation passes through Python, so enter it for 16 bits only.
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
