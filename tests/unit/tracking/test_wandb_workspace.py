"""W&B's workspace: what a server on this machine gets by the real library, and what trouble costs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from artifacts_fixture import record_of, vouch_again, write_job
from wandb_server import ENTITY, Server, online

from tailrl.config.load import parse_study
from tailrl.runtime.errors import StudyError
from tailrl.tracking.metrics import METRICS
from tailrl.tracking.wandb_workspace import SECTIONS, save_workspace

STUDY = parse_study({"name": "stress", "arms": {"naive": {}, "dvp": {}}, "evaluation": {"samples": 2}})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A finished study."""
    folder = tmp_path / "results" / "stress"
    for arm in STUDY.arms:
        points = [dict.fromkeys(METRICS, 1.0) | {"train/step": float(step)} for step in range(3)]
        write_job(folder / "train" / arm / "seed0", record_of(STUDY.run(arm), 0), points)
    return folder


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with online(tmp_path, monkeypatch) as started:
        yield started


def test_the_server_has_the_workspace_with_the_study_s_runs_by_arm(results: Path, server: Server) -> None:
    assert save_workspace(results).startswith(f"{server.url}/{ENTITY}/tailrl?nw=")
    (workspace,) = server.views.values()
    assert (workspace["type"], workspace["displayName"], workspace["entityName"], workspace["projectName"]) == (
        *("project-view", "stress"),
        *(ENTITY, "tailrl"),
    )
    section = json.loads(workspace["spec"])["section"]
    made = section["panelBankConfig"]["sections"]
    titles = {one["name"]: [panel["config"]["chartTitle"] for panel in one["panels"]] for one in made}
    assert titles == {name: [title for title, _, _ in panels] for name, panels in SECTIONS.items()}
    (runs,) = section["runSets"]
    (condition,) = runs["filters"]["filters"]
    assert (condition["key"]["name"], condition["op"], condition["value"]) == ("study", "=", "stress")
    assert [key["name"] for key in runs["grouping"]] == ["arm.value"]


@pytest.mark.slow  # W&B's client tries again for a while
def test_a_server_that_fails_is_one_sentence(results: Path, server: Server) -> None:
    server.fault = "garbage"
    with pytest.raises(StudyError, match=rf"^{results}: W&B does not take the workspace: \S[^\n]*$"):
        save_workspace(results)


def test_every_panel_is_of_a_metric_that_training_logs() -> None:
    assert {metric for panels in SECTIONS.values() for _, metric, _ in panels} <= {*METRICS}


def test_what_is_no_study_is_named(tmp_path: Path, results: Path) -> None:
    with pytest.raises(StudyError, match=r"holds no finished run"):
        save_workspace(tmp_path)
    record = results / "train" / "dvp" / "seed0" / "run.json"
    record.write_text("[]")
    vouch_again(record)
    with pytest.raises(StudyError, match=r"run.json: holds list, not a JSON object"):
        save_workspace(results)
