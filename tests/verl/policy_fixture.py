"""A tiny policy with a tokenizer and a chat template, as verl loads one."""

from pathlib import Path

import torch

VOCABULARY = 97


def write_policy(folder: Path, width: int = 32) -> Path:
    """A Llama of two layers whose distributions are neither flat nor sure: at ρ = e⁻³ a third of the tokens is safe."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width // 2, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
        eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 10
    model.save_pretrained(folder)
    words = [
        "<pad>",
        "<|im_end|>",
        "<|im_start|>",
        "user",
        "assistant",
        "\n",
        *(f"w{i}" for i in range(VOCABULARY - 6)),
    ]
    bare = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    bare.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    bare.decoder = decoders.WordPiece(prefix="", cleanup=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = (
        "{% for message in messages %}"
        "<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> "
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder
