"""A number as the pages print it."""

import math
import re
from dataclasses import dataclass

from tailrl.page_parts.number_text import p_value, short


@dataclass(frozen=True, slots=True)
class Number:
    """A number with its 95 % interval and its p by Holm (NaN: none).

    Its unit is %, share (in two digits), points or none.
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    unit: str = ""

    @property
    def bare(self) -> str:
        """Without interval."""
        return f"{self._text(self.mean)} %" if self.unit in ("%", "share") else self._text(self.mean)

    @property
    def tested(self) -> str:
        """With interval and p, if it has one."""
        return str(self) if math.isnan(self.p) else f"{self}, {self.probability}"

    @property
    def probability(self) -> str:
        """p alone, as `p = 0.012`."""
        found = "1" if self.p > 0.9995 else p_value(self.p)
        return f"p {found}" if found.startswith("<") else f"p = {found}"

    def __str__(self) -> str:
        if math.isnan(self.low):
            return self.bare
        return f"{self.bare} [{self._text(self.low)}, {self._text(self.high)}]"

    def _text(self, value: float) -> str:
        if self.unit == "%":
            return f"{100 * min(1.0, max(0.0, value)):.1f}"
        if self.unit == "share":
            return short(100 * value)
        written = f"{100 * value:+.1f}" if self.unit == "points" else short(value).replace("e-0", "e-")
        return re.sub(r"(?<!e)-", "−", written)
