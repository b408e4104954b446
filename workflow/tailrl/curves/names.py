"""Which metric of which framework a logged name is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tailrl.diagnosis.metrics import Rule, frameworks
from tailrl.runtime.data_files import yaml_beside


@dataclass(frozen=True, slots=True)
class Metric:
    """A framework's metric: `of` is our quantity, as in `diagnosis/frameworks.yaml`; rules are the framework's own."""

    framework: str
    name: str
    of: str
    rules: tuple[Rule, ...] = ()


@cache
def metrics() -> dict[str, Metric]:
    """All known metrics by their names."""
    known = {
        name: Metric(framework, name, metric.of, tuple(metric.rules))
        for framework, named in frameworks().items()
        for name, metric in named.items()
    }
    for framework, names in _table()["metrics"].items():
        known |= {name: Metric(framework, name, of) for name, of in names.items() if name not in known}
    return known


@cache
def _table() -> dict[str, Any]:
    return dict(yaml_beside(__file__, "names.yaml"))


# `k1` may end other words, so it stands alone. A k3 to a reference policy is no mismatch.
OWN = re.compile(r"(?:^|(?<!ref)(?<!reference)[/_.])(?P<name>k3|abs_logp)$|^(?P<whole>k1)$")
OWN_ROLES = ("step", "learning_rate")  # what a user may name beside metrics


@dataclass(frozen=True, slots=True)
class Names:
    """The known names of metrics, and those that a user gave.

    Attributes:
        own: the file's names, by ours, such as `k3` or `step`.
    """

    own: Mapping[str, str] = field(default_factory=dict)

    def metric(self, name: str) -> Metric | None:
        """The metric that a logged name is, or ends with; words before it, such as `train/`, are the logger's.

        Our own names, which the gate takes too, end a name after a slash, a point or an underscore.
        """
        for of, logged in self.own.items():
            if name == logged and of not in OWN_ROLES:
                return Metric("tailrl", name, of)
        for end in ends(name):
            if metric := metrics().get(end):
                return metric
        if own := OWN.search(name):
            of = own["name"] or own["whole"]
            return Metric("tailrl", of, of)
        return None

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the step in rows of metrics, the most specific ones first."""
        return (self.own["step"],) if "step" in self.own else tuple(_table()["steps"])

    def is_learning_rate(self, name: str) -> bool:
        """Whether a logged name is that of the learning rate."""
        if "learning_rate" in self.own:
            return name == self.own["learning_rate"]
        return any(end in _table()["learning_rates"] for end in ends(name))

    def of_file(self, stem: str) -> str:
        """The metric in a name of TensorBoard's files, `run-NAME-tag-METRIC`, where slashes are underscores."""
        tag = re.sub(r"^run-.*-tag-", "", stem)
        names = [*metrics(), *_table()["learning_rates"], *self.own.values()]
        plain = {name.replace("/", "_"): name for name in names}
        fits = [name for written, name in plain.items() if tag == written or tag.endswith(f"_{written}")]
        return max(fits, key=len) if fits else tag


KNOWN = Names()


def ends(name: str) -> list[str]:
    """The name, and what is left of it after each slash."""
    parts = name.split("/")
    return ["/".join(parts[begin:]) for begin in range(len(parts))]
