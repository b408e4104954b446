"""W&B's workspace and report: what a server on this machine gets by the real library, and what trouble costs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from artifacts_fixture import policy_of, record_of, vouch_again, write_job, write_scores
from wandb_fixture import FAKE
from wandb_server import ENTITY, FAULTS, MIDWAY_FAULTS, Server, online

from tailrl.config.load import parse_study
from tailrl.runtime.errors import StudyError
from tailrl.tracking import wandb_dashboard
from tailrl.tracking.metrics import METRICS, SCORE
from tailrl.tracking.wandb_dashboard import SECTIONS, STATE, dashboard_at_the_end, make_dashboard

STUDY = parse_study({"name": "stress", "arms": {"naive": {}, "dvp": {}}, "evaluation": {"samples": 2}})
STEPS = 3
PANELS = [title for panels in SECTIONS.values() for title in panels]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A finished study: naive has been evaluated, with 3 of 4 right, and dvp not yet."""
    folder = tmp_path / "results" / "stress"
    for arm in STUDY.arms:
        points = [dict.fromkeys(METRICS, 1.0) | {"train/step": float(step)} for step in range(STEPS)]
        write_job(folder / "train" / arm / "seed0", record_of(STUDY.run(arm), 0), points)
    write_scores(folder, STUDY, "naive", [policy_of(0, [[1, 1], [1, 0]])])
    (folder / "tables").mkdir()
    (folder / "tables/evaluation.csv").write_text("arm,avg_mean,avg_low,avg_high\nnaive,0.75,0.625,\n")
    return folder


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with online(tmp_path, monkeypatch) as started:
        yield started


def job(results: Path) -> subprocess.CompletedProcess[str]:
    """What the workflow's rule calls."""
    command = [sys.executable, "-P", "-c", "from tailrl.cli import main; main()", "job", "dashboard", "--results"]
    return subprocess.run([*command, str(results)], capture_output=True, text=True, timeout=300, check=False)


def views(server: Server) -> dict[str, dict[str, Any]]:
    """What the server holds, by type."""
    found = {view["type"]: view for view in server.views.values()}
    assert len(found) == len(server.views)
    return found


def titles(sections: list[dict[str, Any]]) -> list[str]:
    return [panel["config"]["chartTitle"] for section in sections for panel in section["panels"]]


# --- a server that answers ------------------------------------------------------------------------------


@pytest.mark.slow  # `test_tracker_online.py` has a server that answers
def test_the_server_has_the_runs_their_scores_the_workspace_and_the_report(results: Path, server: Server) -> None:
    """All that training failed to send too: here no step was there."""
    done = job(results)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    assert {name.rpartition("-")[0]: len(steps) for name, steps in server.steps.items()} == {
        "stress-naive-seed0": STEPS,
        "stress-dvp-seed0": STEPS,
    }
    scores = {name.split("-")[1]: summary.get(SCORE) for name, summary in server.summaries.items()}
    assert scores == {"naive": 0.75, "dvp": None}
    workspace, report = views(server)["project-view"], views(server)["runs"]
    assert (workspace["displayName"], workspace["entityName"], workspace["projectName"]) == ("stress", ENTITY, "tailrl")
    section = json.loads(workspace["spec"])["section"]
    assert [found["name"] for found in section["panelBankConfig"]["sections"]] == list(SECTIONS)
    assert titles(section["panelBankConfig"]["sections"]) == PANELS
    blocks = json.loads(report["spec"])["blocks"]
    grids = [block["metadata"] for block in blocks if block["type"] == "panel-grid"]
    assert titles([grid["panelBankSectionConfig"] for grid in grids]) == PANELS
    headings = [block["children"][0]["text"] for block in blocks if block["type"] == "heading"]
    assert headings == list(SECTIONS)
    (table,) = [block["content"] for block in blocks if block["type"] == "markdown-block"]
    assert "| naive | 75.0 | 62.5 |  |" in table
    for runs in (*section["runSets"], *(grid["runSets"][0] for grid in grids)):
        (condition,) = runs["filters"]["filters"]
        assert (condition["key"]["name"], condition["op"], condition["value"]) == ("study", "=", "stress")
        assert [key["name"] for key in runs["grouping"]] == ["arm.value"]
    state = json.loads((results / STATE).read_text())
    assert f"workspace: {state['workspace']['url']}\nreport: {state['report']['url']}\n" in done.stdout
    assert state["workspace"]["url"].startswith(f"{server.url}/{ENTITY}/tailrl?nw=")


