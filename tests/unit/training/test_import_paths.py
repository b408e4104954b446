"""Code of a user's own by its import path, in a folder outside the checkout."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tailrl.cli.commands import check
from tailrl.config.load import parse_study
from tailrl.config.source_files import job_files
from tailrl.objective.advantages import advantages_of
from tailrl.objective.corrections import sequence_weight, token_weight
from tailrl.objective.ratio_losses import RatioTokens, ratio_term
from tailrl.objective.rejections import statistic
from tailrl.rollout import make_sampler
from tailrl.runtime.errors import StudyError
from tailrl.tasks.prepare import write_all_problems
from tailrl.tasks.problem import Problem, read_problems
from tailrl.tasks.scoring import reward_of
from tailrl.training.loop import train

MINE = '''
"""What a user writes: the same as ours, by other lines."""
import torch
from tailrl.rollout.transformers import TransformersSampler

class Engine(TransformersSampler):
    def __init__(self, policy_folder, settings, max_length, seed, beside_trainer):
        assert settings.options == {"answer": 42} and beside_trainer
        super().__init__(policy_folder, settings, max_length)

class Nothing:
    pass

class Fails:
    generate = self_test = load_weights = release = metrics = None.__init__
    def __init__(self, *arguments):
        raise KeyError("no licence")

def half_square(log_ratio, log_q):
    return log_ratio * log_ratio / 2

def leave_one_out(rewards):
    total = rewards.sum(1, keepdim=True)
    return rewards - (total - rewards) / (rewards.shape[1] - 1)

def cut_token(delta, most, least):
    return torch.minimum(delta.exp(), torch.tensor(most))

def cut_response(delta, sequence, count, most):
    ratio = torch.zeros(count, dtype=delta.dtype).index_add(0, sequence, delta).exp()
    return torch.minimum(ratio, torch.tensor(most))

def reject_large(delta, sequence, count, most):
    ratio = torch.zeros(count, dtype=delta.dtype).index_add(0, sequence, delta).exp()
    return torch.ones(count), ratio > most

def unclipped(t):
    live = (t.advantage_T != 0) if t.live_T is None else t.live_T
    return torch.where(live, t.ratio_T, 0.0).exp() * t.advantage_T

def sums(problems, seed, terms=2):
    for number in range(problems):
        parts = [(seed + number * (k + 3)) % 9 + 1 for k in range(terms)]
        text = "+".join(map(str, parts))
        yield {"prompt": f"{text}#{number}=\\n", "answer": str(sum(parts)), "compared": "integer"}

def few(problems, seed):
    return [{"prompt": "1=", "answer": "1"}]

def strange(problems, seed):
    return [{"question": "1="}] * problems

def length(prompt, response, row):
    return 0.5 * (row["answer"] in response) + 0.5 / (1 + len(response) % 7)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "acc": 1}

def trl_reward(prompts, completions, answer, **kwargs):
    return [float(a in text) for a, text in zip(answer, completions)]

def fails(*arguments):
    raise KeyError("gone")

def words(*arguments):
    return "many"

def two(*arguments):
    return 2

def nothing(*arguments):
    return torch.tensor([float("nan")] * 2)
'''


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the user's module, which is the working directory."""
    (tmp_path / "users").mkdir()
    (tmp_path / "users/mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "users")
    yield tmp_path
    sys.modules.pop("mine", None)


def trained(folder: Path, policy: Path, out: Path, arm: dict[str, Any], **task: Any) -> list[dict[str, float | None]]:
    """The metrics of two steps of an arm, without times. Rewards are of lengths: a random policy solves nothing."""
    settings = {"steps": 2, "prompts": 2, "group_size": 4, "max_new_tokens": 8, "token_budget": 60, "minibatches": 2}
    study = {
        "name": "test",
        "arms": {"arm": arm},
        "training": settings,
        "task": {"name": "arithmetic", "reward": "mine:length", **task},
    }
    parsed = parse_study({**study, "seeds": [1]})
    parsed.check_files()
    write_all_problems(parsed.problems(), out / "data")
    train(parsed.run("arm"), 1, policy, out / "data/train.jsonl", out, folder)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {name: value for name, value in one.items() if not name.startswith(("time", "throughput"))} for one in lines
    ]


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token weight": (
        {"correction": {"token": "tis", "token_threshold": 1.5}},
        {"correction": {"token": "mine:cut_token", "token_threshold": 1.5}},
    ),
    "response's weight and estimator": (
        {"correction": {"sequence": "tis", "sequence_threshold": 1.5}},
        {"estimator": "mine:leave_one_out", "correction": {"sequence": "mine:cut_response", "sequence_threshold": 1.5}},
    ),
    "rejection": (
        {"correction": {"reject": [{"of": "k2", "by": "token", "above": 1e-15}]}},
        {"correction": {"reject": [{"of": "mine:half_square", "by": "token", "above": 1e-15}]}},
    ),
    "loss": (
        {"clip": {"loss": "free", "ratio": "bypass"}},
        {"clip": {"loss": "mine:unclipped", "ratio": "bypass"}},
    ),
}


