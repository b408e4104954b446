"""The four kinds of a user's error, by what is wrong; each is a StudyError, and none is told by its words."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

import tailrl
from tailrl.config.load import read_study
from tailrl.diagnosis.readers import read_log
from tailrl.model.policy import load_policy
from tailrl.runtime.errors import (
    ConfigurationError,
    DataError,
    ModelError,
    NumericalError,
    StorageError,
    StudyError,
    writing,
)
from tailrl.tasks.problem import read_problems

KINDS = {ConfigurationError, DataError, ModelError, StorageError}


def full(file: Path) -> None:
    with writing(file):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("content", "read", "kind"),
    [
        ("name: s\narms: {a: {trainin: {}}}\n", read_study, ConfigurationError),
        ("[", read_study, ConfigurationError),
        ('{"tokens": "none"}\n', lambda file: list(read_log([file])), DataError),
        ('{"prompt": 1}\n', read_problems, DataError),
        ("", lambda file: load_policy(file.parent), ModelError),
        (None, lambda file: list(read_log([file])), StorageError),
        (None, full, StorageError),
    ],
)
def test_an_error_is_of_the_kind_of_what_is_wrong(
    content: str | None, read: Callable[[Path], object], kind: type[StudyError], tmp_path: Path
) -> None:
    file = tmp_path / "given.jsonl"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(StudyError) as caught:
        read(file)
    assert {one for one in KINDS if isinstance(caught.value, one)} == {kind}


def test_a_value_that_is_not_finite_is_the_models() -> None:
    assert issubclass(NumericalError, ModelError)


def test_every_raised_error_has_a_kind() -> None:
    """But for the sentence of another process, whose kind stayed there."""
    package = Path(tailrl.__file__).parent
    bare = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "StudyError"
    }
    assert bare == {"runtime/launch.py"}
