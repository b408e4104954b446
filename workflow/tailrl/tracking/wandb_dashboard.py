"""Makes a study's workspace and report on a W&B server: the same panels for every study, grouped by arm.

    python -m tailrl.tracking.wandb_dashboard results/NAME   started by `dashboard_at_the_end`
    tailrl dashboard results/NAME                            by hand

The ids of both stay in `wandb_dashboard.json` of the results folder, so that the next call renews them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailrl.artifacts.evaluation import read_evaluation
from tailrl.artifacts.records import RunRecord, finished_jobs, read_record
from tailrl.artifacts.tables import read_csv
from tailrl.config.study import BASE_ARM
from tailrl.runtime.errors import StudyError, reason, say, writing
from tailrl.tracking import metrics as keys
from tailrl.tracking.wandb_mirror import mirror

STATE = "wandb_dashboard.json"
END_SECONDS = 1200
"""How long a study waits at its end for its runs and its dashboard to be sent."""

AGAIN = "; it can be tried again"
SAID = 3
"""The exit code of a process that has said why there is no dashboard."""

SECTIONS: dict[str, dict[str, tuple[str, bool]]] = {
    "Scores": {"held-out score, avg@k": (keys.SCORE, False)},
    "Reward": {"reward": (keys.REWARD, False)},
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
    "Training": {
        "policy entropy, nats": (keys.ENTROPY, False),
        "gradient norm": (keys.GRADIENT_NORM, True),
        "response length, tokens": (keys.LENGTH, False),
    },
}
"""The panels, in the order of the study's own page: title, metric, and whether its axis is logarithmic."""


def make_dashboard(results: Path) -> None:
    """Sends a study's runs and scores to the server, makes its workspace and report there, and prints where they are.

    Without WANDB_MODE=online nothing is sent; ways to see the study without a server are printed instead.

    Raises:
        StudyError: there is no finished run in the results folder, or the server refuses.
    """
    study = read_record(finished_jobs(results)[0], RunRecord).study
    if os.environ.get("WANDB_MODE") != "online":
        print(
            f"W&B is offline. In the terminal: wandb leet {results}/wandb; in a browser: "
            f"{results}/summary.html. For a server: wandb login, then this with WANDB_MODE=online."
        )
        return
    mirror(results, lambda record: _score(results, record))
    scores = _score_table(results)
    import wandb
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    try:
        entity = os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity
        place = {"entity": entity, "project": os.environ.get("WANDB_PROJECT", "tailrl")}
        known = _known(results / STATE, place)
        workspace = _save(_workspace(workspaces, reports, study, place), known.get("workspace", {}))
        report = _save(_report(reports, study, place, scores), known.get("report", {}))
    except Exception as error:  # of wandb's own, of its HTTP library, of the system
        raise StudyError(f"W&B does not take the dashboard: {reason(error)}{AGAIN}") from None
    made = {**place, "workspace": workspace, "report": report}
    with writing(results / STATE):
        (results / STATE).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"workspace: {workspace['url']}\nreport: {report['url']}")


def dashboard_at_the_end(results: Path) -> None:
    """`make_dashboard` in a process of its own: trouble costs one warning, and END_SECONDS at most."""
    # A server may hang the client, whose own process ends with the one that started it.
    command = [sys.executable, "-P", "-m", "tailrl.tracking.wandb_dashboard", str(results)]
    try:
        # Without a terminal to ask for a key.
        code = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=END_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        _warn(results, f"it was not done after {END_SECONDS} s")
    else:
        if code not in (0, SAID):
            _warn(results, f"its process ended with {code}")
    with writing(results / STATE):
        (results / STATE).touch()


def main() -> None:
    """Makes the dashboard of the results folder that is the only argument; a failure is a warning and the code SAID."""
    os.environ["WANDB_SILENT"] = "true"
    results = Path(sys.argv[1])
    try:
        make_dashboard(results)
    except StudyError as error:
        _warn(results, str(error))
        sys.stdout.flush()
        os._exit(SAID)  # at an ordinary exit wandb would wait for its server


