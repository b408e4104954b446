"""Manifests: a change after a job is noticed where the file is read next."""

import os
import shutil
from pathlib import Path

import pytest

from tailrl.artifacts import manifest
from tailrl.artifacts.manifest import (
    MANIFEST,
    check_outputs,
    digest_of,
    files_in,
    policy_digest,
    read_manifest,
    read_vouched,
    tell_of_sources,
    vouched_checksum,
    write_manifest,
)
from tailrl.config.source_files import PACKAGE, at_start
from tailrl.runtime.errors import StudyError

WEIGHTS = "model.safetensors"


def make_policy(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in (WEIGHTS, "config.json", "tokenizer.json"):
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


def make_run(folder: Path) -> Path:
    """A run's folder with its policy and a snapshot."""
    make_policy(folder / "policy")
    make_policy(folder / "snapshots" / "step-00000010")
    (folder / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    write_manifest(folder / MANIFEST, files_in(folder), inputs={"problems": "0"}, steps=20)
    return folder


def flip(file: Path) -> None:
    """Flip one bit of the last byte."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_what_a_manifest_holds(tmp_path: Path) -> None:
    made = read_manifest(make_run(tmp_path / "run") / MANIFEST)
    assert made.steps == 20 and made.inputs == {"problems": "0"}
    policies = {f"{folder}/{name}" for folder in ("policy", "snapshots/step-00000010")
                for name in (WEIGHTS, "config.json", "tokenizer.json")}  # fmt: skip
    assert made.outputs.keys() == {"metrics.jsonl", *policies}
    assert made.outputs["metrics.jsonl"].length == 3
    # Of the text "{}\n", by sha256sum.
    digest = "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"
    assert made.outputs["metrics.jsonl"].sha256 == digest


def test_a_small_file_is_checked_at_every_read(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run") / "metrics.jsonl"
    assert read_vouched(path) == b"{}\n"
    flip(path)
    with pytest.raises(StudyError) as error:
        read_vouched(path)
    remedy = f"put it back, or remove {path} and run the study again"
    assert str(error.value) == f"{path}: is not as its job left it, as manifest.json shows; {remedy}"
    (path.with_name("more.jsonl")).touch()
    with pytest.raises(StudyError, match=r"more\.jsonl: is not as its job left it"):
        read_vouched(path.with_name("more.jsonl"))


@pytest.mark.parametrize("where", ["policy", "snapshots/step-00000010"])
@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_a_byte_flipped_in_a_policy_is_noticed(tmp_path: Path, where: str, name: str) -> None:
    folder = make_run(tmp_path / "run") / where
    before = policy_digest(folder)
    flip(folder / name)
    with pytest.raises(StudyError) as error:
        policy_digest(folder)
    assert str(error.value).startswith(f"{folder / name}: is not as its job left it")
    assert f"remove {folder} and run the study again" in str(error.value)
    flip(folder / name)
    assert policy_digest(folder) == before


def test_the_base_policy_has_a_manifest_of_its_own(tmp_path: Path) -> None:
    base = make_policy(tmp_path / "base")
    write_manifest(base / MANIFEST, files_in(base))
    policy_digest(base)
    flip(base / WEIGHTS)
    with pytest.raises(StudyError, match=rf"{WEIGHTS}: is not as its job left it"):
        policy_digest(base)


def test_a_file_too_many_or_too_few_is_noticed_and_a_card_is_not(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run") / "policy"
    before = policy_digest(folder)
    for name in ("README.md", ".snakemake_timestamp"):
        (folder / name).touch()
    assert policy_digest(folder) == before
    (folder / "adapter.safetensors").touch()
    with pytest.raises(StudyError, match=r"adapter\.safetensors: is not as"):
        policy_digest(folder)
    (folder / "adapter.safetensors").unlink()
    (folder / WEIGHTS).unlink()
    with pytest.raises(StudyError, match=rf"{WEIGHTS}: is not as"):
        policy_digest(folder)


def test_a_third_party_policy_needs_no_manifest(tmp_path: Path) -> None:
    """A manifest that does not list it is not checked either."""
    run = make_run(tmp_path / "run")
    shutil.copytree(run / "policy", tmp_path / "elsewhere" / "policy")
    assert policy_digest(tmp_path / "elsewhere" / "policy") == policy_digest(run / "policy")
    assert policy_digest(make_policy(run / "other")) == policy_digest(run / "policy")


def test_the_digest_in_the_manifest_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    known = read_manifest(run / MANIFEST)
    assert digest_of(known.digests("policy")) == policy_digest(run / "policy")
    assert digest_of(known.digests("snapshots/step-00000010")) == policy_digest(run / "snapshots" / "step-00000010")
    monkeypatch.chdir(run)
    assert policy_digest(Path("policy")) == digest_of(known.digests("policy")), "however the folder is called"
    flip(run / "policy" / WEIGHTS)
    with pytest.raises(StudyError):
        policy_digest(Path("policy"))


def test_outputs_may_be_in_several_folders(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for name in ("a", "b"):
        (tmp_path / name / f"{name}.json").write_text(name)
    write_manifest(tmp_path / "a" / MANIFEST, [tmp_path / "a" / "a.json", tmp_path / "b" / "b.json"])
    assert read_manifest(tmp_path / "a" / MANIFEST).outputs.keys() == {"a.json", "../b/b.json"}


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).symlink_to("/dev/full")
    with pytest.raises(StudyError, match=r"manifest\.json: could not be written: No space left on device"):
        write_manifest(tmp_path / MANIFEST, [])


# --- problems and source files ---------------------------------------------------------------------------


def test_a_byte_flipped_in_the_problems_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("{}\n", encoding="utf-8")
    own = vouched_checksum(path)
    write_manifest(tmp_path / MANIFEST, [path])
    assert vouched_checksum(path) == own == "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"
    flip(path)
    with pytest.raises(StudyError, match=r"train\.jsonl: is not as its job left it"):
        vouched_checksum(path)
    (tmp_path / "mine.jsonl").write_text("{}\n", encoding="utf-8")
    assert vouched_checksum(tmp_path / "mine.jsonl") == own, "a file that no manifest lists is the user's own"


def test_large_files_are_held_by_their_length_in_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    check_outputs(run / MANIFEST)
    monkeypatch.setattr(manifest, "HELD", 1)
    flip(run / "policy" / WEIGHTS)
    check_outputs(run / MANIFEST)
    with (run / "policy" / WEIGHTS).open("ab") as file:
        file.write(b"1")
    with pytest.raises(StudyError, match=rf"policy/{WEIGHTS}: is not as its job left it"):
        check_outputs(run / MANIFEST)


def test_sources_edited_during_and_after_a_job_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source.py"
    source.write_text("1\n", encoding="utf-8")
    sources, name = at_start((str(source),)), os.path.relpath(source, PACKAGE.parent)
    make_run(tmp_path / "run")
    path = tmp_path / "run" / MANIFEST
    write_manifest(path, [], sources=sources)
    assert capsys.readouterr().err == "" and tell_of_sources(path) == ()
    source.write_text("2\n", encoding="utf-8")
    write_manifest(path, [], sources=sources)
    stays = f"tailrl: {name} changed while this job ran; its results stay, and the next snakemake makes them again\n"
    assert capsys.readouterr().err == stays
    tell_of_sources.cache_clear()
    write_manifest(path, files_in(tmp_path / "run"), sources=sources)
    capsys.readouterr()
    for _ in range(2):
        policy_digest(tmp_path / "run" / "policy")
    told = f"tailrl: {path}: made by another version of {name} than is there now\n"
    assert capsys.readouterr().err == told, "once, when the policy is used"
