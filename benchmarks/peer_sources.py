"""The frameworks of `peers.yaml` as folders of their own source, from which their modules are imported.

    python benchmarks/peer_sources.py [NAME ...]

pip unpacks a package at its exact version, without dependencies, below `.peers/`, or below the
folder that PEER_CACHE names. A framework that is on no index is read from PEERS/NAME, a git checkout at the commit of
the list. None of these files is committed here.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("PEER_CACHE") or ROOT / ".peers")
NEEDS = CACHE / "site"


class PeerError(RuntimeError):
    """A framework that is not there, or not at the version of the list; the text says which and why."""


@dataclass(frozen=True)
class Peer:
    """A framework at one version: of a package, or of a commit."""

    name: str
    date: str
    package: str = ""
    version: str = ""
    commit: str = ""

    @property
    def label(self) -> str:
        """Version and date, as tables show them."""
        return f"{self.version or self.commit[:9]} ({self.date})"


def peers() -> dict[str, Peer]:
    """The frameworks of `peers.yaml` by name."""
    listed = yaml.safe_load((Path(__file__).parent / "peers.yaml").read_text(encoding="utf-8"))
    return {name: Peer(name, **{key: str(value) for key, value in entry.items()}) for name, entry in listed.items()}


def folder_of(peer: Peer) -> Path:
    """The folder of a framework's source; a package is downloaded if it is not there yet.

    Raises:
        PeerError: if pip cannot download it, or no checkout at its commit is given.
    """
    return _unpacked(peer) if peer.package else _checkout(peer)


def _unpacked(peer: Peer) -> Path:
    folder = CACHE / f"{peer.package}-{peer.version}"
    if folder.is_dir():
        return folder
    part = folder.with_name(f"{folder.name}.part")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-compile", "--only-binary=:all:", "--upgrade", "--target", str(part), "--ignore-requires-python"]
    ended = subprocess.run([*command, f"{peer.package}=={peer.version}"], capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["pip says nothing"]
        raise PeerError(f"{peer.package}=={peer.version} cannot be downloaded: {lines[-1]}")
    part.rename(folder)
    return folder


def _checkout(peer: Peer) -> Path:
    given = os.environ.get("PEERS")
    if not given:
        raise PeerError(f"{peer.name} is on no package index: PEERS=FOLDER names the folder of its checkout")
    folder = Path(given) / peer.name
    if not (folder / ".git").exists():
        raise PeerError(f"{folder} is no git checkout of {peer.name}")
    command = ["git", "-C", str(folder), "log", "-1", "--format=%H %cs"]
    commit, date = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if commit != peer.commit:
        listed = f"{peer.commit[:9]} ({peer.date})"
        raise PeerError(f"{peer.name} has moved: {folder} is at {commit[:9]} ({date}), peers.yaml at {listed}")
    return folder


class _Stub(ModuleType):
    """A module of a package that is not installed: each of its names is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Nothing(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class _Nothing(type):
    """A class whose attributes are such classes too, which is called as a decorator or as a constructor."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # A bare decorator gives the function back; one with arguments gives a decorator.
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return _Nothing(cls.__name__, (), {})

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    def __ror__(cls, _: Any) -> Any:
        return cls


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives stubs as modules of these packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self.packages):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def importable(*folders: Path, stubs: Sequence[str] = ()) -> Iterator[None]:
    """Puts a framework's folders first on the path, and what it needs before them; `stubs` that are missing are empty.

    The framework's own modules are executed as they are. A stub is named on purpose: an import of any other package
    that is missing raises as ever. A stub with a dot is a module of the framework itself that this environment cannot
    import.
    """
    missing = [name for name in stubs if "." in name or importlib.util.find_spec(name) is None]
    finder = _Finder(missing)
    added = [str(folder) for folder in (NEEDS, *folders)]
    sys.path[:0] = added
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry not in added]
        sys.meta_path.remove(finder)


def install_needs() -> None:
    """Installs what the frameworks import (envs/peers.txt) into a folder of its own, if it is not there yet.

    Raises:
        PeerError: if pip cannot install it.
    """
    listed = ROOT / "envs" / "peers.txt"
    stamp = NEEDS / "installed.txt"
    if stamp.is_file() and stamp.read_bytes() == listed.read_bytes():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-compile", "--upgrade", "--target", str(NEEDS), "--requirement", str(listed)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise PeerError(f"envs/peers.txt cannot be installed: {(ended.stderr.strip().splitlines() or [''])[-1]}")
    stamp.write_bytes(listed.read_bytes())


def main() -> None:
    """Downloads what is on an index; prints each framework's folder, or why it has none."""
    wanted = sys.argv[1:] or list(peers())
    for name in wanted:
        try:
            print(f"{name} {peers()[name].label}: {folder_of(peers()[name])}")
        except PeerError as error:
            print(f"{name}: {error}")


if __name__ == "__main__":
    main()
