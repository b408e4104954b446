"""The source files that a rule depends on, against the modules that Python really loads."""

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tailrl
from tailrl.config.jobs import Evaluation
from tailrl.config.load import parse_study
from tailrl.config.source_files import (
    JOBS,
    PACKAGE,
    _imports,
    at_start,
    digest_of_files,
    edited,
    imported_modules,
    job_files,
    module_file,
    source_files,
)
from tailrl.config.study import Study

VLLM = ("__init__", "engine", "experts", "processor", "processor_v2", "quantization", "recorder", "scheduling", "twin")
OWN = {
    "vllm": {f"rollout/vllm/{name}.py" for name in (*VLLM, "classes", "worker")},
    "exact": {"rollout/exact.py"},
    "transformers": {"rollout/transformers.py", "rollout/growing_cache.py"},
}
"""The files of each engine; the cache of the exact one is imported by it alone."""


def study(engine: str, **more: Any) -> Study:
    arm = {"sampler": {"engine": engine, "dtype": "float32"}, "correction": more.pop("correction", {})}
    return parse_study({"name": "s", "arms": {"a": arm}, **more})


def training_files(engine: str, **more: Any) -> tuple[str, ...]:
    return job_files("train", study(engine, **more).run("a"))


def relative(files: Sequence[str]) -> list[str]:
    return [Path(file).resolve().relative_to(PACKAGE).as_posix() for file in files]


def names(*modules: str) -> set[str]:
    return set(relative(source_files(*modules)))


@pytest.mark.parametrize("job", JOBS)
def test_a_new_version_makes_no_result_stale(job: str) -> None:
    written = f'"{tailrl.__version__}"'
    assert written in (PACKAGE / "runtime/version.py").read_text(encoding="utf-8")
    assert [file for file in job_files(job) if written in Path(file).read_text(encoding="utf-8")] == []


def test_the_files_of_modules() -> None:
    assert module_file("tailrl") == PACKAGE / "__init__.py"
    assert module_file("tailrl.reports") == PACKAGE / "reports" / "__init__.py"
    assert module_file("tailrl.reports.curves") == PACKAGE / "reports" / "curves.py"
    assert [module_file(name) for name in ("torch", "tailrl.nothing", "tailrl.config.study.Study")] == [None] * 3


def test_the_data_of_a_package_counts_with_it() -> None:
    assert "claims/catalogue/mismatch.yaml" in names("tailrl.reports.overview.study")
    data = [file for file in relative(training_files("vllm")) if file.endswith(".yaml")]
    assert [file for file in data if file.startswith("config/")] == [], "presets are expanded before a job begins"
    assert {"tracking/metrics.yaml", "watch/alarms.yaml"} <= set(data)


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "import os, tailrl.runtime.seeding\n"
        "from tailrl.runtime import errors, nothing\n"
        "from tailrl.rollout.types import Problem\n"
        "def f():\n    import tailrl.objective.safe_set as v\n"
        "    class A:\n        from tailrl.rollout.vllm.engine import VllmSampler\n",
        encoding="utf-8",
    )
    found = imported_modules(tmp_path / "code.py")
    assert found == {
        *("tailrl.runtime", "tailrl.runtime.seeding", "tailrl.runtime.errors", "tailrl.rollout.types"),
        *("tailrl.objective.safe_set", "tailrl.rollout.vllm.engine"),
    }


def test_the_closure_follows_imports_and_lazy_imports() -> None:
    found = names("tailrl.training.loop")
    assert {
        "training/loop.py",
        "training/step.py",
        "objective/corrections.py",
        "runtime/errors.py",
    } <= found
    assert "rollout/vllm/layers.py" in names("tailrl.explanation.layers")  # imported inside a function
    assert {"__init__.py", "training/__init__.py", "objective/__init__.py"} <= found  # packages run too
    assert not found & {"cli/jobs.py", "evaluation/evaluate.py", "training/base_policy.py"}
    assert not any(name.startswith("reports/") for name in found)


@pytest.mark.parametrize("engine", OWN)
def test_training_depends_on_its_engine_and_on_the_process_that_reads_answers(engine: str) -> None:
    found = set(relative(training_files(engine)))
    assert {"training/step.py", "tasks/math_verify_worker.py", *OWN[engine]} <= found
    assert not set().union(*(OWN[other] for other in OWN if other != engine)) & found


def test_no_run_depends_on_how_results_are_read_together() -> None:
    """Else an edit of what a report or a probe reads would train every run again."""
    found = set(relative(training_files("exact")))
    assert {"artifacts/manifest.py", "artifacts/records.py"} <= found
    assert not {f"artifacts/{name}.py" for name in ("evaluation", "probes", "results", "tables")} & found
    assert not {"config/study.py", "config/gradients.py", "config/distributions.py"} & found


