"""The prompts of a probe: those of a file, or the set that comes with the package; and how long responses may be."""

import io
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tailrl.artifacts.files import parse_object, read_text
from tailrl.model.policy import encode_prompt
from tailrl.runtime.errors import ConfigurationError, DataError, one_line
from tailrl.runtime.jsonl import numbered_lines
from tailrl.runtime.limits import MEMORY, limited_memory

DEFAULT_PROMPTS = Path(__file__).with_name("prompts.txt")

USUAL_NEW_TOKENS = 64
"""The longest response if nothing else is said, tokens."""


def read_prompts(file: Path) -> dict[str, str]:
    """The prompts in a file, by where they stand: its lines, or the `prompt` of each line's object in JSONL.

    Lines without text are left out.

    Raises:
        StudyError: the file cannot be read or holds no prompt, or a line of JSONL has none.
    """
    with limited_memory(MEMORY, str(file)):
        return _read_prompts(file)


def _read_prompts(file: Path) -> dict[str, str]:
    numbered = numbered_lines(io.BytesIO(read_text(file).encode("utf-8")), file)
    lines = {f"{file}, line {number}": line.decode("utf-8").rstrip("\r\n") for number, line in numbered}
    lines = {where: line for where, line in lines.items() if line.strip()}
    if not lines:
        raise DataError(f"{file}: holds no prompt")
    return {where: _prompt(line, where) for where, line in lines.items()} if file.suffix == ".jsonl" else lines


def _prompt(line: str, where: str) -> str:
    prompt = parse_object(line, where).get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise DataError(f"{where}: its prompt must be a text (given: {one_line(repr(prompt))})")
    try:
        prompt.encode()  # a lone surrogate is JSON, but no tokenizer reads it
    except UnicodeEncodeError:
        raise DataError(f"{where}: its prompt is not valid Unicode") from None
    return prompt


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, texts: dict[str, str], positions: int, max_new_tokens: int | None
) -> tuple[list[tuple[int, ...]], int]:
    """The token ids of each prompt, and the longest response in tokens.

    Args:
        tokenizer: its chat template is used if it has one.
        texts: from `read_prompts`.
        positions: tokens of prompt and response together that the model supports.
        max_new_tokens: longest response; None: USUAL_NEW_TOKENS, or less where the model's positions end before.

    Raises:
        StudyError: a prompt has no token, or leaves no room for a response.
    """
    found = [tuple(encode_prompt(tokenizer, text)) for text in texts.values()]
    for where, ids in zip(texts, found, strict=True):
        if not ids:
            raise DataError(f"{where}: the tokenizer makes no token of this prompt")
        response = max_new_tokens or 1
        if len(ids) + response > positions:
            of_response = f"{response} of response{' (--max-new-tokens)' if max_new_tokens else ''}"
            raise ConfigurationError(
                f"{where}: {len(ids)} tokens of prompt and {of_response} exceed the model's {positions}"
            )
    return found, max_new_tokens or min(USUAL_NEW_TOKENS, positions - max(map(len, found)))
