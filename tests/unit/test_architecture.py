"""The shape of the project: what is imported where and when.

Which room may import which is in pyproject.toml (`tool.importlinter`); `make lint` holds it.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from parsed import nodes_of

from tailrl.config.sampler import SamplerSettings

ENGINES = [kind.PATH.partition(":")[0] for kind in SamplerSettings.kinds().values() if kind.PATH]
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "workflow" / "tailrl"
# Each heavy library has its home; the rest of the package runs where it is not installed.
HOMES = {
    "vllm": [
        f"rollout.vllm.{name}" for name in ("engine", "experts", "layers", "processor", "processor_v2", "quantization")
    ],
    "lm_eval": ["evaluation.evaluate", "evaluation.harness", "tasks.lm_eval"],
    "wandb": ["curves.history", "tracking.wandb_mirror", "tracking.wandb_workspace"],
    "wandb_workspaces": ["tracking.wandb_workspace"],
    "triton": ["kernels.triton_kernels", "objective.noise_kernel"],
    "trl": ["integrations.trl.base"],
}
WITHOUT_TORCH = ("config", "tasks", "tracking", "artifacts", "stats", "page_parts", "claims", "reports", "cli")


def module_name(file: Path) -> str:
    """`training.loop` for training/loop.py, and `tailrl` for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "tailrl"


MODULES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(module: str) -> list[tuple[str, bool]]:
    """What a module imports, by dotted name, and whether it does so when it is loaded."""
    nodes = nodes_of(MODULES[module])
    lazy = {
        inner
        for outer in nodes
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, node not in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are written in full"
            found += [(f"{node.module}.{alias.name}", node not in lazy) for alias in node.names]
    return found


def libraries(module: str) -> set[str]:
    """The top names of everything else that a module imports."""
    return {name.split(".")[0] for name, _ in imports(module)} - {"tailrl"}


@pytest.mark.parametrize("library", HOMES)
def test_each_heavy_library_is_imported_at_home(library: str) -> None:
    assert [module for module in MODULES if library in libraries(module)] == HOMES[library]


@pytest.mark.parametrize("module", MODULES)
def test_engines_and_heavy_libraries_are_imported_when_they_are_needed(module: str) -> None:
    """vLLM and Triton at the top of their own modules, which others import inside a function."""
    loaded = {name for name, at_once in imports(module) if at_once}
    rooms = (
        *ENGINES,
        "tailrl.kernels.cuda.",
        "tailrl.objective.noise_kernel",
    )
    assert [name for name in loaded if name.startswith(rooms)] == [] or module.startswith("rollout.vllm")
    heavy = {"lm_eval", "wandb", "wandb_workspaces", "datasets", "math_verify"} & {n.split(".")[0] for n in loaded}
    assert not heavy or module == "tasks.math_verify_worker"
    assert not any(name.split(".")[0] == "vllm" for name in loaded) or module in HOMES["vllm"]


def test_the_engines_are_where_their_settings_say() -> None:
    assert len(ENGINES) == 3 and all(name.removeprefix("tailrl.") in MODULES for name in ENGINES)


def test_torch_is_not_everywhere() -> None:
    assert {m.split(".")[0] for m in MODULES if "torch" in libraries(m)} & set(WITHOUT_TORCH) == set()


def test_the_report_and_the_command_line_run_without_torch() -> None:
    script = (
        "import sys, tailrl.cli, tailrl.reports.overview.study, tailrl.tasks; "
        "heavy = {'torch', 'transformers', 'vllm', 'lm_eval', 'wandb', 'datasets'}; "
        "print(*sorted(heavy & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == ""


def test_html_is_escaped_by_templates_alone() -> None:
    """Nothing is escaped by hand, no template takes a value as it is, and what Python gives as HTML is made here."""
    for module, file in MODULES.items():
        assert "html" not in libraries(module), module
        texts = [node.value for node in nodes_of(file) if isinstance(node, ast.Constant)]
        # Tags stand in templates; the module that makes Markdown harmless names one.
        tags = r"&(lt|gt|amp|quot|#\w+);" if module == "runtime.templates" else r"&(lt|gt|amp|quot|#\w+);|</\w"
        assert not [text for text in texts if isinstance(text, str) and re.search(tags, text)], module
    templates = sorted(PACKAGE.rglob("*.j2"))
    assert len(templates) > 10
    assert not [path for path in templates if re.search(r"\|\s*safe|autoescape|&(lt|gt|amp);", path.read_text("utf-8"))]
    marked = {module for module in MODULES if any(name == "markupsafe.Markup" for name, _ in imports(module))}
    assert marked == {"page_parts.drawing", "page_parts.markdown", "reports.page"}
