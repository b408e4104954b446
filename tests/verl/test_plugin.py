"""verl loads the plugin by its entry point; a run that asks for one that does not load ends."""

import os
import subprocess
import sys
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

NAME_A_TRAINER = "from verl.trainer.ppo.v1 import get_trainer_cls; print(get_trainer_cls('tailrl').__name__)"


def ended(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = os.environ | {
        "VERL_PLATFORM": "",
        "VERL_USE_EXTERNAL_MODULES": "",
    }  # as a user's, without the tests' platform
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=plain | environment
    )


def test_the_entry_point_is_this_plugin() -> None:
    assert [point.value for point in entry_points(group="verl.plugins")] == ["tailrl.integrations.verl.plugin"]


def test_verl_and_a_study_have_no_transformers_in_common() -> None:
    """So pip cannot install both extras. It goes by these lines of metadata."""
    of_verl = [Requirement(line) for line in requires("verl") or () if "extra" not in line]
    of_study = [Requirement(line) for line in requires("tailrl") or () if "extra" in line]
    [verls] = [one.specifier for one in of_verl if one.name == "transformers"]
    ours = [one.specifier for one in of_study if one.name == "transformers" and one.marker.evaluate({"extra": "probe"})]
    assert "5.10.4" in verls and ours
    every = [f"{major}.{minor}.{patch}" for major in (4, 5, 6) for minor in range(60) for patch in range(10)]
    assert not [version for version in every if version in verls and all(version in one for one in ours)]


def test_importing_verl_imports_no_trainer_of_ours() -> None:
    """verl is imported in each sampler and reward worker too."""
    modules = "{name for name in sys.modules if name.startswith(('tailrl.', 'verl.trainer.ppo.v1'))}"
    done = ended(f"import sys, verl; print(sorted({modules}))")
    expected = ["tailrl.integrations", "tailrl.integrations.verl", "tailrl.integrations.verl.plugin"]
    assert done.stdout.strip().splitlines()[-1] == str(expected)


def test_a_trainer_is_there_once_verl_has_its_own() -> None:
    assert ended(NAME_A_TRAINER).stdout.strip().splitlines()[-1] == "TailrlPPOTrainerSync"


@pytest.mark.parametrize("code", ["raise ImportError('broken')", "import nothing_of_this_name"])
def test_a_plugin_that_does_not_load_ends_the_run_that_names_it(tmp_path: Path, code: str) -> None:
    """verl itself logs it at DEBUG alone."""
    folder = tmp_path / "tailrl/integrations/verl"
    folder.mkdir(parents=True)
    for place in (tmp_path / "tailrl", tmp_path / "tailrl/integrations", folder):
        (place / "__init__.py").write_text("")
    (folder / "plugin.py").write_text(code)
    done = ended(NAME_A_TRAINER, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    assert done.returncode == 1 and "Unknown trainer 'tailrl'. Available trainers: colocate_async" in done.stderr


def test_a_trainer_that_does_not_load_says_why(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['tailrl.integrations.verl.trainer'] = None\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls; get_trainer_cls('sync'); get_trainer_cls('tailrl')"
    )
    done = ended(code)
    assert done.returncode == 1 and "Unknown trainer 'tailrl'" in done.stderr
    assert "tailrl: could not add itself to verl.trainer.ppo.v1: ModuleNotFoundError" in done.stderr
    assert not list(tmp_path.iterdir())
