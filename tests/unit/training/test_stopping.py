"""The rule that ends a run: what it says and when, and that a run so ended is a whole run."""

from pathlib import Path

import pytest
from cases_fixture import rest_long
from run_fixture import SIZES, Interrupted, interrupt_at, make_runs

from tailrl.config.training import Training
from tailrl.tasks.problem import Problem
from tailrl.training import loop
from tailrl.training.stopping import Watch

RULE = {"metric": "train/learning_rate", "factor": 1.01}
"""The rate rises in the first three steps: its mean over steps 1 to 5 is above that of the first five."""

SENTENCE = (
    "the run ends after step 5: train/learning_rate, as a mean over 5 steps, is above 1.01 times its mean over the "
    "first 5"
)


def test_a_run_ends_at_the_alarm_and_says_why(
    policy_folder: Path,
    problems: list[Problem],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = make_runs(tmp_path, policy_folder, problems, monkeypatch)
    whole = runs.undisturbed(runs.settings())
    ended = runs.train(runs.settings(stop_when=RULE))
    assert len(whole.lines) == SIZES["steps"] == 7 and len(ended.lines) == 6
    assert ended.lines == whole.lines[:6]
    assert (whole.record["stopped"], ended.record["stopped"]) == (None, SENTENCE)
    assert f"seed 5: {SENTENCE}\n" in capsys.readouterr().err
    assert (tmp_path / "out" / "policy" / "model.safetensors").is_file() and not runs.saved()
    six = runs.train(runs.settings(steps=6), name="six")
    assert ended.policy == six.policy  # nothing else was done to it


@pytest.mark.parametrize("interrupted_in", rest_long((6,), (5, 6)))
def test_an_interrupted_run_ends_at_the_same_alarm(
    policy_folder: Path,
    problems: list[Problem],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupted_in: int,
) -> None:
    """Before the step of the alarm; and after it, the alarm's own checkpoint being the last, before the results."""
    runs = make_runs(tmp_path, policy_folder, problems, monkeypatch)
    run = runs.settings(stop_when=RULE)
    undisturbed = runs.undisturbed(run)
    with monkeypatch.context() as patched:
        if interrupted_in == 5:
            interrupt_at(patched, 5)
        else:
            patched.setattr(loop, "write_results", interrupt)
        with pytest.raises(Interrupted):
            runs.train(run)
    resumed = runs.train(run)
    assert resumed.same(undisturbed) and resumed.record["stopped"] == SENTENCE
    assert resumed.record["resumed_at_steps"] == [4 if interrupted_in == 5 else 6]


def interrupt(*_: object) -> None:
    raise Interrupted


def test_a_watch_resumed_from_recorded_steps_ends_at_the_same_step() -> None:
    settings = Training.model_validate({"steps": 20, "stop_when": {"metric": "reward/mean", "factor": 0.5}})
    steps = [{"reward/mean": value} for value in [0.8] * 8 + [0.0] * 8]
    watch = Watch(settings, [])
    alarms = []
    for step in steps:
        watch.see(step)
        alarms.append(watch.alarm())
    assert alarms.count(None) == 10  # 0.8, 0.8 and three zeros: 0.32 of 0.8
    assert len(set(alarms)) == 2  # the first alarm is the one
    for taken in range(len(steps)):
        again = Watch(settings, steps[:taken])
        for step in steps[taken:]:
            again.see(step)
        assert again.alarm() == alarms[-1]
    assert alarms[-1] is not None and "after step 10: reward/mean" in alarms[-1] and "below 0.5" in alarms[-1]


def test_no_rule_ends_no_run() -> None:
    watch = Watch(Training(), [{"reward/mean": 1.0}] * 50)
    watch.see({"reward/mean": 0.0})
    assert watch.alarm() is None
