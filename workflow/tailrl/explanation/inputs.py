"""Hypotheses on what the model read: other tokens, positions or a shorter view. `catalogue.yaml` names them.

Each takes a sequence's inputs, a number and the context of the log, and returns inputs; None where it changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

USER_TEXT = "USERTEXT"
THINKING = "<think>"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model reads for one sequence.

    Attributes:
        ids: token ids of prompt and response.
        place_T: int64, places in it of the scored tokens.
        first: the place of the response's first token.
        previous, following: ids of the log's neighbouring rows; empty: none.
        elsewhere: the prompt of another row that fits a column best; empty: not looked for.
        positions: of the tokens; None: 0, 1, 2, ...
        window: tokens that attention looks back over, its own among them; None: as the model says; 0: all.
    """

    ids: tuple[int, ...]
    place_T: NDArray[np.int64]
    first: int
    previous: tuple[int, ...] = ()
    following: tuple[int, ...] = ()
    elsewhere: tuple[int, ...] = ()
    positions: tuple[int, ...] | None = None
    window: int | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.ids[: self.first]

    def with_prompt(self, prompt: Sequence[int]) -> "Inputs | None":
        """The same response after another prompt; None if it is the same prompt or an empty one."""
        if not prompt or tuple(prompt) == self.prompt or self.positions is not None:
            return None
        moved = len(prompt) - self.first
        return replace(
            self, ids=(*prompt, *self.ids[self.first :]), place_T=self.place_T + moved, first=self.first + moved
        )


@dataclass(frozen=True, slots=True)
class Context:
    """What hypotheses may look at besides a sequence.

    Attributes:
        config: the model's configuration.
        tokenizer: the model's; None: its folder has none.
        others, adapters: further folders of weights.
        template: texts before and after the user's in the chat template; None: there is no template.
    """

    config: Any
    tokenizer: Any = None
    others: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    template: tuple[str, str] | None = None

    @property
    def bos(self) -> int | None:
        own = getattr(self.tokenizer, "bos_token_id", None)
        return own if own is not None else getattr(self.config, "bos_token_id", None)

    @property
    def eos(self) -> int | None:
        own = getattr(self.tokenizer, "eos_token_id", None)
        listed = own if own is not None else getattr(self.config, "eos_token_id", None)
        return listed[0] if isinstance(listed, list) else listed


def chat_template(tokenizer: Any) -> tuple[str, str] | None:
    """The chat template's texts before and after a user's words; None where it has none that can be used."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        whole = tokenizer.apply_chat_template(
            [{"role": "user", "content": USER_TEXT}], tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a template is a program
        return None
    before, found, after = whole.partition(USER_TEXT)
    return (before, after) if found else None


def begin_doubled(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001 - of all
    """The beginning token twice."""
    if context.bos is None or inputs.ids[0] != context.bos:
        return None
    return inputs.with_prompt((context.bos, *inputs.prompt))


def begin_missing(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """Without the beginning token."""
    return inputs.with_prompt(inputs.prompt[1:]) if context.bos == inputs.ids[0] else None


def begin_added(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """With a beginning token that the log's prompt lacks."""
    if context.bos is None or inputs.ids[0] == context.bos:
        return None
    return inputs.with_prompt((context.bos, *inputs.prompt))


