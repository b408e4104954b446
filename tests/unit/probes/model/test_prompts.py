"""Files of prompts, and what they leave for a response."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tailrl.probes.model.prompts import DEFAULT_PROMPTS, encode_prompts, read_prompts
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem, write_problems


def test_lines_of_text_and_objects_of_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n  two \n", encoding="utf-8")
    assert read_prompts(tmp_path / "a.txt") == {
        f"{tmp_path}/a.txt, line 1": "one",
        f"{tmp_path}/a.txt, line 3": "  two ",
    }
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "one\\ntwo"}\n\n{"prompt": "three", "answer": "3"}\n', encoding="utf-8"
    )
    assert list(read_prompts(tmp_path / "a.jsonl").values()) == ["one\ntwo", "three"]


def test_a_studys_problems_are_prompts(problems: list[Problem], tmp_path: Path) -> None:
    write_problems(problems[:3], tmp_path / "train.jsonl")
    assert list(read_prompts(tmp_path / "train.jsonl").values()) == [problem.prompt for problem in problems[:3]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", "a.txt: holds no prompt"),
        ("a.jsonl", b"\n \n", "a.jsonl: holds no prompt"),
        ("a.txt", b"\xff", "a.txt: cannot be read: "),
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}\n', r"a.jsonl, line 2: its prompt must be a text \(given: None\)"),
        ("a.jsonl", b'{"prompt": ""}', "a.jsonl, line 1: its prompt must be a text"),
        ("a.jsonl", b'{"prompt": ["x"]}', r"a.jsonl, line 1: its prompt must be a text \(given: \['x'\]\)"),
        ("a.jsonl", b'{"prompt": "\\ud800"}', "a.jsonl, line 1: its prompt is not valid Unicode"),
        ("a.jsonl", b'"x"', "a.jsonl, line 1: holds str, not a JSON object"),
        ("a.jsonl", b"x", "a.jsonl, line 1: not valid JSON"),
    ],
)
def test_what_holds_no_prompts_is_refused(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StudyError, match=words):
        read_prompts(tmp_path / name)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="nowhere: is missing"):
        read_prompts(tmp_path / "nowhere")


def test_responses_fill_what_the_model_has_room_for(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = {"a": "12", "b": "1234"}
    prompts, longest = encode_prompts(tokenizer, texts, 20, None)
    assert [len(ids) for ids in prompts] == [2, 4] and longest == 16
    assert encode_prompts(tokenizer, texts, 1000, None)[1] == 64
    assert encode_prompts(tokenizer, texts, 20, 16)[1] == 16
    with pytest.raises(
        StudyError, match=r"b: 4 tokens of prompt and 17 of response \(--max-new-tokens\) exceed the model's 20"
    ):
        encode_prompts(tokenizer, texts, 20, 17)
    with pytest.raises(StudyError, match="b: 4 tokens of prompt and 1 of response exceed the model's 4"):
        encode_prompts(tokenizer, texts, 4, None)


def test_a_prompt_without_tokens_is_refused() -> None:
    class Silent:
        chat_template = None

        def encode(self, _: str) -> list[int]:
            return []

    with pytest.raises(StudyError, match="a: the tokenizer makes no token of this prompt"):
        encode_prompts(Silent(), {"a": "x"}, 20, None)


def test_the_set_that_comes_along_fits_a_small_policy(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = read_prompts(DEFAULT_PROMPTS)
    assert len(texts) >= 20
    assert encode_prompts(tokenizer, texts, 64, None)[1] >= 16
