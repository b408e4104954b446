"""A loss as torchtune's recipes take one: a module that is given the model's output layer, and then hidden states.

    python examples/loops/torchtune_like.py

torchtune's `LinearCrossEntropyLoss` has `set_model_output(model)`: the model then skips its output layer, and the loss
projects in chunks. `DVPLoss` has the same form, and gets in addition what a sampler returned. Padding has label −100.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tailrl.losses import Correction, LossInputs, constrained_logprobs, loss

IGNORE = -100


class DVPLoss(nn.Module):
    """The constrained objective; `forward` returns the loss, and `metrics` has what the last call left out."""

    def __init__(self, log_rho: float, correction: Correction, temperature: float = 1.0) -> None:
        super().__init__()
        self.log_rho, self.correction, self.temperature = log_rho, correction, temperature
        self.metrics: dict[str, float] = {}

    def set_model_output(self, model: nn.Module) -> None:
        """Takes over the model's output layer."""
        model.skip_output_layer = True
        self.linear_projection = model.output

    def forward(self, hidden_NLH: Tensor, labels_NL: Tensor, logp_sampler_NL: Tensor, advantage_N: Tensor) -> Tensor:
        """A scalar; position (n, l) of the hidden states predicts label (n, l)."""
        kept_NL = labels_NL != IGNORE
        sequence_T, count = kept_NL.nonzero()[:, 0], len(labels_NL)
        weight_VH = self.linear_projection.weight
        scored = constrained_logprobs(
            hidden_NLH[kept_NL], weight_VH, labels_NL[kept_NL], "min_p", self.log_rho, self.temperature
        )
        inputs = LossInputs(
            trainer=scored,
            logp_sampler_T=logp_sampler_NL[kept_NL],
            advantage_T=advantage_N[sequence_T],
            sequence_T=sequence_T,
            sequences=count,
            denominator=count,
        )
        outputs = loss(inputs, correction=self.correction)
        self.metrics = outputs.metrics
        return outputs.loss


class Decoder(nn.Module):
    """Stands for torchtune's `TransformerDecoder`: returns hidden states where `skip_output_layer` is set."""

    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.skip_output_layer = False

    def forward(self, tokens_NL: Tensor) -> Tensor:
        hidden_NLH = self.layer(self.tok_embeddings(tokens_NL))[0]
        return hidden_NLH if self.skip_output_layer else self.output(hidden_NLH)


@dataclass
class Recipe:
    """The part of a recipe that a loss meets: its set-up and one step."""

    model: Decoder
    loss: DVPLoss

    def __post_init__(self) -> None:
        self.loss.set_model_output(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """One update; returns the metrics."""
        hidden_NLH = self.model(batch["tokens"])
        loss = self.loss(hidden_NLH, batch["labels"], batch["logp_infer"], batch["advantages"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return self.loss.metrics | {"loss": loss.item()}


def random_batch(vocabulary: int, count: int = 8, length: int = 6) -> dict[str, Tensor]:
    """Tokens, labels with padding, near-uniform log-probs of a sampler, and advantages."""
    tokens_NL = torch.randint(1, vocabulary, (count, length + 1))
    labels_NL = tokens_NL[:, 1:].clone()
    labels_NL[::2, -2:] = IGNORE
    logp_sampler_NL = -math.log(vocabulary) + 0.1 * torch.randn(count, length)
    return {
        "tokens": tokens_NL[:, :-1],
        "labels": labels_NL,
        "logp_infer": logp_sampler_NL.clamp(max=0.0),
        "advantages": torch.randn(count),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    recipe = Recipe(Decoder(40), DVPLoss(math.log(0.5), Correction(sequence="mis", veto=1e-4)))
    print({name: round(value, 4) for name, value in recipe.step(random_batch(40)).items()})
