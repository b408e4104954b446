"""`import tailrl` is light, and each public name is there once it is asked for."""

import pydoc
import subprocess
import sys
from importlib import import_module

import pytest

import tailrl
from tailrl.runtime.errors import StudyError

HEAVY = "{'torch', 'transformers', 'numpy', 'pydantic', 'scipy', 'pandas', 'trl', 'vllm'}"


def test_the_import_is_light() -> None:
    script = f"import sys, tailrl; print(*{HEAVY} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert ended.stdout.strip() == ""


@pytest.mark.parametrize("name", tailrl.__all__)
def test_each_public_name_is_that_of_its_module_and_documented(name: str) -> None:
    if name == "with_dvp":
        pytest.importorskip("trl")
    public = getattr(tailrl, name)
    assert getattr(import_module(f"tailrl.{tailrl._HOME[name]}"), name) is public
    assert name in dir(tailrl) and name in (tailrl.__doc__ or "").replace(",", " ").replace(":", " ").split()


def test_help_is_not_empty() -> None:
    shown = pydoc.render_doc(tailrl, renderer=pydoc.plaintext)
    assert "Dynamic Vocabulary Pruning" in shown and "constrained_logprobs(" in shown and "class Vocabulary(" in shown


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
