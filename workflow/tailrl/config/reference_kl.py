"""The block of an arm on the KL divergence from a reference policy, which is the base policy."""

from typing import Literal

from pydantic import Field

from tailrl.config.base import LARGEST_RATE, Settings


class ReferenceKL(Settings):
    """A penalty for leaving the base policy: coefficient × KL(π_θ ‖ π_base), estimated at the sampled tokens."""

    coefficient: float = Field(
        0.001, gt=0, le=LARGEST_RATE, description="the penalty's factor; verl's kl_loss_coef, TRL's beta"
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="with r = π_base/π_θ of a token: k1: -log r; k2: (log r)^2 / 2; k3: r - log r - 1"
    )
    where: Literal["loss", "reward"] = Field(
        "loss",
        description="loss: its gradient is taken at each token, beside the policy gradient and without its weights; "
        "reward: a response's sum is subtracted from its reward before the advantages",
    )

    @property
    def biased(self) -> str:
        """Why the estimator's gradient in its place is none of KL(π_θ ‖ π_base); empty where it is taken."""
        if self.where == "loss" and self.estimator == "k1":
            return "the gradient of k1 in the loss is that of log-probs, whose expectation is 0: it only adds noise"
        if self.where == "reward" and self.estimator == "k2":
            return "k2 in the reward rewards neither divergence: its expected gradient is another function's"
        if self.where == "reward" and self.estimator == "k3":
            return "k3 in the reward adds the gradient of -KL(base, policy), which cancels the penalty near the base"
        return ""
