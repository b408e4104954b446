"""What Snakemake's profiles refuse in one sentence."""

from pathlib import Path

import pytest

from tailrl.runtime.snakemake_call import check_files, executor


def test_a_target_behind_configfile_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").touch()
    check_files(["snakemake", "train_dvp", "--configfile", "a.yaml", "--", "train_dvp"])
    check_files(["snakemake", "--configfile", "a.yaml", "--config", "seeds=[1]", "train_dvp"])
    with pytest.raises(SystemExit) as ended:
        check_files(["snakemake", "--cores", "2", "--configfile", "a.yaml", "train_dvp", "all", "-n"])
    assert ended.value.code == (
        "tailrl: --configfile: there is no file train_dvp; a target stands before: "
        "snakemake train_dvp all --configfile a.yaml"
    )
    with pytest.raises(SystemExit, match=r"^tailrl: --configfile: there is no file b\.yaml$"):
        check_files(["snakemake", "--configfile", "b.yaml"])


def test_an_executor_needs_its_plugin() -> None:
    with pytest.raises(SystemExit, match=r"^tailrl: profiles/nowhere: Snakemake lacks the plugin .* -r envs/x\.txt$"):
        executor("nowhere", "envs/x.txt")
