"""Makes a study's workspace and report on a W&B server: the same panels for every study, grouped by arm."""

import os
from pathlib import Path
from typing import Any

from tailrl.artifacts.records import RunRecord, finished_jobs, read_record
from tailrl.runtime.errors import StudyError, reason
from tailrl.tracking import metrics as keys

SECTIONS: dict[str, dict[str, tuple[str, bool]]] = {
    "Training": {
        "reward": (keys.REWARD, False),
        "policy entropy, nats": (keys.ENTROPY, False),
        "gradient norm": (keys.GRADIENT_NORM, True),
        "response length, tokens": (keys.LENGTH, False),
    },
    "Mismatch": {
        "k3 KL, masked, nats": (keys.K3_MASKED, True),
        "k3 KL, unmasked, nats": (keys.K3_UNMASKED, True),
        "mean weight before clipping": (keys.WEIGHT_RAW, True),
        "effective sample size, of batch": (keys.SAMPLE_SIZE_RAW, False),
    },
    "Pruning": {
        "kept mass in the trainer": (keys.KEPT_MASS_TRAIN, False),
        "size of the trainer's set, tokens": (keys.KEPT_VOCAB_TRAIN, True),
        "sampled tokens outside it": (keys.OUTSIDE, False),
        "sequences vetoed": (keys.VETOED, False),
    },
}
"""The panels: title, metric, and whether its axis is logarithmic."""


def make_dashboard(results: Path) -> None:
    """Makes the workspace and the report of a study on the server, and prints where they are.

    Without WANDB_MODE=online nothing is sent; ways to see the study without a server are printed instead.

    Raises:
        StudyError: there is no finished run in the results folder, or the server refuses.
    """
    study = read_record(finished_jobs(results)[0], RunRecord).study
    if os.environ.get("WANDB_MODE") != "online":
        print(
            f"W&B is offline. In the terminal: wandb leet {results}/wandb; in a browser: "
            f"{results}/summary.html. For a server: wandb login, tailrl mirror {results}, then this with "
            "WANDB_MODE=online."
        )
        return
    import wandb
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    try:
        entity = os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity
        place = {"entity": entity, "project": os.environ.get("WANDB_PROJECT", "tailrl")}
        workspace = _workspace(workspaces, reports, study, place)
        workspace.save()
        report = _report(reports, study, place)
        report.save()
    except Exception as error:  # of wandb's own, of its HTTP library, of the system
        raise StudyError(f"W&B does not take the dashboard: {reason(error)}; it can be tried again") from None
    print(f"workspace: {workspace.url}\nreport: {report.url}")


def _panels(reports: Any, section: str) -> list[Any]:
    """Line plots of one section: the mean over an arm's seeds, with a band from minimum to maximum."""
    return [
        reports.LinePlot(
            title=title,
            x=keys.STEP,
            y=[metric],
            log_y=log,
            groupby=reports.Config("arm"),
            groupby_aggfunc="mean",
            groupby_rangefunc="minmax",
        )
        for title, (metric, log) in SECTIONS[section].items()
    ]


def _workspace(workspaces: Any, reports: Any, study: str, place: dict[str, str]) -> Any:
    return workspaces.Workspace(
        **place,
        name=study,
        sections=[
            workspaces.Section(name=name, panels=_panels(reports, name), is_open=True, pinned=True) for name in SECTIONS
        ],
        settings=workspaces.WorkspaceSettings(x_axis=keys.STEP, max_runs=100),
        runset_settings=workspaces.RunsetSettings(
            filters=f"Config('study') = '{study}'", groupby=[workspaces.Config("arm")]
        ),
    )


def _report(reports: Any, study: str, place: dict[str, str]) -> Any:
    blocks = [
        reports.P(
            "Lines are means over an arm's seeds, bands reach from minimum to maximum. Scores, intervals and "
            "the papers' claims are in the study's own page, summary.html."
        ),
        reports.TableOfContents(),
    ]
    for name in SECTIONS:
        runs = reports.Runset(**place, name=study, filters=f"Config('study') = '{study}'", groupby=["config.arm"])
        blocks += [reports.H1(name), reports.PanelGrid(runsets=[runs], panels=_panels(reports, name))]
    return reports.Report(
        **place,
        title=f"{study}: training under a mismatch",
        description="Runs of one study, grouped by arm.",
        blocks=blocks,
        width="fluid",
    )
