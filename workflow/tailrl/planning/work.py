"""The work of a step: sequences, tokens, micro-batches."""

import math
from dataclasses import dataclass

from tailrl.config.training import Training


@dataclass(frozen=True, slots=True)
class Work:
    """A step on one device. Responses differ in length, so that micro-batches fill up to their budget."""

    prompts: float
    group: int  # responses to each prompt
    prompt: int  # tokens of a prompt
    response: int  # tokens of a response, on average
    budget: int  # most tokens of a micro-batch, unless one sequence has more
    longest: int  # tokens of the longest response

    @property
    def sequences(self) -> float:
        return self.prompts * self.group

    @property
    def sampled(self) -> float:
        """Response tokens. Each needs logits, in the engine and in the trainer."""
        return self.sequences * self.response

    @property
    def row(self) -> float:
        """Tokens that the trainer runs the model on: each prompt once, each response without its last token."""
        return self.prompts * self.prompt + self.sequences * (self.response - 1)

    @property
    def batch(self) -> int:
        """Most tokens of a micro-batch's row."""
        return min(math.ceil(self.row), max(self.budget, self.prompt + self.longest - 1))

    @property
    def batch_sampled(self) -> float:
        """Response tokens of such a row."""
        return self.sampled * self.batch / self.row

    @property
    def attended(self) -> float:
        """Tokens of its padded view, which attention sees: every sequence with its prompt, as long as the longest.

        Neighbours in length share a row; their lengths are taken to lie between nothing and twice the average.
        """
        return self.sequences * self.batch / self.row * self.padded

    @property
    def repeated(self) -> float:
        """Tokens of such a row with a prompt for every sequence."""
        return self.batch + self.sequences * self.batch / self.row * self.prompt

    @property
    def padded(self) -> int:
        """Tokens of a sequence in that view."""
        return self.prompt + min(self.longest, 2 * self.response) - 1


def work_of(training: Training, prompt: int, response: int | None, devices: int) -> Work:
    """A device's share of a step.

    Args:
        training: the run's sizes.
        prompt: tokens of a prompt.
        response: tokens of a response on average; None: all have max_new_tokens.
        devices: devices that share the sequences.
    """
    longest = training.max_new_tokens
    response = longest if response is None else min(response, longest)
    return Work(training.prompts / devices, training.group_size, prompt, response, training.token_budget, longest)
