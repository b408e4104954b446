"""Which jobs are said to run again: finished ones alone, with the reason that Snakemake has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tailrl.planning.again import again


def job(output: Path) -> Any:
    return SimpleNamespace(output=[str(output)], input=[], rule=SimpleNamespace(name="train"))


def test_an_interrupted_job_is_no_finished_one(tmp_path: Path) -> None:
    """Snakemake forces it, since it has not seen its end, though its outputs may be there."""
    jobs = [job(tmp_path / "a"), job(tmp_path / "b"), job(tmp_path / "missing")]
    for name in ("a", "b"):
        (tmp_path / name).touch()
    changes = dict.fromkeys(("input_changed", "params_changed", "code_changed", "software_stack_changed"), False)
    reason = SimpleNamespace(updated_input=set(), updated_input_run=set(), forced=True, **changes)
    dag = SimpleNamespace(needrun_jobs=lambda: jobs, reason=lambda _: reason)
    opened: set[str] = set()
    persistence = SimpleNamespace(_get_key=str, _filter_incomplete_keys=lambda keys: opened & set(keys))
    assert again(dag, persistence) == "finished jobs run again, 2 in all (2 train): the command line forces it"
    opened |= {str(tmp_path / "a")}
    assert again(dag, persistence) == "finished jobs run again, 1 in all (1 train): the command line forces it"
    opened |= {str(tmp_path / "b")}
    assert again(dag, persistence) == ""
