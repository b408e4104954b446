"""Damaged inputs end as they must: those that once did not, and some new ones. `make fuzz` tries a million.

The seed is fixed: what a commit fails on does not depend on when it is tested.
"""

import itertools
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random

import pytest
from kinds import Kind
from oracle import Finding, judge, limited

CORPUS = Path(__file__).parents[1] / "fixtures" / "fuzz_corpus"
SHARE = {"studies": 150, "results": 200, "rows": 400, "models": 50, "logs": 150}
"""A third of them at every change, all with the slow tests."""


@pytest.fixture(scope="module", params=list(SHARE))
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kind, Path]]:
    """A kind, and a folder that is well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        kind: Kind = import_module(f"fuzz_{request.param}").KIND
        folder = tmp_path_factory.mktemp("fuzz") / kind.name
        folder.mkdir()
        kind.prepare(folder)
        patch.chdir(folder)
        yield kind, folder


def test_what_was_found_stays_mended(prepared: tuple[Kind, Path]) -> None:
    kind, folder = prepared
    files = [path for path in sorted((CORPUS / kind.name).rglob("*")) if path.is_file()]
    with limited():
        for path in files:
            name = str(Path(*path.relative_to(CORPUS).parts[2:]))
            judged = judge(kind, folder, (name, path.read_bytes()))
            assert not isinstance(judged, Finding), f"{path}: {judged.place}\n{judged.words}"


@pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["a third", "all"])
def test_damaged_inputs_end_in_one_sentence(prepared: tuple[Kind, Path], part: int) -> None:
    kind, folder = prepared
    accepted = 0
    cases = list(itertools.islice(kind.cases(Random(2512)), SHARE[kind.name] // part))
    with limited():
        for number, case in enumerate(cases):
            judged = judge(kind, folder, case)
            assert not isinstance(judged, Finding), f"case {number}, {case[0]}: {judged.place}\n{judged.words}"
            accepted += judged
    assert 0 < accepted < len(cases), "both kinds are tried"


def test_the_oracle_sees_what_it_looks_for(tmp_path: Path) -> None:
    from tailrl.runtime.errors import StudyError

    def read(folder: Path, name: str) -> None:
        content = (folder / name).read_bytes()
        if content == b"wait":
            while True:
                pass
        if content == b"grow":
            bytearray(2 << 30)
        if content == b"refuse":
            raise StudyError(f"{folder / name}: is bad")
        if content != b"accept":
            raise StudyError(content.decode())

    kind = Kind("x", lambda _: None, lambda _: iter(()), read)
    (tmp_path / "file").write_text("as it was")
    found = {}
    with limited():
        for content in (b"accept", b"refuse", b"wait", b"grow", b"not where", f"{tmp_path}: a\nb".encode(), b"\xff"):
            judged = judge(kind, tmp_path, ("file", content), seconds=0.2)
            found[content[-4:]] = judged.place.split(" at ")[0] if isinstance(judged, Finding) else judged
    assert list(found.values()) == [
        *(True, False, "TooLongError", "MemoryError", "does not say where", "more than one line", "UnicodeDecodeError"),
    ]
    assert (tmp_path / "file").read_text() == "as it was" and len(list(tmp_path.iterdir())) == 1