@pytest.mark.usefixtures("plain_samplers")
@pytest.mark.parametrize(
    "pair",
    [
        "token weight",
        pytest.param("response's weight and estimator", marks=pytest.mark.slow),
        pytest.param("rejection", marks=pytest.mark.slow),
        "loss",
    ],
)
def test_ones_own_code_trains_as_ours(mine: Path, policy_folder: Path, pair: str) -> None:
    """A user's own version of a remedy of ours gives the same run; what it truncates it does not say."""
    arms = [{**arm, "deliberate": True} for arm in PAIRS[pair]]
    ours, own = (trained(mine, policy_folder, mine / str(n), arm) for n, arm in enumerate(arms))
    for one, other in zip(ours, own, strict=True):
        differ = {name for name in one if one[name] != other[name] and not name.startswith("rollout_corr_verl/")}
        assert differ <= {"rollout_corr/truncated_fraction"}
        assert one["train/grad_norm"]


@pytest.mark.slow
def test_an_engine_of_ones_own(mine: Path, policy_folder: Path) -> None:
    """It gives what the engine gives that it is made of, and its file is a source of the run."""
    ours = {"sampler": {"engine": "transformers", "dtype": "float32"}}
    own = {"sampler": {"engine": "mine:Engine", "dtype": "float32", "options": {"answer": 42}}}
    made = [
        trained(mine, policy_folder, mine / str(n), {**arm, "deliberate": True}) for n, arm in enumerate((ours, own))
    ]
    assert made[0] == made[1] and made[0][0]["train/grad_norm"]
    assert any(name.endswith("users/mine.py") for name in json.loads((mine / "1/manifest.json").read_text())["sources"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mine:Nothing", "sampler.engine: mine:Nothing lacks generate, self_test, load_weights, release"),
        ("mine:Fails", "mine:Fails: KeyError: 'no licence'"),
        ("mine:absent", "mine:absent: mine has no function absent"),
    ],
)
def test_an_engine_that_is_none_is_refused(mine: Path, name: str, says: str) -> None:
    study = parse_study({"name": "x", "arms": {"a": {"sampler": {"engine": name}}}})
    with pytest.raises(StudyError, match=says):
        make_sampler(study.run("a").sampler, mine, 32, seed=0)


@pytest.mark.usefixtures("plain_samplers")
def test_a_task_and_a_reward_of_ones_own(mine: Path, policy_folder: Path) -> None:
    lines = trained(
        mine, policy_folder, mine / "own", {"deliberate": True}, name="mine:sums", problems=8, options={"terms": 3}
    )  # fmt: skip
    rewards = [line["reward/mean"] for line in lines]
    assert all(reward is not None and reward % 1 for reward in rewards)
    problems = read_problems(mine / "own/data/train.jsonl")
    assert len(problems) == 8 and {problem.compared for problem in problems} == {"mine:length"}
    assert problems[0].prompt.count("+") == 2
    manifest = json.loads((mine / "own/manifest.json").read_text(encoding="utf-8"))
    assert any(name.endswith("users/mine.py") for name in manifest["sources"])


PROBLEM = Problem("7", "3+4=\n", "7")


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [("length", 0.5 + 0.5, 0.5 / 6), ("compute_score", 1.0, 0.0), ("trl_reward", 1.0, 0.0)],
)
def test_rewards_of_three_signatures(name: str, right: float, wrong: float) -> None:
    problem = Problem("7", "3+4=\n", "7", compared=f"mine:{name}")
    assert math.isclose(reward_of("it is 7", problem), right)
    assert math.isclose(reward_of("it is", problem), wrong)


