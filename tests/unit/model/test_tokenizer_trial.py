"""A hostile tokenizer or chat template ends in one sentence, within limits of time and memory."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrl.config.policy import PretrainedPolicy
from tailrl.model import tokenizer_trial
from tailrl.model.tokenizer_trial import try_tokenizer
from tailrl.runtime.errors import StudyError
from tailrl.tasks.verifier import reply_of
from tailrl.training.base_policy import write_base_policy


@pytest.fixture
def folder(policy_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny policy that a test may damage."""
    return Path(shutil.copytree(policy_folder, tmp_path / "policy"))


def template(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text, encoding="utf-8") and None


def normalizer(*steps: dict[str, Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "tokenizer.json"
        data = json.loads(file.read_text(encoding="utf-8"))
        data["normalizer"] = {"type": "Sequence", "normalizers": steps}
        file.write_text(json.dumps(data), encoding="utf-8")

    return change


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


HOSTILE = {
    "a loop without end": (
        template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        "within 4 s of processor time",
    ),
    "a text of 10^11 letters": (template("{{ 'a' * 10**11 }}"), "fails on a prompt"),
    "an exception of its own": (template("{{ raise_exception('no user') }}"), "fails on a prompt: no user"),
    "a syntax error": (template("{% for %}"), "fails on a prompt"),
    "34 replacements of 1 by 11": (normalizer(*[replace({"String": "1"}, "11")] * 34), ""),
    "a pattern that backtracks": (normalizer(replace({"Regex": "(a|a|aa)+$"}, "b")), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_one_sentence(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_trial, "SECONDS", 4.0)
    change, words = HOSTILE[name]
    change(folder)
    with pytest.raises(StudyError) as caught:
        try_tokenizer(str(folder))
    sentence = str(caught.value)
    assert sentence.startswith(f"{folder}: its tokenizer") and words in sentence and "\n" not in sentence


@pytest.mark.slow  # an ordinary tokenizer passes the same trial
def test_a_base_policy_is_made_from_a_tokenizer_that_was_tried(folder: Path, tmp_path: Path) -> None:
    """The trial comes first: the template would end no sooner in this process. It is the fast hostile one, too."""
    template("{{ 'a' * 10**11 }}")(folder)
    with pytest.raises(StudyError, match="chat template fails on a prompt"):
        write_base_policy(PretrainedPolicy(source="pretrained", path=str(folder)), tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_ordinary_tokenizer_passes(folder: Path) -> None:
    template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")(folder)
    try_tokenizer(str(folder))


def test_a_reply_that_follows_at_once_is_read_alone() -> None:
    with subprocess.Popen(["printf", '"ready"\n"words"\n'], bufsize=0, stdout=subprocess.PIPE) as process:
        assert process.wait() == 0
        assert [reply_of(process, 1.0), reply_of(process, 1.0)] == ["ready", "words"]
