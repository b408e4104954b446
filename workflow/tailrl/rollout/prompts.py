"""The prompts as the engine gets them: shown in the log, known by a digest, and warned of where they look wrong.

A chat template may hold the date, another version of a tokenizer may split a text elsewhere, and some tokenizers append
their end token: none of that is seen in the problems' texts.
"""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from tailrl.artifacts.manifest import digest_of
from tailrl.artifacts.records import FirstPrompt
from tailrl.runtime.errors import one_line, say

SHOWN = 32  # token ids at each end of a long prompt that the log shows

CLOCK = "strftime_now"  # the function of chat templates that gives the date


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """One SHA-256 over the token ids of all prompts, in order."""
    return digest_of([list(prompt) for prompt in prompts])


def first_prompt(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]) -> FirstPrompt:
    """The first prompt's token ids, and the text that they stand for, special tokens included."""
    tokens = list(prompts[0])
    return FirstPrompt(text=tokenizer.decode(tokens, skip_special_tokens=False), tokens=tokens)


def show_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], ends: Collection[int], where: str
) -> None:
    """Say the first prompt's text and token ids, then what is odd about the prompts.

    Args:
        tokenizer: of the policy.
        prompts: token ids, at least one prompt.
        ends: the end tokens (`sampling.stop_tokens`).
        where: begins the sentences, such as the arm and the seed.
    """
    first = first_prompt(tokenizer, prompts)
    say(f"{where}: the first prompt is {one_line(repr(first.text))}")
    say(f"{where}: its {len(first.tokens)} tokens are {_shown(first.tokens)}")
    if ended := [prompt for prompt in prompts if prompt and prompt[-1] in ends]:
        token = ended[0][-1]
        say(
            f"warning: {where}: {len(ended)} of {len(prompts)} prompts end with an end token, {token} "
            f"({tokenizer.decode([token])!r}), such as {_shown(ended[0])}: responses would follow an end; look at the "
            "tokenizer's post_processor and chat template"
        )
    if CLOCK in str(tokenizer.chat_template):
        say(
            f"warning: {where}: the chat template holds the date ({CLOCK}): tomorrow's prompts are others, so that a "
            "run does not go on and evaluations are not comparable; write a fixed date into the template"
        )


def _shown(tokens: Sequence[int]) -> str:
    ids = list(map(str, tokens))
    if len(ids) > 2 * SHOWN:
        ids = [*ids[:SHOWN], "...", *ids[-SHOWN:]]
    return f"[{', '.join(ids)}]"