def tokens() -> RatioTokens:
    ones_T = torch.ones(3)
    return RatioTokens(ones_T, ones_T, ones_T, torch.zeros(3, dtype=torch.int64), 1, (0.2, 0.2))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: advantages_of("mine:fails", torch.ones(2, 2)), "mine:fails: KeyError: 'gone'"),
        (lambda: advantages_of("mine:absent", torch.ones(2, 2)), "mine:absent: mine has no function absent"),
        (lambda: advantages_of("gone:f", torch.ones(2, 2)), "gone:f: gone cannot be imported: No module named 'gone'"),
        (
            lambda: advantages_of("mine:nothing", torch.ones(2, 2)),
            "must give finite advantages of the rewards' shape",
        ),
        (lambda: token_weight("mine:words")(torch.zeros(2), 2.0, None), "must give 2 weights, as a tensor, not str"),
        (lambda: token_weight("mine:nothing")(torch.zeros(2), 2.0, None), "weights must be numbers from 0"),
        (
            lambda: sequence_weight("mine:nothing")(torch.zeros(2), torch.zeros(2, dtype=torch.int64), 3, 2.0),
            r"must give 3 weights, as a tensor, not \[2\]",
        ),
        (lambda: statistic("mine:two")(torch.zeros(3), torch.zeros(3)), "must give a number for each of the 3 tokens"),
        (lambda: ratio_term("mine:words", tokens()), "must give a term for each of the 3 tokens"),
        (
            lambda: reward_of("7", Problem("7", "3", "7", compared="mine:words")),
            "a number from 0 to 1, not 'many'",
        ),
    ],
)
def test_what_ones_own_code_may_do_wrong_is_one_sentence(call: Any, says: str) -> None:
    with pytest.raises(StudyError, match=says):
        call()


def test_a_rejection_of_ones_own() -> None:
    delta_T = torch.tensor([0.1, 0.2, 2.0])
    weight_N, rejected_N = sequence_weight("mine:reject_large")(delta_T, torch.tensor([0, 0, 1]), 2, 2.0)
    assert weight_N.tolist() == [1.0, 0.0] and rejected_N.tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mine:few", "mine:few: gives 1 problems, and 8 are asked for"),
        ("mine:strange", "mine:strange: problem 0: .*question"),
        ("gone:f", "gone:f: there is no module gone here or on Python's path"),
    ],
)
def test_a_task_that_gives_no_problems_is_refused(mine: Path, name: str, says: str) -> None:
    study = parse_study({"name": "x", "task": {"name": name, "problems": 8}, "arms": {"a": {}}})
    with pytest.raises(StudyError, match=says):
        study.check_files()
        write_all_problems(study.problems(), mine / "data")


def test_the_check_imports_nothing(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "users/loud.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    study = parse_study(
        {"name": "x", "arms": {"a": {"estimator": "loud:f", "correction": {"token": "mine:cut_token"}}}}
    )
    study.check_files()
    (mine / "users/study.yaml").write_text("name: x\narms: {a: {estimator: 'loud:f'}, b: {}}\n", encoding="utf-8")
    check([Path("study.yaml")])
    assert "study.yaml: not imported here, and not tried: loud:f\n" in capsys.readouterr().out
    assert "loud" not in sys.modules
    files = [Path(file).name for file in job_files("train", study.run("a"))]
    assert {"loud.py", "mine.py"} <= set(files)


@pytest.mark.parametrize("word", ["mine:", ":f", "a b:c", "mine.py:f:g", "1a:f"])
def test_what_is_no_import_path_is_refused(word: str) -> None:
    with pytest.raises(StudyError, match=r"estimator: must be one of its words, or an import path such as"):
        parse_study({"name": "x", "arms": {"a": {"estimator": word}}})


@pytest.mark.parametrize(
    "arm",
    [
        {"correction": {"sequence": "mine:cut_response", "sequence_lower": 0.5}},
        {"correction": {"sequence": "mine:cut_response", "rejects": "r_ppo"}},
        {"correction": {"sequence": "mine:cut_response", "token": "tis"}},
    ],
)
def test_settings_without_effect_beside_ones_own_are_refused(arm: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match=r"does not use|counts the mismatch twice"):
        parse_study({"name": "x", "arms": {"a": arm}})
