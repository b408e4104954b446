"""The tokenizer of a policy made from scratch: byte-level BPE with one token per digit.

It is trained on English prose and on worked solutions. Most of its vocabulary is useless to the task, which gives the
policy a real tail. The prose is Jules Verne's "In the Year 2889" (public domain) from reasoning-gym's package: no
download, and the same bytes for all who install the pins.
"""

from collections.abc import Iterable
from importlib.resources import files
from itertools import chain

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tailrl.runtime.errors import ConfigurationError

PAD, END = "<pad>", "<end>"


def prose() -> str:
    """About 53,000 characters of English."""
    return (files("reasoning_gym") / "data" / "in_the_year_2889.txt").read_text(encoding="utf-8")


def train_tokenizer(vocabulary_size: int, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocabulary_size` tokens; raises StudyError where the texts give fewer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain([prose()], texts), trainer)
    if tokenizer.get_vocab_size() < vocabulary_size:
        raise ConfigurationError(
            f"policy.scratch.vocabulary_size: the texts give {tokenizer.get_vocab_size()} tokens, "
            f"fewer than the {vocabulary_size} asked for"
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
