"""What Snakemake's profiles refuse in one sentence."""

from pathlib import Path

import pytest

from tailrl.runtime.snakemake_call import check_call, executor


def test_a_target_behind_configfile_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").touch()
    check_call(["snakemake", "train_dvp", "--configfile", "a.yaml", "--", "train_dvp"])
    check_call(["snakemake", "--configfile", "a.yaml", "--config", "seeds=[1]", "--", "train_dvp"])
    with pytest.raises(SystemExit) as ended:
        check_call(["snakemake", "--cores", "2", "--configfile", "a.yaml", "train_dvp", "all", "-n"])
    assert ended.value.code == (
        "tailrl: --configfile: there is no file train_dvp; a target stands before: "
        "snakemake train_dvp all --configfile a.yaml"
    )
    with pytest.raises(SystemExit, match=r"^tailrl: --configfile: there is no file b\.yaml$"):
        check_call(["snakemake", "--configfile", "b.yaml"])


@pytest.mark.parametrize("words", [["--configfile=b.yaml"], ["--configfile", "b.yaml", "-n"], ["--configfiles=b.yaml"]])
def test_an_option_is_read_in_each_of_its_forms(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^tailrl: --configfile: there is no file b\.yaml$"):
        check_call(["snakemake", *words])


@pytest.mark.parametrize(
    ("words", "example"),
    [
        (["--config", "training.steps=3"], "--config 'training={steps: 3}'"),
        (["--config=training.steps=3"], "--config 'training={steps: 3}'"),
        (["-C", "seeds=[1]", "arms.a.seeds=[2]", "-n"], "--config 'arms={a: {seeds: [2]}}'"),
        (["--config", "seeds=[1]", "train_dvp"], "KEY=VALUE; a target stands before --config, or behind --"),
    ],
)
def test_a_key_that_snakemake_does_not_take(words: list[str], example: str) -> None:
    with pytest.raises(SystemExit) as ended:
        check_call(["snakemake", *words])
    sentence = str(ended.value.code)
    assert sentence.startswith("tailrl: --config ") and sentence.endswith(example) and "\n" not in sentence
    check_call(["snakemake", "--config", "training={steps: 3}", "task={}", "seeds=[1]"])


def test_an_executor_needs_its_plugin() -> None:
    with pytest.raises(SystemExit, match=r"^tailrl: profiles/nowhere: Snakemake lacks the plugin .* -r envs/x\.txt$"):
        executor("nowhere", "envs/x.txt")
