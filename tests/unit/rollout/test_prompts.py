"""The prompts as the engine gets them: what the log shows, and what it warns of."""

from copy import deepcopy

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tailrl.model.policy import encode_prompt
from tailrl.rollout.prompts import prompts_digest, show_prompts


@pytest.fixture
def appending(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer that ends every text with its end token, as those of T5 and some of Llama do."""
    made, end = deepcopy(tokenizer), tokenizer.eos_token
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    return made


def test_the_first_prompt_is_shown_as_text_and_tokens(
    tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [encode_prompt(tokenizer, text) for text in ("1+2=\n", "3+4=\n")]
    show_prompts(tokenizer, prompts, [tokenizer.eos_token_id], "arm a")
    ids = ", ".join(map(str, tokenizer.encode("1+2=\n")))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "tailrl: arm a: the first prompt is '1+2=\\n'",
        f"tailrl: arm a: its {len(prompts[0])} tokens are [{ids}]",
    ]


def test_the_end_of_a_long_prompt_is_shown(
    tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    show_prompts(tokenizer, [range(100, 1100)], [], "a")
    said = capsys.readouterr().err
    assert "its 1000 tokens are [100, 101," in said and "131, ..., 1068," in said and said.endswith(" 1099]\n")


def test_a_prompt_that_ends_with_an_end_token_is_a_warning(
    appending: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    end = appending.eos_token_id
    ended, open_ended = encode_prompt(appending, "1+2="), encode_prompt(appending, "3+4=")[:-1]
    assert ended[-1] == end
    show_prompts(appending, [open_ended, ended], [end, 7], "arm a")
    warning = capsys.readouterr().err.splitlines()[-1]
    assert warning.startswith(
        f"tailrl: warning: arm a: 1 of 2 prompts end with an end token, {end} ('<end>'), such as ["
    )
    assert str(ended) in warning


def test_prompts_are_known_by_their_tokens() -> None:
    """By all of them, their order, and where one ends."""
    digest = prompts_digest([(1, 2), (3,)])
    assert digest == prompts_digest([[1, 2], [3]])
    others = ([(1,), (2, 3)], [(3,), (1, 2)], [(1, 2)], [(1, 2), (4,)], [(1, 2, 3)])
    assert digest not in {prompts_digest(prompts) for prompts in others}
