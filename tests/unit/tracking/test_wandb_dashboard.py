"""W&B's workspace and report, with a mocked API: the calls, and the message without a server."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from artifacts_fixture import record_of, vouch_again, write_job

from tailrl.config.load import parse_study
from tailrl.runtime.errors import StudyError
from tailrl.tracking import wandb_dashboard
from tailrl.tracking.metrics import METRICS
from tailrl.tracking.wandb_dashboard import SECTIONS, make_dashboard


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results" / "stress"
    for arm, run in ((arm, parse_study({"name": "stress", "arms": {arm: {}}}).run(arm)) for arm in ("naive", "dvp")):
        write_job(folder / "train" / arm / "seed0", record_of(run, 0), [{"train/step": 0.0}])
    return folder


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> dict[str, MagicMock]:
    """The parts of W&B's API, each remembering its calls, and a server."""
    parts = {name: MagicMock(name=name) for name in ("wandb", "reports", "workspaces")}
    parts["wandb"].Api.return_value.default_entity = "us"
    for name, module in (("wandb", parts["wandb"]), ("wandb_workspaces", ModuleType("wandb_workspaces"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports", ModuleType("reports"))
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", parts["reports"])
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", parts["workspaces"])
    sys.modules["wandb_workspaces"].workspaces = parts["workspaces"]  # type: ignore[attr-defined]
    sys.modules["wandb_workspaces"].reports = sys.modules["wandb_workspaces.reports"]  # type: ignore[attr-defined]
    sys.modules["wandb_workspaces.reports"].v2 = parts["reports"]  # type: ignore[attr-defined]
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "rl")
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    return parts


def keywords(call: MagicMock) -> dict[str, Any]:
    call.assert_called_once()
    return dict(call.call_args.kwargs)


def test_a_workspace_and_a_report_are_made(
    results: Path, wandb: dict[str, MagicMock], capsys: pytest.CaptureFixture[str]
) -> None:
    workspaces, reports = wandb["workspaces"], wandb["reports"]
    workspaces.Workspace.return_value.url = "https://w"
    reports.Report.return_value.url = "https://r"
    make_dashboard(results)
    assert capsys.readouterr().out == "workspace: https://w\nreport: https://r\n"
    workspace, report = keywords(workspaces.Workspace), keywords(reports.Report)
    assert (workspace["entity"], workspace["project"], workspace["name"]) == ("us", "rl", "stress")
    assert (report["entity"], report["project"]) == ("us", "rl") and "stress" in report["title"]
    workspaces.Workspace.return_value.save.assert_called_once_with()
    reports.Report.return_value.save.assert_called_once_with()
    assert [call.kwargs["name"] for call in workspaces.Section.call_args_list] == list(SECTIONS)
    assert {call.args for call in workspaces.Config.call_args_list} == {("arm",)}
    settings = keywords(workspaces.RunsetSettings)
    assert settings == {"filters": "Config('study') = 'stress'", "groupby": [workspaces.Config.return_value]}
    for call in reports.Runset.call_args_list:
        assert call.kwargs["filters"] == "Config('study') = 'stress'" and call.kwargs["groupby"] == ["config.arm"]
    plotted = [call.kwargs["y"][0] for call in reports.LinePlot.call_args_list]
    assert plotted == 2 * [metric for panels in SECTIONS.values() for metric, _ in panels.values()]


def test_every_panel_is_of_a_metric_that_training_logs() -> None:
    assert {metric for panels in SECTIONS.values() for metric, _ in panels.values()} <= METRICS.keys()


def test_the_entity_can_be_named(results: Path, wandb: dict[str, MagicMock], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ENTITY", "others")
    make_dashboard(results)
    assert keywords(wandb["workspaces"].Workspace)["entity"] == "others"
    wandb["wandb"].Api.assert_not_called()


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


def test_the_library_takes_what_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own objects, as it would send them; the server that it asks for the project is mocked."""
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports import v2 as reports

    server = {"_get_api": MagicMock(), "execute_graphql": lambda *_: {"project": {"internalId": "1"}}}
    for name, answer in server.items():
        monkeypatch.setattr(sys.modules["wandb_workspaces.reports.v2.interface"], name, answer)
    place = {"entity": "us", "project": "rl"}
    workspace = (
        wandb_dashboard._workspace(workspaces, reports, "stress", place)._to_model().model_dump_json(by_alias=True)
    )
    grids = [
        block._to_model().model_dump_json(by_alias=True)
        for block in wandb_dashboard._report(reports, "stress", place).blocks
        if isinstance(block, reports.PanelGrid)
    ]
    assert len(grids) == len(SECTIONS)
    for sent, sections in ((workspace, list(SECTIONS)), *zip(grids, [[name] for name in SECTIONS], strict=True)):
        assert all(metric in sent for name in sections for metric, _ in SECTIONS[name].values())
        assert '"stress"' in sent and "study" in sent, "of this study's runs alone"
        assert sent.count("minmax") >= len(SECTIONS[sections[0]])


def test_a_server_that_refuses_is_one_sentence(results: Path, wandb: dict[str, MagicMock]) -> None:
    wandb["workspaces"].Workspace.return_value.save.side_effect = RuntimeError("no\nkey")
    with pytest.raises(StudyError, match=r"^W&B does not take the dashboard: no key; it can be tried again$"):
        make_dashboard(results)


def test_what_is_no_study_is_named(tmp_path: Path, results: Path) -> None:
    with pytest.raises(StudyError, match=r"holds no finished run"):
        make_dashboard(tmp_path)
    record = results / "train" / "dvp" / "seed0" / "run.json"
    record.write_text("[]")
    vouch_again(record)
    with pytest.raises(StudyError, match=r"run.json: holds list, not a JSON object"):
        make_dashboard(results)
