"""The tokenizer of a policy made from scratch."""

import pytest
from transformers import PreTrainedTokenizerFast

from tailrl.model.tokenizer import END, PAD, prose, train_tokenizer
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem


def test_it_has_exactly_the_size_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == tokenizer.vocab_size == 600
    assert sorted(tokenizer.get_vocab().values()) == list(range(600))


def test_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode(f"1{END}")[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer.encode(f"1{END}"), skip_special_tokens=True) == "1"


@pytest.mark.parametrize("text", ["17+15-12=\n", "  1 000\t½ é 漢字 \U0001f600\x00", "the year 2889", ""])
def test_every_text_decodes_to_itself(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    digits = {token for token in tokenizer.get_vocab() if any(char.isdigit() and char.isascii() for char in token)}
    assert digits == set("0123456789")
    assert len(tokenizer.encode("1234567890")) == 10


def test_it_is_deterministic(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> None:
    again = train_tokenizer(600, [problem.prompt + problem.solution for problem in problems])
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_most_of_the_vocabulary_is_useless_to_the_task(
    tokenizer: PreTrainedTokenizerFast, problems: list[Problem]
) -> None:
    used = {token for p in problems for token in tokenizer.encode(p.prompt + p.solution)}
    assert len(used) < 100


def test_texts_that_give_too_few_tokens_are_one_sentence() -> None:
    with pytest.raises(StudyError, match=r"texts give \d+ tokens, fewer than the 100000 asked for"):
        train_tokenizer(100_000, ["1+1=2"])


def test_the_prose_is_english() -> None:
    assert len(prose()) > 40_000
    assert prose().count(" the ") > 300