def test_the_templates_of_a_package_are_its_own() -> None:
    found = names("tailrl.reports.overview.study")
    own = {f"reports/{file}" for file in ("overview/summary.md.j2", "overview/screen.css", "mismatch/kept.rst")}
    assert own | {"page_parts/templates/page.html.j2", "page_parts/templates/page.css"} <= found
    assert not any(name.endswith(".j2") for name in names("tailrl.training.loop", "tailrl.evaluation.evaluate"))
    others = {"reports/gradients/page.md.j2", "reports/parts/page.md.j2"}
    assert not others & found and others <= names("tailrl.reports.gradients.page", "tailrl.reports.parts.page")


def test_several_modules_give_one_sorted_list() -> None:
    files = source_files("tailrl.config.study", "tailrl.runtime.seeding", "tailrl.config.study")
    assert files == sorted(set(files))
    assert set(files) == set(source_files("tailrl.config.study")) | set(source_files("tailrl.runtime.seeding"))
    assert all(Path(file).is_file() for file in files)


@pytest.mark.parametrize("name", ["tailrl.trainng", "torch", "tailrl.config.study.Study", "tailrl.missing.loop"])
def test_an_unknown_module_raises(name: str) -> None:
    with pytest.raises(ValueError, match="is not a module of tailrl"):
        source_files("tailrl.config.study", name)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["tailrl.tasks.registry", "tailrl.reports.overview.study"])
def test_python_loads_no_other_file(module: str) -> None:
    script = (
        f"import sys, {module}; print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'tailrl'))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    # Of the settings of tasks, those count that a job names.
    named = {os.path.relpath(file) for file in (PACKAGE / "config/tasks").glob("*.py")}
    assert {os.path.relpath(file) for file in loaded} - named <= set(source_files(module))
    assert len(loaded) > 3


TASKS = tuple(f"{room}/{task}.py" for task in ("words", "aime25", "chain") for room in ("config/tasks", "tasks"))


def test_a_job_depends_on_the_tasks_that_its_settings_name() -> None:
    words = study("exact", task={"name": "words", "problems": 50})
    assert {*TASKS} & {*relative(job_files("problems", words.problems()))} == {*TASKS[:2]}
    assert {*TASKS} & {*relative(job_files("train", words.run("a")))} == {TASKS[0]}
    assert not {*TASKS} & {*relative(training_files("exact"))}
    stages = {"source": "scratch", "warm_start": {"stages": [{"name": "words", "problems": 50}]}}
    warmed = study("exact", policy=stages)
    assert {*TASKS} & {*relative(job_files("problems", warmed.problems()))} == {*TASKS[:2]}
    assert {*TASKS} & {*relative(job_files("policy", warmed.policy))} == {TASKS[0]}


def test_an_evaluation_depends_on_its_task_file() -> None:
    files = job_files("evaluate", Evaluation())
    assert "workflow/eval_tasks/boxed.yaml" in files and all(Path(file).is_file() for file in files)


@pytest.mark.parametrize("job", JOBS)
def test_every_kind_of_job_has_files(job: str) -> None:
    assert {"workflow/tailrl/runtime/errors.py"} < set(job_files(job))


def test_an_edit_since_the_start_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1\n", encoding="utf-8")
    (tmp_path / "b.py").write_text("2\n", encoding="utf-8")
    files = (str(tmp_path / "a.py"), str(tmp_path / "b.py"))
    before, digest = at_start(files), digest_of_files(files)
    assert edited(before) == [] and digest_of_files(files) == digest
    (tmp_path / "b.py").write_text("3\n", encoding="utf-8")
    assert at_start(files) == before, "what the process began with"
    assert edited(before) == [os.path.relpath(files[1], PACKAGE.parent)] and digest_of_files(files) != digest
    (tmp_path / "b.py").write_text("2\n", encoding="utf-8")
    assert edited(before) == [] and digest_of_files(files) == digest
    (tmp_path / "a.py").unlink()
    assert edited(before) == [os.path.relpath(files[0], PACKAGE.parent)] and digest_of_files(files) != digest


EVERYWHERE = """
if a:
    import m1
elif b:
    import m2
else:
    from m3 import x
try:
    import m4
except E:
    import m5
else:
    import m6
finally:
    import m7
with c:
    for d in e:
        import m8
    else:
        import m9
match f:
    case 1:
        import m10
class C:
    async def g(self):
        while True:
            import m11
"""


def test_an_import_is_found_in_every_kind_of_block() -> None:
    """Against a walk over every node, on this text and on the whole package."""
    texts = [EVERYWHERE, *(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))]
    for tree in map(ast.parse, texts):
        walked = {node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}
        found = list(_imports(tree.body))
        assert len(found) == len(walked) and set(found) == walked
    assert len(list(_imports(ast.parse(EVERYWHERE).body))) == 11
