"""A package that is left out is missing within the block alone."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tailrl.runtime.imports import without

NAME = "a_package_to_leave_out"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)


def test_a_package_is_missing_within_the_block() -> None:
    with without(NAME):
        assert find_spec(NAME) is None
        with pytest.raises(ModuleNotFoundError):
            import_module(NAME)
    assert import_module(NAME).__name__ == NAME


def test_it_is_back_after_a_failure() -> None:
    with pytest.raises(RuntimeError), without(NAME):
        raise RuntimeError
    assert find_spec(NAME) is not None


def test_a_package_that_is_imported_already_stays() -> None:
    imported = import_module(NAME)
    with without(NAME):
        assert import_module(NAME) is imported
    assert import_module(NAME) is imported