def end_added(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """With the end token between prompt and response."""
    return inputs.with_prompt((*inputs.prompt, context.eos)) if context.eos is not None else None


def end_missing(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """Without the last end token of the prompt and what follows it."""
    if context.eos is None or context.eos not in inputs.prompt:
        return None
    last = len(inputs.prompt) - 1 - inputs.prompt[::-1].index(context.eos)
    return inputs.with_prompt((*inputs.prompt[:last], *inputs.prompt[last + 1 :]))


def template_missing(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """The user's words without the chat template."""
    words = _user_words(inputs, context)
    return inputs.with_prompt(_encoded(words, context)) if words is not None else None


def template_doubled(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """The chat template around the prompt that has it."""
    if context.template is None:
        return None
    before, after = context.template
    return inputs.with_prompt(_encoded(before + context.tokenizer.decode(inputs.prompt) + after, context))


def template_added(inputs: Inputs, value: float, context: Context) -> Inputs | None:
    """The chat template around a prompt that lacks it."""
    return None if _user_words(inputs, context) is not None else template_doubled(inputs, value, context)


def system_missing(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """Without the turns before the last one, such as the system's: from the last token that begins a turn on."""
    if context.template is None:
        return None
    first = _encoded(context.template[0], context)[0]
    last_turn = context.tokenizer.encode(context.template[1], add_special_tokens=False)
    turns = [place for place, token in enumerate(inputs.prompt) if token == first]
    answer = len([token for token in last_turn if token == first])
    if len(turns) - answer < 2:
        return None
    return inputs.with_prompt(inputs.prompt[turns[-1 - answer] :])


def system_doubled(inputs: Inputs, value: float, context: Context) -> Inputs | None:
    """The turns before the last one twice."""
    without = system_missing(inputs, value, context)
    return inputs.with_prompt(inputs.prompt[: inputs.first - without.first] + inputs.prompt) if without else None


def answer_turn_missing(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """Without the generation prompt: what the chat template puts after the user's turn."""
    if context.template is None or context.eos is None:
        return None
    after = context.tokenizer.encode(context.template[1], add_special_tokens=False)
    ends = [place for place, token in enumerate(after) if token == context.eos]
    left_out = len(after) - ends[-1] - 1 if ends else len(after)
    return inputs.with_prompt(inputs.prompt[:-left_out]) if left_out else None


def prompt_begins_later(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """The last tokens of the prompt alone: cut on the left to a longest length."""
    return inputs.with_prompt(inputs.prompt[-int(value) :])


def prompt_ends_earlier(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """Without so many of the prompt's last tokens."""
    return inputs.with_prompt(inputs.prompt[: -int(value)])


def prompt_missing(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """The first token of the prompt alone."""
    return inputs.with_prompt(inputs.prompt[:1])


def prompt_retokenised(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """The prompt's text encoded again."""
    if context.tokenizer is None:
        return None
    return inputs.with_prompt(_encoded(context.tokenizer.decode(inputs.prompt), context))


def response_retokenised(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """The response's text encoded again, where that gives as many tokens."""
    if context.tokenizer is None:
        return None
    response = inputs.ids[inputs.first :]
    again = tuple(context.tokenizer.encode(context.tokenizer.decode(response), add_special_tokens=False))
    if again == response or len(again) != len(response):
        return None
    return replace(inputs, ids=(*inputs.prompt, *again))


def thinking_stripped(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """Without the thinking of earlier turns that the prompt has."""
    if context.tokenizer is None:
        return None
    text = context.tokenizer.decode(inputs.prompt)
    head, opened, rest = text.partition(THINKING)
    _, closed, tail = rest.partition(THINKING.replace("<", "</"))
    return inputs.with_prompt(_encoded(head + tail.lstrip(), context)) if opened and closed else None


def prompt_of_other(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """The prompt of another row of the log."""
    return inputs.with_prompt(inputs.elsewhere)


def packing_leaks(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """The sequence of the row before or after lies in front, and attention sees it; positions begin anew."""
    other = inputs.previous if value < 0 else inputs.following
    if not other or inputs.positions is not None:
        return None
    moved = inputs.with_prompt((*other, *inputs.prompt))
    return moved and replace(moved, positions=(*range(len(other)), *range(len(inputs.ids))))


def positions_jump(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """The response's positions are so many more than they should be; the prompt's are right."""
    if inputs.positions is not None:
        return None
    gap = int(value)
    return replace(
        inputs, positions=(*range(inputs.first), *(max(0, p + gap) for p in range(inputs.first, len(inputs.ids))))
    )


def positions_offset(inputs: Inputs, value: float, context: Context) -> Inputs | None:
    """All positions are so many more than they should be: seen by models with learned positions alone."""
    learned = not getattr(context.config, "rope_parameters", None) and not hasattr(context.config, "rope_theta")
    if inputs.positions is not None or not learned:
        return None
    return replace(inputs, positions=tuple(p + int(value) for p in range(len(inputs.ids))))


def window(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """Attention that looks back over so many tokens."""
    return replace(inputs, window=int(value)) if value < len(inputs.ids) else None


def window_missing(inputs: Inputs, value: float, context: Context) -> Inputs | None:  # noqa: ARG001
    """Attention without the model's sliding window."""
    width = getattr(context.config, "sliding_window", None)
    return replace(inputs, window=0) if width and width < len(inputs.ids) else None


def _user_words(inputs: Inputs, context: Context) -> str | None:
    """The words of the user in a prompt that the chat template made; None for any other prompt."""
    if context.template is None:
        return None
    before, after = context.template
    text: str = context.tokenizer.decode(inputs.prompt)
    if text.startswith(before) and text.endswith(after):
        return text[len(before) : len(text) - len(after)]
    return None


def _encoded(text: str, context: Context) -> tuple[int, ...]:
    return tuple(context.tokenizer.encode(text, add_special_tokens=False))
