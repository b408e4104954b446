"""Numbers of the probes of flips, as the page on experts calls them. A policy is a list of parts, a warm start each."""

import math
from collections.abc import Mapping, Sequence

from scipy import stats

from findings.lookups import cell
from findings.number import Number
from tailrl.stats.intervals import mean_interval


def flip_ratios(policies: Mapping[str, Sequence[str]], skip: int = 0) -> dict[str, Number]:
    """The share of flips of each policy over the first one's: ratios of geometric means over warm starts.

    The 95 % t interval is of the log ratio, by the SD pooled within the policies. `skip`: warm starts left out.
    """
    logs = {name: [math.log(_share(part)) for part in parts[skip:]] for name, parts in policies.items()}
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


def _share(part: str) -> float:
    """The share of flips in a layer, the mean over layers."""
    return cell(f"{part}/flips_by_layer", "flip_share", layer="mean").mean