@pytest.mark.slow
def test_the_next_call_renews_both(results: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job(results).returncode == 0
    first = views(server)
    (results / "tables/evaluation.csv").write_text("arm,avg_mean,avg_low,avg_high\nnaive,0.5,,\n")
    again = job(results)
    assert f": 0 of {STEPS} steps sent" in again.stdout
    assert {view["id"] for view in views(server).values()} == {view["id"] for view in first.values()}
    assert "| naive | 50.0 |  |  |" in views(server)["runs"]["spec"].encode().decode("unicode_escape")
    server.views.clear()
    assert "workspace: " in job(results).stdout and len(views(server)) == 2, "what was deleted is made anew"
    monkeypatch.setenv("WANDB_PROJECT", "other")
    assert job(results).returncode == 0
    assert len(server.views) == 4, "another project has its own"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in MIDWAY_FAULTS])
def test_a_server_that_fails_costs_one_warning(results: Path, server: Server, fault: str) -> None:
    server.fault = fault
    done = job(results)
    assert done.returncode == 0 and (results / STATE).is_file()
    assert server.requests
    assert done.stderr.count("tailrl: ") == (0 if fault == "slow" else 1), done.stderr


# --- trouble, by a W&B of the tests ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("error at init", "dvp/seed0: W&B does not take it: the server cannot be reached with key"),
        ("death at init", "its process ended with 9"),
        pytest.param("silence at init", "it was not done after 3 s", marks=pytest.mark.slow),
    ],
)
def test_trouble_costs_one_warning(
    results: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fault: str, why: str
) -> None:
    (results / "fake").mkdir()
    (results / "fake" / "wandb.py").write_text(FAKE, encoding="utf-8")
    given = {"FAKE_WANDB_SERVER": str(results), "FAKE_WANDB_FAULT": fault, "WANDB_MODE": "online"}
    paths = os.pathsep.join([str(results / "fake"), *filter(None, sys.path)])
    for name, value in (given | {"PYTHONPATH": paths}).items():
        monkeypatch.setenv(name, value)
    if fault.startswith("silence"):
        monkeypatch.setattr(wandb_dashboard, "END_SECONDS", 3)
    dashboard_at_the_end(results)
    (sentence,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tailrl: ")]
    assert sentence.startswith("tailrl: warning: W&B lacks the dashboard (") and f"{why}); " in sentence
    assert sentence.endswith(f"`WANDB_MODE=online tailrl dashboard {results}` makes it later")
    assert (results / STATE).is_file(), "the rule's output"


def test_what_was_deleted_on_the_server_is_made_anew() -> None:
    class View:
        id, url = "", "https://r"

        def save(self) -> None:
            if self.id == "deleted":
                raise RuntimeError("no such view")
            self.id = self.id or "new"

    assert wandb_dashboard._save(View(), {"id": "known", "url": ""}) == {"id": "known", "url": "https://r"}
    assert wandb_dashboard._save(View(), {"id": "deleted", "url": ""}) == {"id": "new", "url": "https://r"}


def test_a_server_that_refuses_is_one_sentence(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("no\nkey")

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    monkeypatch.setattr(wandb_dashboard, "mirror", lambda *_: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Api=refuse))  # type: ignore[arg-type]
    for name in ("wandb_workspaces", "wandb_workspaces.reports", "wandb_workspaces.reports.v2"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(reports=SimpleNamespace(v2=None), workspaces=None))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(StudyError, match=r"^W&B does not take the dashboard: no key; it can be tried again$"):
        make_dashboard(results)
    assert not (results / STATE).exists()


# --- without a server -----------------------------------------------------------------------------------


def test_every_panel_is_of_a_metric_that_training_logs_or_the_score() -> None:
    assert {metric for panels in SECTIONS.values() for metric, _ in panels.values()} <= {*METRICS, SCORE}
    assert PANELS[:3] == ["held-out score, avg@k", "reward", "k3 KL, masked, nats"], "the order of a study's page"


@pytest.mark.parametrize("mode", ["offline", None])
def test_offline_it_says_what_shows_the_study(
    results: Path, mode: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode) if mode else monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)  # it is not asked
    make_dashboard(results)
    said = capsys.readouterr().out
    assert f"wandb leet {results}/wandb;" in said and f"{results}/summary.html" in said
    assert said.count("\n") == 1


def test_what_is_no_study_is_named(tmp_path: Path, results: Path) -> None:
    with pytest.raises(StudyError, match=r"holds no finished run"):
        make_dashboard(tmp_path)
    record = results / "train" / "dvp" / "seed0" / "run.json"
    record.write_text("[]")
    vouch_again(record)
    with pytest.raises(StudyError, match=r"run.json: holds list, not a JSON object"):
        make_dashboard(results)
