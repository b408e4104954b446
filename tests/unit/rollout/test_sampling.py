"""Which tokens end a response."""

from pathlib import Path
from shutil import copytree

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tailrl.rollout.sampling import stop_tokens

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NO_ASSISTANT = "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (None, []),
        (CHATML, ["<|im_end|>"]),
        (CHATML.replace("<|im_end|>", " <end>"), []),
        (PLAIN, []),
        (NO_ASSISTANT, []),
    ],
)
def test_a_turn_of_the_chat_template_ends_a_response(
    template: str | None, ends: list[str], policy_folder: Path, tmp_path: Path
) -> None:
    """As in a base model with a template: its configuration names the end of a text alone."""
    folder = copytree(policy_folder, tmp_path / "policy")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=[3, 5]).save_pretrained(folder)
    expected = {tokenizer.eos_token_id, 3, 5, *map(tokenizer.convert_tokens_to_ids, ends)}
    assert stop_tokens(folder) == sorted(expected)


def test_the_tokenizers_end_counts_where_the_configuration_names_another(policy_folder: Path, tmp_path: Path) -> None:
    folder = copytree(policy_folder, tmp_path / "policy")
    before = stop_tokens(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, eos_token="<pad>")
    tokenizer.save_pretrained(folder)
    assert stop_tokens(folder) == sorted({*before, tokenizer.pad_token_id})
