"""What is said at the end of a call of Snakemake."""

from tailrl.planning.ending import stopped, where_to_look

ALL = ["results/s/summary.md", "results/s/report.html", "results/s/summary.html", "results/s/tables/arms.csv"]


def test_where_to_look_and_what_comes_next() -> None:
    said = where_to_look("results/s", ALL, ["rho"], " --configfile s.yaml")
    pages = "results/s/report.html, results/s/summary.html"
    assert said == f"look at {pages}; next: snakemake --cores all ablations --configfile s.yaml"
    said = where_to_look(
        "results/s", [*ALL, "results/s/ablations/rho.md", "results/s/ablations/rho.html"], ["rho"], None
    )
    assert said == f"look at {pages}, results/s/ablations/rho.html; next: snakemake --cores 1 overview"
    said = where_to_look("results/s", ["results/s/train/a/seed0/metrics.jsonl"], [], "")
    assert said == "look at results/s; next: snakemake --cores all"
    assert "cores 1 overview" in where_to_look("results/s", ALL, [], "")


def test_what_was_stopped() -> None:
    said = stopped(["train b, seed 0\nlog: results/s/logs/train/b/seed0.log", "evaluate a"])
    assert said == "stopped: evaluate a, train b, seed 0; the same command goes on, training from its last checkpoint"
