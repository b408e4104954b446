"""What a size of the mismatch means, and values that others published: `sizes.yaml`."""

import math
from functools import cache
from typing import Literal

from tailrl.artifacts.files import Record
from tailrl.page_parts.number_text import short
from tailrl.runtime.data_files import yaml_beside

LEVELS = {"fine": "Not bad", "coarse": "Bad, unless weights or caches have few bits", "bad": "Bad"}
"""How bad a band is, in words that begin a sentence."""


class Band(Record, allow_inf_nan=True):
    """A range of sizes: those `below` this k3 in nats a token, and not below the band before."""

    below: float
    level: Literal["fine", "coarse", "bad"]
    title: str
    has: str
    seen: str
    do: str


class Normal(Record):
    """A published value; `of`: our name of the quantity; `healthy`: false where its source calls it too large."""

    model: str
    engines: str
    format: str
    of: str
    value: str
    source: str
    healthy: bool = True

    @property
    def number(self) -> str:
        """The quantity in words."""
        return sizes().names[self.of]


class Sizes(Record):
    """`sizes.yaml`."""

    bands: list[Band]
    names: dict[str, str]
    normal: list[Normal]


@cache
def sizes() -> Sizes:
    """The table of sizes."""
    return Sizes.model_validate(yaml_beside(__file__, "sizes.yaml"))


def band_of(k3: float) -> Band:
    """The band of a k3, nats a token; raises StopIteration for NaN."""
    return next(band for band in sizes().bands if k3 < band.below or (band.below == math.inf and not math.isnan(k3)))


def limits(band: Band) -> str:
    """The ends of a band in words, such as "0.002 to 0.03"."""
    place = sizes().bands.index(band)
    low = sizes().bands[place - 1].below if place else 0.0
    if band.below == math.inf:
        return f"from {short(low)} on"
    return f"below {short(band.below)}" if band.level == "fine" else f"{short(low)} to {short(band.below)}"