def _warn(results: Path, why: str) -> None:
    say(
        f"warning: W&B lacks the dashboard ({why.removesuffix(AGAIN)}); the results are whole, and "
        f"`WANDB_MODE=online tailrl dashboard {results}` makes it later"
    )


def _known(state: Path, place: Mapping[str, str]) -> dict[str, Any]:
    """What is known of the dashboard that was made in this place, if any was."""
    try:
        found = json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and place.items() <= found.items() else {}


def _save(view: Any, known: Mapping[str, str]) -> dict[str, str]:
    """Saves a workspace or a report, in place of the one that is known; returns its ids and its address."""
    names = [name for name in ("id", "_internal_id", "_internal_name") if hasattr(view, name)]
    for name in names:
        setattr(view, name, known.get(name, ""))
    try:
        view.save()
    except Exception:
        if not known:
            raise
        return _save(view, {})  # somebody may have deleted it
    return {name: getattr(view, name) for name in names} | {"url": view.url}


def _score(results: Path, record: Mapping[str, Any]) -> dict[str, float]:
    """The held-out score of a run whose arm has been evaluated."""
    path = results / "eval" / f"{record['arm']}.json"
    scores = {score.seed: score.avg_at_k for score in read_evaluation(path).scores} if path.exists() else {}
    return {keys.SCORE: scores[record["seed"]]} if record["seed"] in scores else {}


def _score_table(results: Path) -> str:
    """The arms' scores with their intervals, and the base policy's, as a Markdown table; empty before the report."""
    scores, base = results / "tables" / "evaluation.csv", results / "eval" / f"{BASE_ARM}.json"
    if not scores.exists():
        return ""
    cells = [[row["arm"], *(row[f"avg_{name}"] for name in ("mean", "low", "high"))] for row in read_csv(scores)]
    if base.exists():
        cells.append(["base policy", str(read_evaluation(base).scores[0].avg_at_k), "", ""])
    rows = [f"| {arm} | {' | '.join(f'{100 * float(x):.1f}' if x else '' for x in shares)} |" for arm, *shares in cells]
    return "\n".join(["| arm | avg@k, % | from | to (95 %) |", "| --- | --- | --- | --- |", *rows])


def _panel(reports: Any, title: str, metric: str, log: bool) -> Any:
    """A plot of the mean over an arm's seeds, with its range from minimum to maximum."""
    grouped = {"groupby": reports.Config("arm"), "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
    if metric == keys.SCORE:
        return reports.BarPlot(title=title, metrics=[metric], **grouped)
    return reports.LinePlot(title=title, x=keys.STEP, y=[metric], log_y=log, **grouped)


def _panels(reports: Any, section: str) -> list[Any]:
    return [_panel(reports, title, metric, log) for title, (metric, log) in SECTIONS[section].items()]


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


def _report(reports: Any, study: str, place: dict[str, str], scores: str) -> Any:
    blocks = [
        reports.P(
            "Lines and bars are means over an arm's seeds; bands reach from the smallest to the largest. Verdicts on "
            "the papers' claims are in the study's own page, summary.html."
        ),
        reports.TableOfContents(),
    ]
    for name in SECTIONS:
        runs = reports.Runset(**place, name=study, filters=f"Config('study') = '{study}'", groupby=["config.arm"])
        table = [reports.MarkdownBlock(scores)] if name == "Scores" and scores else []
        blocks += [
            reports.H1(name),
            *table,
            reports.PanelGrid(runsets=[runs], panels=_panels(reports, name)),
        ]
    return reports.Report(
        **place,
        title=f"{study}: training under a mismatch",
        description="Runs of one study, grouped by arm.",
        blocks=blocks,
        width="fluid",
    )


if __name__ == "__main__":
    main()
