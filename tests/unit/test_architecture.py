"""The shape of the project: what is imported where and when, and how long files and functions may be.

Which room may import which is in pyproject.toml (`tool.importlinter`); `make lint` holds it.
"""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest
from parsed import body_of, nodes_of

from tailrl.config.sampler import ENGINES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "workflow" / "tailrl"
# Each heavy library has its home; the rest of the package runs where it is not installed.
HOMES = {
    "vllm": [f"rollout.vllm.{name}" for name in ("engine", "experts", "processor", "processor_v2", "quantization")],
    "lm_eval": ["evaluation.evaluate", "evaluation.harness"],
    "wandb": ["tracking.wandb_dashboard", "tracking.wandb_mirror"],
    "wandb_workspaces": ["tracking.wandb_dashboard"],
    "triton": ["kernels.triton_kernels", "objective.noise_kernel"],
    "trl": ["integrations.trl.base"],
}
WITHOUT_TORCH = ("config", "tasks", "tracking", "artifacts", "stats", "analysis", "pages", "claims", "report", "cli")
LONGEST_FILE, LONGEST_FUNCTION, LARGEST_ROOM, ROOT_MODULES = 300, 60, 0.15, 3


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
        *(f"tailrl.rollout.{engine}" for engine in ENGINES),
        "tailrl.kernels.cuda.",
        "tailrl.objective.noise_kernel",
    )
    assert [name for name in loaded if name.startswith(rooms)] == [] or module.startswith("rollout.vllm")
    heavy = {"lm_eval", "wandb", "wandb_workspaces", "datasets", "math_verify"} & {n.split(".")[0] for n in loaded}
    assert not heavy or module == "tasks.math_verify_worker"
    assert not any(name.split(".")[0] == "vllm" for name in loaded) or module in HOMES["vllm"]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_is_a_module_of_its_name(engine: str) -> None:
    assert any(name.startswith(f"rollout.{engine}") for name in MODULES)


def test_torch_is_not_everywhere() -> None:
    assert {m.split(".")[0] for m in MODULES if "torch" in libraries(m)} & set(WITHOUT_TORCH) == set()


def test_the_report_and_the_command_line_run_without_torch() -> None:
    script = (
        "import sys, tailrl.cli, tailrl.report.study, tailrl.tasks; "
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
    assert marked == {"pages.markdown", "report.page", "report.svg"}


# --- names ---------------------------------------------------------------------------------------------

# Tests of what several modules do together, by their room.
TOPICS = {
    "config": {"bad_inputs", "refusals"},
    "objective": {"propositions", "theory"},
    "tasks": {"fuzz"},
    "training": {"bad_checkpoints", "disturbed_runs", "every_arm", "exact_engine", "faults", "full_product"}
    | {"ranks", "resume", "transformers_engine", "update"},
}
# One name, one meaning in several modules: limits of several engines or devices, sources of tasks, type variables.
SHARED = {"ADMITTED_AT_ONCE", "CACHE_BYTES", "PREFILL_TOKENS", "SEQUENCES_IN_FLIGHT", "BLOCK_TOKENS", "KEPT_BYTES"}
SHARED |= {"KEPT_DENSITY", "KeptEntries", "HUB_NAME", "SPLIT", "Folder", "UNFINISHED", "Result", "Value"}


def test_tests_mirror_the_package() -> None:
    """Each is named for a module or a package of its room, or for one of the topics; more words may follow."""
    tests = ROOT / "tests" / "unit"
    unused = {(room, topic) for room, topics in TOPICS.items() for topic in topics}
    for file in sorted(tests.glob("*/**/test_*.py")):
        room, name = str(file.parent.relative_to(tests)), file.stem.removeprefix("test_")
        modules = {path.stem for path in (PACKAGE / room).glob("*")}
        if room == "benchmarks" or any(f"{name}_".startswith(f"{own}_") for own in modules):
            continue
        topics = {(room, topic) for topic in TOPICS.get(room, ()) if f"{name}_".startswith(f"{topic}_")}
        assert topics, file
        unused -= topics
    assert unused == set()


def test_a_class_or_a_constant_has_a_name_of_its_own() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for module, file in MODULES.items():
        for node in body_of(file):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]
            else:
                names = [node.name] if isinstance(node, ast.ClassDef) else []
            for name in names:
                homes[name].add(module)
    assert {name for name, found in homes.items() if len(found) > 1 and name[0].isupper()} == SHARED


# --- size --------------------------------------------------------------------------------------------

FILES = [*MODULES.values(), *sorted((ROOT / "workflow" / "rules").glob("*.smk"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_and_functions_are_short(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    long = {
        node.name: size
        for node in (nodes_of(file) if file.suffix == ".py" else [])
        if isinstance(node, ast.FunctionDef) and (size := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    }
    assert text.count("\n") <= LONGEST_FILE
    assert long == {}


@pytest.mark.parametrize("file", sorted((ROOT / "tests").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT)))
def test_test_files_are_short_or_say_why_not(file: Path) -> None:
    """Lines that are not blank. A longer file has a comment near its top: `# Long because ...`."""
    lines = file.read_text(encoding="utf-8").splitlines()
    reason = any(line.startswith("# Long because ") for line in lines[:30])
    assert sum(bool(line.strip()) for line in lines) <= LONGEST_FILE or reason


def test_no_room_is_crowded() -> None:
    rooms: Counter[str] = Counter()
    for name, file in MODULES.items():
        rooms[name.split(".")[0]] += file.read_text(encoding="utf-8").count("\n")
    assert {room: n for room, n in rooms.items() if n > LARGEST_ROOM * rooms.total()} == {}
    assert len(list(PACKAGE.glob("*.py"))) <= ROOT_MODULES


def test_the_snakefile_is_an_entry() -> None:
    assert len((ROOT / "Snakefile").read_text(encoding="utf-8").splitlines()) <= 40
