"""Install pins into the environment of this Python: `python envs/install.py envs/cpu.txt`, as `make venv` does.

uv installs, configured as pip is: with its indexes, links, certificates and proxy. Where there is no uv, or it does not
get along with an index, pip installs the same. Either takes exactly what the list has. `cpu.hashes` beside it holds the
hashes of the published files: other files end the installation. Packages that come as source are built by the pinned
setuptools, which therefore goes first.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
# --no-compile: compiling all 30,000 files takes a minute; Python compiles what is imported, on first import.
PIP = [sys.executable, *["-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--no-compile"]]
INSTALLER = "uv"
UV = [sys.executable, "-m", "uv", "pip"]
UV_OPTIONS = ["--quiet", "--no-build-isolation", "--python", sys.executable]


def pins(file: Path) -> dict[str, str]:
    """The `name==version` of each package in a list, by name."""
    return {line.split("=")[0]: line.split()[0] for line in file.read_text().splitlines() if re.match("[a-z0-9]", line)}


def as_pip(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with uv's variables for what pip is configured with; a variable that is there stays."""
    from pip._internal.commands import create_command

    given, _ = create_command("install").parse_args([])
    variables = {
        "UV_DEFAULT_INDEX": given.index_url,
        "UV_INDEX": " ".join(given.extra_index_urls),
        "UV_FIND_LINKS": ",".join(given.find_links),
        "UV_NO_INDEX": "1" if given.no_index else None,
        "UV_CONSTRAINT": " ".join(given.constraints),
        "UV_INSECURE_HOST": " ".join(given.trusted_hosts),
        "UV_HTTP_TIMEOUT": str(int(given.timeout)),
        # pip takes a version from any of its indexes; uv would look no further than the first that has the name.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": given.cert,
        "SSL_CLIENT_CERT": given.client_cert,
        "HTTP_PROXY": given.proxy,
        "HTTPS_PROXY": given.proxy,
    }
    return {name: value for name, value in variables.items() if value} | dict(environment)


def with_pip(*what: str) -> bool:
    """Whether pip could install this: a requirement, or options with their values."""
    return subprocess.run([*PIP, "--no-build-isolation", *what], check=False).returncode == 0


def with_uv(*what: str) -> bool:
    """Whether uv could; exits 1 if a file is not the published one, which pip would take."""
    command = [*UV, *what] if what[0] == "sync" else [*UV, "install", "--no-deps", *what]
    told = subprocess.run(
        [*command, *UV_OPTIONS], check=False, env=as_pip(os.environ), stderr=subprocess.PIPE, text=True
    )
    print(told.stderr, file=sys.stderr, end="")
    if "Hash mismatch" in told.stderr:
        sys.exit(1)
    return told.returncode == 0


def install(file: Path, torch_index: str, put: Callable[..., bool]) -> bool:
    """Whether `put` could install a whole environment's list and this package.

    The CPU build of PyTorch goes alone: nothing says "this index only if the others do not have it".
    """
    listed, hashes = pins(file), file.with_suffix(".hashes")
    torch = listed["torch"]
    # What the list no longer has, uv removes.
    every = ("sync", str(file), "--constraints", str(hashes)) if put is with_uv else ("-r", str(file))
    return (
        put(listed["setuptools"])
        and (not torch.endswith("+cpu") or put(torch) or put(torch, "--index-url", torch_index))
        and put(*every)
        and put("--editable", str(ROOT))
    )


def main() -> None:
    """Install with uv, or else with pip; exits 1 if neither could."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pins", type=Path, help="the list of pins: of a whole environment, or of what it has besides")
    parser.add_argument(
        "--torch-index", default="", help="where a CPU build of PyTorch is that no configured index has"
    )
    given = parser.parse_args()
    whole = INSTALLER in (listed := pins(given.pins))
    if whole:
        with_pip(listed[INSTALLER])
        importlib.invalidate_caches()
    for put in (with_uv, with_pip) if find_spec(INSTALLER) else (with_pip,):
        if install(given.pins, given.torch_index, put) if whole else put("-r", str(given.pins)):
            return
        print(f"{given.pins}: not installed {put.__name__.replace('_', ' ')}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
