"""verl loads the plugin by its entry point; a run that asks for one that does not load ends."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points, metadata, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

LIST = Path(__file__).parents[2] / "envs/verl.txt"
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


def write_wheel(folder: Path, name: str, number: str, needs: list[str], extras: list[str]) -> None:
    """A wheel with metadata alone, which is all that pip's resolver reads."""
    stem = f"{name.replace('-', '_')}-{number}"
    metadata = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {number}"]
    metadata += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata) + "\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def needs_of(name: str) -> list[str]:
    """Of an installed distribution, those of this machine; with its extras' markers."""
    extras = ["", *(metadata(name).get_all("Provides-Extra") or [])]
    lines = [Requirement(line) for line in requires(name) or ()]
    return [str(one) for one in lines if not one.marker or any(one.marker.evaluate({"extra": e}) for e in extras)]


def test_pip_refuses_a_study_beside_verl(tmp_path: Path) -> None:
    """By the real metadata of both; everything else is there in each version that one of them names."""
    ours, verls = needs_of("tailrl"), needs_of("verl")
    for need in {Requirement(line) for line in [*ours, *verls]}:
        if need.name not in ("tailrl", "verl"):
            numbers = [*(one.version.removesuffix(".*") for one in need.specifier), "1"]
            number = next(one for one in numbers if one in need.specifier)
            write_wheel(tmp_path, need.name, number, [], sorted(need.extras))
    write_wheel(tmp_path, "tailrl", version("tailrl"), ours, metadata("tailrl").get_all("Provides-Extra"))
    write_wheel(tmp_path, "verl", version("verl"), verls, metadata("verl").get_all("Provides-Extra"))

    def installed(extras: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed",
                   "--no-index", f"--find-links={tmp_path}", f"tailrl[{extras}]"]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        return subprocess.run(
            command, capture_output=True, text=True, env=environment | {"PIP_CONFIG_FILE": os.devnull}
        )

    for alone in ("verl", "study"):
        assert installed(alone).returncode == 0, installed(alone).stderr
    both = installed("study,verl")
    assert (
        both.returncode == 1 and "ResolutionImpossible" in both.stderr and "transformers" in both.stdout + both.stderr
    )


def test_verl_allows_what_it_is_tested_with() -> None:
    """Two tensordicts answer differently; a user has the one that verl allows. Transformers is the study's."""
    allowed = {one.name: one.specifier for one in map(Requirement, requires("verl") or ()) if not one.marker}
    pinned = dict(line.split()[0].split("==") for line in LIST.read_text().splitlines() if "==" in line.split("#")[0])
    wrong = {name: number for name, number in pinned.items() if name in allowed and number not in allowed[name]}
    assert "tensordict" in pinned and not wrong


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
