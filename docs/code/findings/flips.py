"""Numbers of the probes of flips, as the page on experts calls them. A policy is a list of parts, a warm start each."""

import math
from collections.abc import Mapping, Sequence

from scipy import stats

from findings.lookups import cell
from findings.number import Number
from tailrl.stats.intervals import mean_interval

FLIPS, MARGINS = "{}/flips_by_layer", "{}/flips_by_margin"


def flips_by_start(parts: Sequence[str]) -> str:
    """The share of flips in a layer, the mean over layers, of each warm start."""
    return ", ".join(_share(part).bare for part in parts)


def flips_in_layer(parts: Sequence[str], layer: int) -> Number:
    """The share of flips in one layer, counted from 1: the mean over warm starts."""
    shares = [cell(FLIPS.format(part), "flip_share", layer=str(layer)).mean for part in parts]
    return Number(mean_interval(shares).mean, unit="share")


def flips_at_margin(parts: Sequence[str], low: str, column: str = "flip_share") -> Number:
    """The share that flips of the tokens and layers in the bin of margins from `low` nats: the mean over warm starts.

    The column `share` has the share of all margins that lies in the bin.
    """
    shares = [cell(MARGINS.format(part), column, layer="mean", margin_from=low).mean for part in parts]
    return Number(mean_interval(shares).mean, unit="share")


def flip_ratio(part: str, base: str) -> Number:
    """The share of flips of one warm start over another's; the interval is over problems, the two independent."""
    above, below = _share(part), _share(base)
    half = math.hypot(*((share.high - share.low) / 2 / share.mean for share in (above, below)))
    ratio = above.mean / below.mean
    return Number(ratio, ratio * math.exp(-half), ratio * math.exp(half))


def flip_ratios(policies: Mapping[str, Sequence[str]], skip: int = 0) -> dict[str, Number]:
    """The share of flips of each policy over the first one's: ratios of geometric means over warm starts.

    The 95 % t interval is of the log ratio, by the SD pooled within the policies. `skip`: warm starts left out.
    """
    logs = {name: [math.log(_share(part).mean) for part in parts[skip:]] for name, parts in policies.items()}
    means = {name: mean_interval(own).mean for name, own in logs.items()}
    left = [log - means[name] for name, own in logs.items() for log in own]
    freedom = len(left) - len(logs)
    width = float(stats.t.ppf(0.975, freedom)) * math.sqrt(sum(one**2 for one in left) / freedom)
    base, *others = logs
    found = {}
    for name in others:
        log, half = means[name] - means[base], width * math.sqrt(1 / len(logs[name]) + 1 / len(logs[base]))
        found[name] = Number(math.exp(log), math.exp(log - half), math.exp(log + half))
    return found


def _share(part: str) -> Number:
    return cell(FLIPS.format(part), "flip_share", "share", layer="mean")


FLIP_LOOKUPS = (flips_by_start, flips_in_layer, flips_at_margin, flip_ratio, flip_ratios)
"""What a template calls, by the functions' own names."""
