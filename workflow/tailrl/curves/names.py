"""Which metric of which framework a logged name is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tailrl.diagnosis.metrics import Rule, frameworks


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
def learning_rates() -> tuple[str, ...]:
    """The names under which frameworks log the learning rate."""
    return tuple(_table()["learning_rates"])


@cache
def step_names() -> tuple[str, ...]:
    """The names of the step in rows of metrics, the most specific ones first."""
    return tuple(_table()["steps"])


@cache
def _table() -> dict[str, Any]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


# `k1` may end other words, so it stands alone. A k3 to a reference policy is no mismatch.
OWN = re.compile(r"(?:^|(?<!ref)(?<!reference)[/_.])(?P<name>k3|abs_logp)$|^(?P<whole>k1)$")


def known_metric(name: str) -> Metric | None:
    """The metric that a logged name ends with; words before it, such as `train/`, are the logger's.

    Our own names, which the gate takes too, end a name after a slash, a point or an underscore.
    """
    parts = name.split("/")
    for begin in range(len(parts)):
        if metric := metrics().get("/".join(parts[begin:])):
            return metric
    if own := OWN.search(name):
        of = own["name"] or own["whole"]
        return Metric("tailrl", of, of)
    return None


OWN_ROLES = ("step", "learning_rate")
"""What a user may name beside metrics."""


@dataclass(frozen=True, slots=True)
class Names:
    """The known names of metrics, and those that a user gave: ours, such as `k3` or `step`, to the file's."""

    own: Mapping[str, str] = field(default_factory=dict)

    def metric(self, name: str) -> Metric | None:
        """The metric that a logged name is."""
        for of, logged in self.own.items():
            if name == logged and of not in OWN_ROLES:
                return Metric("tailrl", name, of)
        return known_metric(name)

    def steps(self) -> tuple[str, ...]:
        """The names of the step, the most specific ones first."""
        return (self.own["step"],) if "step" in self.own else step_names()

    def is_learning_rate(self, name: str) -> bool:
        """Whether a logged name is that of the learning rate."""
        return name == self.own["learning_rate"] if "learning_rate" in self.own else is_learning_rate(name)


KNOWN = Names()


def is_learning_rate(name: str) -> bool:
    """Whether a logged name is that of the learning rate."""
    parts = name.split("/")
    return any("/".join(parts[begin:]) in learning_rates() for begin in range(len(parts)))


def metric_of_file_name(stem: str, names: Names = KNOWN) -> str:
    """The metric in the name of a file that TensorBoard saves, `run-NAME-tag-METRIC`, where slashes are underscores."""
    tag = re.sub(r"^run-.*-tag-", "", stem)
    plain = {name.replace("/", "_"): name for name in [*metrics(), *learning_rates(), *names.own.values()]}
    fits = [name for written, name in plain.items() if tag == written or tag.endswith(f"_{written}")]
    return max(fits, key=len) if fits else tag
