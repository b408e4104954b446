"""Studies with the same arms, compared arm by arm; they differ in a setting of all arms, such as the task."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from tailrl.analysis.across import GAIN, QUANTITIES, ArmQuantity, arm_quantities
from tailrl.analysis.first_steps import first_k3, ratios_across
from tailrl.analysis.format import p_value
from tailrl.artifacts.claims import write_verdicts
from tailrl.artifacts.evaluation import read_evaluation
from tailrl.artifacts.results import read_results
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.claims.across import judge_across
from tailrl.claims.finding import ends, interval
from tailrl.config.study import Study
from tailrl.report.axes import (
    arm_legend,
    arm_styles,
    make_panels,
    save_svg,
    say_in_the_middle,
    set_magnitude_scale,
    style,
)
from tailrl.report.page import render
from tailrl.runtime.errors import StudyError


def write_across(studies: Sequence[Study], folder: Path, out: Path) -> None:
    """Write out.csv, out.svg, out.md, out_claims.csv and out_k3_ratios.csv: the arms that all studies have.

    The seeds come from the results, since a command line may have changed those of the study files.

    Args:
        studies: at least two; the others are compared with the first.
        folder: holds the results folder of each study.
        out: path of the files, without suffix.

    Raises:
        StudyError: a single study, studies without a common arm, or a missing result.
    """
    if len(studies) < 2:
        raise StudyError("a comparison needs at least two studies")
    shared = [arm for arm in studies[0].arms if all(arm in study.arms for study in studies)]
    if not shared:
        raise StudyError(f"the studies {', '.join(study.name for study in studies)} have no arm in common")
    studies = [_as_run(study, folder / study.name, shared) for study in studies]
    read = [read_results(study, folder / study.name, shared) for study in studies]
    measured = [one for name in QUANTITIES for one in arm_quantities(name, shared, studies, read)]
    write_csv(out.with_name(f"{out.name}.csv"), flat_rows(measured))
    write_verdicts(out.with_name(f"{out.name}_claims.csv"), judge_across(studies, read, measured))
    first, *others = ((study.name, first_k3(results)) for study, results in zip(studies, read, strict=True))
    ratios = [one for name, own in others for one in ratios_across((first[0], name), first[1], own)]
    write_csv(out.with_name(f"{out.name}_k3_ratios.csv"), flat_rows(ratios))
    save_svg(across_figure(measured, list(studies[0].arms)), out.with_name(f"{out.name}.svg"))
    out.with_name(f"{out.name}.md").write_text(_page(studies, shared, measured), encoding="utf-8")


def _as_run(study: Study, folder: Path, arms: Sequence[str]) -> Study:
    """The study with the seeds of the arms' evaluations; the first arm's are the study's."""
    scores = {arm: read_evaluation(folder / "eval" / f"{arm}.json").scores for arm in arms}
    seeds = {arm: tuple(score.seed for score in own) for arm, own in scores.items()}
    own = {arm: study.arms[arm].model_copy(update={"seeds": seeds[arm]}) for arm in arms}
    return study.model_copy(update={"seeds": seeds[arms[0]], "arms": study.arms | own})


def across_figure(measured: Sequence[ArmQuantity], styled: Sequence[str]) -> Figure:
    """A panel for each quantity, a line for each arm over the studies, whose labels leave out a common start.

    `styled` are all arms of the first study, which give the looks.
    """
    arms, studies, names = (
        list(dict.fromkeys(getattr(p, key) for p in measured)) for key in ("arm", "study", "quantity")
    )
    looks = arm_styles(styled)
    same = next((i for i, letters in enumerate(zip(*studies, strict=False)) if len(set(letters)) > 1), 0)
    begin = studies[0][:same].rfind("_") + 1
    with style():
        figure, panels = make_panels(math.ceil(len(names) / 2), 2, 1.9 * math.ceil(len(names) / 2))
        for ax, name in itertools.zip_longest(panels, names):
            if name is None:
                ax.set_axis_off()
                continue
            for index, arm in enumerate(arms):
                colour, dash, marker = looks[arm]
                own = [one.value for one in measured if (one.quantity, one.arm) == (name, arm)]
                x = [at + 0.2 * ((index + 1) / (len(arms) + 1) - 0.5) for at in range(len(own))]
                ax.plot(
                    x, [i.mean for i in own], color=colour, linestyle=dash, marker=marker, markersize=3, linewidth=0.8
                )
                ax.vlines(x, [i.low for i in own], [i.high for i in own], color=colour, linewidth=1)
            if all(math.isnan(one.value.mean) for one in measured if one.quantity == name):
                say_in_the_middle(ax)
            elif name != GAIN:
                set_magnitude_scale(ax, [one.value.mean for one in measured if one.quantity == name])
            ax.set_title(name)
            ax.set_xticks(range(len(studies)), [study[begin:] for study in studies])
        arm_legend(figure, styled, arms)
    return figure


def _page(studies: Sequence[Study], arms: Sequence[str], measured: Sequence[ArmQuantity]) -> str:
    cells = {(one.quantity, one.arm, one.study): _cell(one) for one in measured}
    tables = {name: {arm: [cells[name, arm, study.name] for study in studies] for arm in arms} for name in QUANTITIES}
    return render("across.md.j2", studies=studies, tables=tables)


def _cell(one: ArmQuantity) -> str:
    value = one.value
    if np.isnan(value.mean):
        return "not recorded"
    text = interval(*ends(value))
    return text if np.isnan(one.change_p_holm) else f"{text} (p {p_value(one.change_p_holm)})"
