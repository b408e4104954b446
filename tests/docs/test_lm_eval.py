"""lm-eval's own command on the pages: lm-eval parses it, and gives the model the tokens that an evaluation gives."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval._cli import HarnessCLI
from pages_fixture import commands
from study_fixture import ROOT
from tokenizers.processors import TemplateProcessing

from tailrl.model.policy import encode_prompt, load_policy, load_tokenizer, save_policy
from tailrl.tasks.problem import Problem, write_problems

BEGIN = "<pad>"
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<end>' }}{% endfor %}assistant: "


def documented(chat: bool) -> list[str]:
    """The page's command, for a model with or without a chat template, as the page says."""
    (command,) = (line for line in commands("how-to/your-data.md") if line.startswith("lm-eval"))
    plain = command.replace(" --apply_chat_template", "").replace(",add_bos_token=False", "")
    assert plain != command
    return shlex.split(command if chat else plain)


def test_lm_eval_parses_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", documented(chat=True))
    parsed = HarnessCLI().parse_args()
    assert parsed.apply_chat_template is True
    assert parsed.model_args == {"pretrained": "my_model", "add_bos_token": False}


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "adds"),
    [(CHAT, False), (CHAT, True), (BEGIN + CHAT, True), (None, True)],
    ids=lambda value: str(value)[:5],
)
def test_lm_evals_own_command_gives_the_same_tokens(
    template: str | None,
    adds: bool,
    policy_folder: Path,
    problems: list[Problem],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lm_eval.models.huggingface import HFLM

    tokenizer = load_tokenizer(policy_folder)
    tokenizer.chat_template = template
    if adds:
        tokenizer.bos_token = BEGIN
        special = [(BEGIN, tokenizer.convert_tokens_to_ids(BEGIN))]
        processor = TemplateProcessing(single=f"{BEGIN} $A", special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = processor
    model = load_policy(policy_folder)
    model.config.max_position_embeddings = 256  # lm-eval leaves no room for a prompt beside 64 tokens otherwise
    save_policy(model, tokenizer, tmp_path / "my_model")
    write_problems(problems[:3], tmp_path / "results/mine/data/evaluation.jsonl")
    (tmp_path / "workflow").symlink_to(ROOT / "workflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", documented(template is not None))
    seen: list[list[int]] = []

    def generate(_: HFLM, context: torch.Tensor, attn_mask: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        mask = others.get("attention_mask", attn_mask)
        seen.extend(row[kept.bool()].tolist() for row, kept in zip(context, mask, strict=True))
        return torch.cat([context, context[:, -1:]], 1)

    monkeypatch.setattr(HFLM, "_model_generate", generate)
    cli = HarnessCLI()
    cli.execute(cli.parse_args())
    own = load_tokenizer(tmp_path / "my_model")
    expected = [encode_prompt(own, problem.prompt) for problem in problems[:3]]
    assert sorted(seen) == sorted(expected)
    assert all(
        (tokens[0] == own.convert_tokens_to_ids(BEGIN)) == (BEGIN in (template or BEGIN * adds)) for tokens in seen
    )
