"""Every bad input of the catalogue ends with exit code 1 and one sentence that names what is wrong and where."""

import sys
from pathlib import Path

import pytest
from bad_inputs import Case, catalogue

from tailrl.cli import main
from tailrl.model.policy import load_tokenizer

CASES = list(catalogue())


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def without_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers are read in this process alone: a process for each costs seconds, and its own tests start it."""
    monkeypatch.setattr("tailrl.training.base_policy.try_tokenizer", load_tokenizer)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_input_is_one_sentence(
    case: Case,
    tmp_path: Path,
    policy_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tailrl", *case.arguments(tmp_path, policy_folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    sentence = ended.value.code
    assert isinstance(sentence, str) and sentence.startswith("tailrl: "), "sys.exit prints a text and exits with 1"
    assert "\n" not in sentence and "Traceback" not in sentence
    assert len(sentence) < 600
    assert [word.format(folder=tmp_path) for word in case.words if word.format(folder=tmp_path) not in sentence] == []
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "model" / "loaded").exists(), "code that came with the model ran"


def test_the_catalogue_is_large_and_its_names_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60
