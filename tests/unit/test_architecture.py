"""The shape of the project: which module may import which, read off the source, and how long a file may be."""

import ast
import subprocess
import sys
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from tailrl.sampler_settings import ENGINES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "workflow" / "tailrl"

# A module imports from its own layer and from those below it. `report` stands apart: see its own test.
LAYERS = [
    {
        "tailrl",
        "errors",
        "seeding",
        "base_settings",
        "sampler_settings",
        "training_settings",
        "settings",
        "gradient_settings",
        "distribution_settings",
        "sentences",
        "study",
        "records",
        "metrics",
        "alarm",
        "guard",
        "model_card",
        "modules",
        "provenance",
        "unlock",
        "launch",
    },
    {"ranks", "packing", "vocabulary", "noise", "disturbance", "operators", "objective", "mismatch", "tasks"}
    | {"logprobs", "logprobs_rows", "logprobs_chunks", "logprobs_triton", "logprobs_passes", "logprobs_kernels"},
    {"policy", "tokenizer", "rollout", "tracking", "mirror", "dashboard"},
    {"training", "evaluation", "gradients", "distributions", "trl", "planning"},
    {"problems", "base_policy", "download"},
    {"cli"},
]
# Each heavy library has its home; the rest of the package runs where it is not installed.
HOMES = {
    "vllm": ["rollout.vllm"],
    "lm_eval": ["evaluation"],
    "wandb": ["dashboard", "mirror"],
    "wandb_workspaces": ["dashboard"],
    "triton": ["logprobs_kernels"],
    "trl": ["trl.base"],
}
WITHOUT_TORCH = {
    "errors",
    "seeding",
    "base_settings",
    "training_settings",
    "settings",
    "sentences",
    "study",
    "records",
    "metrics",
    "alarm",
    "model_card",
    "modules",
    "provenance",
    "tasks",
    "unlock",
}
WITHOUT_TORCH |= {
    "tokenizer",
    "tracking",
    "mirror",
    "dashboard",
    "cli",
    "report",
    "gradient_settings",
    "distribution_settings",
}
LONGEST = 300


def module_name(file: Path) -> str:
    """`training.loop` for training/loop.py, and `tailrl` for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "tailrl"


MODULES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(module: str) -> list[tuple[str, bool]]:
    """What a module imports, by dotted name without our own package's, and whether it does so when it is loaded.

    `from a import b` counts as a.b where that is a module of ours, else as a.
    """
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    lazy = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are written in full"
            assert node.module
            both = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("tailrl.") in MODULES else node.module for name in both]
        found += [(name, node not in lazy) for name in names]
    return found


def ours(module: str) -> set[str]:
    """The package's modules that a module imports."""
    names = {name.removeprefix("tailrl.") for name, _ in imports(module) if name.split(".")[0] == "tailrl"}
    return names & MODULES.keys()


def others(module: str) -> set[str]:
    """The top names of everything else that it imports."""
    return {name.split(".")[0] for name, _ in imports(module)} - {"tailrl"}


def room(module: str) -> str:
    return module.split(".")[0]


def test_every_module_has_a_layer() -> None:
    rooms = list(chain(*LAYERS))
    assert len(rooms) == len(set(rooms))
    assert {room(module) for module in MODULES} - {"report"} == set(rooms)


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) not in ("report", "cli")])
def test_imports_go_one_way(module: str) -> None:
    level = next(level for level, layer in enumerate(LAYERS) if room(module) in layer)
    allowed = set(chain(*LAYERS[: level + 1]))
    assert {room(name) for name in ours(module)} <= allowed


def test_the_bottom_layer_knows_little() -> None:
    known = {
        "base_settings": set(),
        "sampler_settings": {"base_settings"},
        "guard": {"errors"},
        "training_settings": {"alarm", "base_settings", "guard"},
        "settings": {"base_settings", "guard", "sampler_settings", "training_settings"},
        "alarm": {"metrics"},
        "gradient_settings": {"settings"},
        "distribution_settings": {"settings"},
        "sentences": {"errors"},
        "study": {"errors", "sentences", "settings", "gradient_settings", "distribution_settings"},
        "records": {"errors"},
        "modules": {"sampler_settings"},
    }
    assert {module: ours(module) for module in known} == known
    assert all(not ours(module) for module in ("errors", "seeding", "metrics", "provenance"))


def test_no_module_imports_itself_in_a_circle() -> None:
    """When it is loaded; `rollout` names its engine's module inside a function, and that one knows `rollout`."""
    waiting = {m: {n.removeprefix("tailrl.") for n, at_once in imports(m) if at_once} & ours(m) for m in MODULES}
    while waiting:
        free = [module for module, needs in waiting.items() if not needs & waiting.keys()]
        assert free, f"a circle among {sorted(waiting)}"
        waiting = {module: needs for module, needs in waiting.items() if module not in free}


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) == "report"])
def test_the_report_knows_the_study_and_files_only(module: str) -> None:
    assert {room(name) for name in ours(module)} <= {"report", "study", "settings", "errors", "alarm"}


def test_only_the_command_line_imports_the_report_and_nothing_imports_it() -> None:
    assert {room(name) for name in MODULES if any(room(known) == "report" for known in ours(name))} == {"cli", "report"}
    assert [name for name in MODULES if "cli" in ours(name)] == []


@pytest.mark.parametrize("library", HOMES)
def test_each_heavy_library_is_imported_at_home(library: str) -> None:
    assert [module for module in MODULES if library in others(module)] == HOMES[library]


def test_engines_are_imported_when_they_are_needed() -> None:
    """vLLM and Triton at the top of their own modules, those and the other engines inside a function; the other
    libraries inside functions."""
    for module in MODULES:
        loaded = {name for name, at_once in imports(module) if at_once}
        engines = {f"tailrl.rollout.{engine}" for engine in ENGINES}
        assert not (engines | {"tailrl.logprobs_triton"}) & loaded, module
        tops = {name.split(".")[0] for name in loaded}
        assert (
            not tops & {"lm_eval", "wandb", "wandb_workspaces", "datasets", "math_verify"}
            or module == "tasks.math_verify_worker"
        ), module
        assert "vllm" not in tops or module in HOMES["vllm"]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_is_a_module_of_its_name(engine: str) -> None:
    assert f"rollout.{engine}" in MODULES


def test_torch_is_not_everywhere() -> None:
    assert {room(m) for m in MODULES if "torch" in others(m)} & WITHOUT_TORCH == set()


def test_the_report_and_the_command_line_run_without_torch() -> None:
    script = (
        "import sys, tailrl.cli, tailrl.report, tailrl.tasks; "
        "heavy = {'torch', 'transformers', 'vllm', 'lm_eval', 'wandb', 'datasets'}; "
        "print(*sorted(heavy & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == ""


# --- size --------------------------------------------------------------------------------------------

FILES = [
    *MODULES.values(),
    *sorted((ROOT / "workflow" / "rules").glob("*.smk")),
    *sorted((ROOT / "tests").rglob("*.py")),
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_are_short_or_say_why_not(file: Path) -> None:
    """Lines that are not blank. A longer file has a comment near its top: `# Long because ...`."""
    lines = file.read_text(encoding="utf-8").splitlines()
    written = [line for line in lines if line.strip()]
    reason = any(line.startswith("# Long because ") for line in lines[:30])
    assert len(written) <= LONGEST or reason, f"{len(written)} lines: split it, or say `# Long because ...` at its top"


def test_the_snakefile_is_an_entry() -> None:
    assert len((ROOT / "Snakefile").read_text(encoding="utf-8").splitlines()) <= 40
