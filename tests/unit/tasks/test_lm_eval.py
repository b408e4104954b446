"""Tasks of lm-eval by their names: the verdicts are those of lm-eval's own run, on files of the tasks' columns."""

import json
from pathlib import Path
from typing import Any

import pytest

from tailrl.config.tasks.aime25 import Aime25Task
from tailrl.config.tasks.lm_eval import LmEvalTask
from tailrl.runtime.errors import StudyError
from tailrl.tasks.registry import load_task
from tailrl.tasks.scoring import reward_of

pytestmark = pytest.mark.slow  # lm-eval's index of tasks takes seconds

RESPONSES = [
    r"so \boxed{70}", "$70$", "70", r"\boxed{49}", r"\boxed{070}", r"first \boxed{1}, then \boxed{70}", "",
    "It is 70.\nQuestion: what else?", r"\boxed{70", r"$\frac{140}{2}$", r"\boxed{\frac{140}{2}}", "#### 70", "#### 71",
    "so 70, or 72",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def written(tmp_path: Path, rows: list[dict[str, str]]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def by_lm_eval(name: str, path: str, metric: str, chosen: str) -> list[float]:
    """What lm-eval says of the responses, one run each, by a model that answers with them."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Says(LM):  # type: ignore[misc]
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

        def generate_until(self, requests: list[Any]) -> list[str]:
            text = self.text
            for word in requests[0].args[1]["until"]:
                text = text.split(word)[0]
            return [text] * len(requests)

        def loglikelihood(self, requests: list[Any]) -> list[Any]:
            raise NotImplementedError(len(requests))

        loglikelihood_rolling = loglikelihood

    overrides = {
        "task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": {"test": path}},
        "training_split": None, "fewshot_split": None, "num_fewshot": 0,
    }  # fmt: skip
    grouped = {"group": "one", "task": [overrides]}  # so lm-eval overrides fields of a task of its own
    manager = TaskManager()
    found = []
    for text in RESPONSES:
        outcome = simple_evaluate(Says(text), tasks=[grouped], task_manager=manager, bootstrap_iters=0)
        found.append(outcome["results"][name][f"{metric},{chosen}"])
    return found


@pytest.mark.parametrize(
    ("name", "row", "filters"),
    [
        ("aime25", {"problem": "Find it.", "answer": "70", "id": "0"}, ["none"]),
        ("gsm8k", {"question": "Find it.", "answer": "It is 70.\n#### 70"}, ["strict-match", "flexible-extract"]),
    ],
)
def test_verdicts_are_lm_evals_own(tmp_path: Path, name: str, row: dict[str, str], filters: list[str]) -> None:
    path = written(tmp_path, [row])
    for chosen in filters:
        task = LmEvalTask(name="lm_eval", task=name, path=path, filter=chosen, fewshot=0)
        [problem] = load_task(task).problems
        assert problem.prompt == "Question: Find it.\nAnswer:"
        verdicts = [reward_of(text, problem) for text in RESPONSES]
        assert verdicts == by_lm_eval(name, path, "exact_match", chosen)
        assert 0 < sum(verdicts) < len(RESPONSES)


def test_lm_evals_aime25_agrees_with_ours_where_the_answer_is_boxed(tmp_path: Path) -> None:
    """Ours asks for a box, and takes other spellings; lm-eval compares text, and takes the last dollar."""
    path = written(tmp_path, [{"problem": "Find it.", "answer": "70", "id": "0"}])
    [theirs] = load_task(LmEvalTask(name="lm_eval", task="aime25", path=path)).problems
    [ours] = load_task(Aime25Task(name="aime25", path=path)).problems
    differ = [text for text in RESPONSES if reward_of(text, theirs) != reward_of(text, ours)]
    assert set(differ) <= {"$70$", "70", r"\boxed{070}", r"\boxed{\frac{140}{2}}"}
    assert [reward_of(text, ours) for text in RESPONSES if text not in differ].count(1.0) == 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task": "nothing"}, "task.task: lm-eval knows no task nothing"),
        ({"task": "aime25", "metric": "f1"}, "task.metric: aime25 has no metric f1; it has exact_match"),
        ({"task": "aime25", "filter": "x"}, "task.filter: aime25 has no filter x; it has none"),
        ({"task": "gsm8k", "path": None}, "task.task: lm-eval does not give gsm8k: .*openai/gsm8k"),
    ],
)
def test_what_lm_eval_does_not_have_is_one_sentence(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    path = written(tmp_path, [{"problem": "Find it.", "answer": "70", "id": "0"}])
    with pytest.raises(StudyError, match=says):
        load_task(LmEvalTask(name="lm_eval", **{"path": path, **settings}))
