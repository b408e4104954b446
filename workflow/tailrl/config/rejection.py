"""A rule of a correction that drops tokens or responses by how far trainer and sampler are apart there."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from tailrl.config.base import LARGEST_RATIO, Settings, word_or_import_path
from tailrl.runtime.import_path import is_import_path

Ratio = Literal["r_corr", "r_ppo", "r_rollout"]
"""Ratios of probabilities: π_train_old/π_rollout_old, the mismatch; π_θ/π_train_old, the policy's move in earlier
updates on the same rollouts; π_θ/π_rollout_old, both."""

LOG_STATISTICS = ("k1", "k2", "k3")
"""Statistics of the log-ratio alone, which a correction's `log_ratio_limit` clamps."""

SIGNED = ("k1", "tv", "kl")
"""Statistics that have either sign."""

if TYPE_CHECKING:
    Statistic = str
else:
    Statistic = word_or_import_path("k1", "k2", "k3", "tv", "kl", "abs_tv", "abs_kl", "kl_both")


class Rejection(Settings):
    """Drops what lies above or below a limit; of several rules each must be met."""

    of: Statistic = Field(
        description="a token's statistic, with p over q the ratio and r = p/q: k1 = -log r; k2 = (log r)^2/2; k3 = r - "
        "log r - 1; tv = p - q; kl = KL between (q, 1-q) and (p, 1-p), with the sign of p - q; abs_tv and abs_kl: "
        "without the sign; kl_both: the larger of the KL and its reverse; or the import path of a function of your own"
    )
    by: Literal["token", "segment", "sum", "mean", "max", "batch"] = Field(
        description="token: drops single tokens; segment: by the mean over a segment, which is dropped as a whole; "
        "sum, mean, max: over a response, which is dropped as a whole; batch: drops the tokens with the largest values "
        "until the mean over the update's other tokens is at most `above`"
    )
    above: float | None = Field(None, le=LARGEST_RATIO, description="drops values above this; null: no upper limit")
    below: float | None = Field(None, le=LARGEST_RATIO, description="drops values below this; null: no lower limit")
    ratio: Ratio = Field(
        "r_corr",
        description="which ratio: r_corr, the mismatch; r_ppo, the policy's move in earlier updates on the same "
        "rollouts; r_rollout, both",
    )
    when: Literal["always", "negative", "outward"] = Field(
        "always",
        description="negative: only where the advantage is below 0; outward: above counts where the advantage is above "
        "0, and below elsewhere, so that only updates that widen the gap are dropped",
    )

    @property
    def signed(self) -> bool:
        """Whether the statistic may have either sign, as one of the user's own may."""
        return self.of in SIGNED or is_import_path(self.of)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.above is None and self.below is None:
            raise ValueError("a rejection needs above or below")
        if self.below is not None and not self.signed:
            raise ValueError(f"of: {self.of} is never below 0: leave out below")
        if self.above is not None and self.above <= 0 and not self.signed:
            raise ValueError(f"of: {self.of} is never below 0: above must exceed 0")
        if self.by == "batch" and (self.above is None or self.below is not None or self.when != "always"):
            raise ValueError("by: batch needs above alone, and when: always")
        if self.by == "batch" and self.ratio != "r_corr":
            raise ValueError("by: batch judges an update's tokens before it, where they have r_corr alone")
        if self.by == "batch" and self.signed:
            raise ValueError(
                f"of: {self.of} has either sign, so that by: batch has no largest values: take k2 or abs_kl"
            )
        if self.below is not None and self.by == "max":
            raise ValueError("by: max has no lower limit, which a response's largest value says nothing of")
        if None not in (self.above, self.below) and not self.below < self.above:  # type: ignore[operator]
            raise ValueError("below must be less than above, or everything is dropped")
        if self.when == "outward" and (self.of not in ("tv", "kl") or self.by != "token"):
            raise ValueError("when: outward is for of: tv or kl, by: token, whose sign says where an update leads")
        return self
