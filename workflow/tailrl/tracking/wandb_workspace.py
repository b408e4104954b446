"""A study's saved workspace on a W&B server: the panels of the study's page, its runs grouped by arm."""

import os
from pathlib import Path
from typing import Any

from tailrl.artifacts.records import RunRecord, finished_jobs, read_record
from tailrl.runtime.data_files import yaml_beside
from tailrl.runtime.errors import ConfigurationError, reason
from tailrl.tracking.metrics import STEP

SECTIONS: dict[str, list[tuple[str, str, bool]]] = yaml_beside(__file__, "wandb_workspace.yaml")


def save_workspace(results: Path) -> str:
    """Saves the workspace of the study in a results folder; returns its address.

    Raises:
        StudyError: there is no finished run, or the server does not take it.
    """
    study = read_record(finished_jobs(results)[0], RunRecord).study
    import wandb
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    def panel(title: str, metric: str, log: bool) -> Any:
        grouped = {"groupby": reports.Config("arm"), "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
        return reports.LinePlot(title=title, x=STEP, y=[metric], log_y=log, **grouped)

    def section(name: str) -> Any:
        panels = [panel(*one) for one in SECTIONS[name]]
        return workspaces.Section(name=name, panels=panels, is_open=True, pinned=True)

    try:
        workspace = workspaces.Workspace(
            entity=os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity,
            project=os.environ.get("WANDB_PROJECT", "tailrl"),
            name=study,
            sections=[section(name) for name in SECTIONS],
            settings=workspaces.WorkspaceSettings(x_axis=STEP, max_runs=100),
            runset_settings=workspaces.RunsetSettings(
                filters=f"Config('study') = '{study}'", groupby=[workspaces.Config("arm")]
            ),
        )
        workspace.save()
    except Exception as error:  # of wandb's own, of its HTTP library, of the system
        raise ConfigurationError(f"{results}: W&B does not take the workspace: {reason(error)}") from None
    return str(workspace.url)
