"""The work of a step: sequences, tokens, micro-batches."""

from dataclasses import dataclass

from tailrl.config.training import Training


@dataclass(frozen=True, slots=True)
class Work:
    """A step on one device. All responses have the same length."""

    prompts: float
    group: int  # responses to each prompt
    prompt: int  # tokens of a prompt
    response: int  # tokens of a response
    budget: int  # most tokens of a micro-batch

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
    def batch_sequences(self) -> int:
        """Sequences of the largest micro-batch."""
        fits = 1
        while fits < self.sequences and self._tokens(fits + 1) <= self.budget:
            fits += 1
        return fits

    @property
    def batch(self) -> int:
        """Tokens of the largest micro-batch."""
        return self._tokens(self.batch_sequences)

    @property
    def batch_padded(self) -> int:
        """Tokens of its padded view, which attention sees: every sequence with its prompt."""
        return self.batch_sequences * (self.prompt + self.response - 1)

    def _tokens(self, sequences: int) -> int:
        return -(-sequences // self.group) * self.prompt + sequences * (self.response - 1)


def work_of(training: Training, prompt: int, response: int | None, devices: int) -> Work:
    """A device's share of a step.

    Args:
        training: the run's sizes.
        prompt: tokens of a prompt.
        response: tokens of a response; None: max_new_tokens.
        devices: devices that share the sequences.
    """
    longest = training.max_new_tokens
    response = longest if response is None else min(response, longest)
    return Work(training.prompts / devices, training.group_size, prompt, response, training.token_budget)
