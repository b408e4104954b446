"""The table of docs/how-to/verl-study.md: the same arms by our own loop and by verl, measured by `make verl-study`."""

from collections.abc import Iterator
from pathlib import Path

from docsite.markdown import table
from tailrl.artifacts.tables import read_csv
from tailrl.page_parts.number_text import points
from tailrl.stats.tests import Difference, paired_difference

RESULTS = Path(__file__).parents[1] / "results"
TRAINERS = {"our own loop": "", "verl": "_verl"}

Row = dict[str, str]


def rows(file: Path) -> dict[str, list[Row]]:
    """The rows of a file by arm."""
    arms: dict[str, list[Row]] = {}
    for row in read_csv(file, ("arm",)):
        arms.setdefault(row["arm"], []).append(row)
    return arms


def column(found: list[Row], name: str) -> list[float]:
    return [float(row[name]) for row in found]


def comparison() -> str:
    """Both trainers' runs, and what our own update makes of verl's samples."""
    steps, scores = rows(RESULTS / "verl_study.csv"), rows(RESULTS / "verl_study_scores.csv")

    def lines() -> Iterator[list[str]]:
        for arm, found in steps.items():
            untrained = column(scores[arm], "untrained")
            for trainer, ending in TRAINERS.items():
                rewards, k3 = column(found, f"reward{ending}"), column(found, f"k3{ending}")
                score = column(scores[arm], f"score{ending}")
                gained = paired_difference(score, untrained)
                yield [
                    f"`{arm}`",
                    trainer,
                    f"{sum(rewards) / len(rewards):.2f}",
                    f"{max(k3):.1e}",
                    f"{100 * sum(score) / len(score):.1f} %",
                    _points(gained),
                ]

    head = ["arm", "trainer", "mean reward", "largest k3, nats", "held-out score", "gain over the untrained policy"]
    apart = [paired_difference(column(found, "score_verl"), column(found, "score")) for found in scores.values()]
    differences = "; ".join(f"`{arm}` {_points(difference)}" for arm, difference in zip(scores, apart, strict=True))
    every = [row for found in steps.values() for row in found]
    norms = list(zip(column(every, "gradient_norm_repeated"), column(every, "gradient_norm_verl"), strict=True))
    largest = max(abs(ours - verls) for ours, verls in norms) / max(verls for _, verls in norms)
    return (
        f"{table(head, lines())}\n"
        f"Score of verl's policy minus ours, by held-out problem, with its 95 % interval: {differences}.\n\n"
        f"Our own update, given verl's samples, makes verl's policy. In {len(every) // len(steps)} steps the two "
        f"trainers' log-probs of a token differ by at most {max(column(every, 'largest_difference')):.1e} nats. Their "
        f"gradient norms differ by at most {largest:.1e} of the largest one. "
        f"{sum(int(row['outside_of_one_set']) for row in every)} tokens are in one trainer's safe set and not in "
        "the other's. "
        "So the runs differ by their samples: verl takes the problems in another order, and draws with other random "
        "numbers. All [steps](../results/verl_study.csv) and [scores](../results/verl_study_scores.csv)."
    )


def _points(difference: Difference) -> str:
    return f"{points(difference)} points".replace("-", "−")
