"""`import tailrl` is light, and each public name is there once it is asked for."""

import ast
import pydoc
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest

import tailrl
from tailrl.runtime.errors import StudyError

HEAVY = "{'torch', 'transformers', 'numpy', 'pydantic', 'scipy', 'pandas', 'trl', 'vllm'}"


def test_the_import_is_light() -> None:
    script = f"import sys, tailrl; print(*{HEAVY} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert ended.stdout.strip() == ""


@pytest.mark.parametrize("name", tailrl._HOME)
def test_each_public_name_is_that_of_its_module_and_documented(name: str) -> None:
    if name == "with_dvp":
        pytest.importorskip("trl")
    public = getattr(tailrl, name)
    assert getattr(import_module(f"tailrl.{tailrl._HOME[name]}"), name) is public
    assert name in dir(tailrl) and name in (tailrl.__doc__ or "").replace(",", " ").replace(":", " ").split()


def test_help_is_a_screen_with_every_name() -> None:
    """Each name is explained by its own help."""
    shown = pydoc.render_doc(tailrl, renderer=pydoc.plaintext)
    assert len(shown.splitlines()) <= 64 and all(name in shown for name in tailrl._HOME)
    assert "class Vocabulary(" in pydoc.render_doc(tailrl.Vocabulary, renderer=pydoc.plaintext)


def test_type_checkers_know_every_public_name() -> None:
    """By the stub, which the wheel takes along beside its mark of a typed package."""
    package = Path(tailrl.__file__).parent
    stub = ast.parse((package / "__init__.pyi").read_text(encoding="utf-8"))
    imported = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {name: f"tailrl.{module}.{name}" for name, module in tailrl._HOME.items()}
    assert (package / "py.typed").exists()


def test_no_public_function_takes_or_gives_anything() -> None:
    """The types say more than Any."""
    for name in tailrl._HOME:
        public = getattr(tailrl, name, None)  # with_dvp needs TRL
        if isinstance(public, FunctionType):
            assert public.__annotations__ and not re.search(r"\bAny\b", repr(public.__annotations__)), name


def test_what_is_not_there_is_an_attribute_error() -> None:
    assert tailrl.StudyError is StudyError
    with pytest.raises(AttributeError, match="no attribute 'prune'"):
        _ = tailrl.prune


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`help` and `dir` go on without it."""
    monkeypatch.setitem(tailrl._HOME, "with_dvp", "nowhere")
    with pytest.raises(AttributeError, match=r"tailrl\.with_dvp needs tailrl\.nowhere, which is not installed"):
        _ = tailrl.with_dvp
    assert not hasattr(tailrl, "with_dvp")
