"""A study on a real Slurm, through profiles/slurm as it stands: jobs are cancelled, daemons and nodes die, and it ends
as on one machine, to the bit.

`make slurm` runs it: some minutes, most of them waiting. Two nodes on one machine stand for a cluster (`cluster.py`):
they share its disk, so a shared file system is not tested here, and the GPUs that they hand out are none.
"""

import importlib.util
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import NODES, Cluster, missing, running
from outcome import compare, final
from study_fixture import ROOT, copy_workflow

from tailrl.config.load import read_study
from tailrl.planning.plan import evaluation_request, policy_request, training_request

PLUGIN = "snakemake_executor_plugin_slurm"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"tests/slurm/cluster.py; not installed: {', '.join(missing())}"),
    pytest.mark.skipif(
        importlib.util.find_spec(PLUGIN) is None, reason="envs/slurm.txt is not installed: `make slurm`"
    ),
]

EXACT = {"engine": "exact", "dtype": "float32"}
CHANGES: dict[str, Any] = {
    "name": "slurm",
    "seeds": [0],
    "policy.warm_start.stages": [{"name": "arithmetic", "problems": 800, "terms": [2, 3], "seed": 1}],
    "training.steps": 60,
    "training.checkpoint_every": 2,
    "ablations": {},
    "arms.naive": {"sampler": EXACT},
    "arms.dvp": {"vocabulary": {"rule": "min_p", "rho": "1e-2"}, "sampler": EXACT},
    "arms.dvp_mis.sampler": EXACT,
    "evaluation.sampler": EXACT,
}
RUNS = {f"{arm}_0": f"train/{arm}/seed0" for arm in ("naive", "dvp", "dvp_mis")}
"""As the executor names a job by its wildcards, and where the run lies."""
PATIENCE = 900
"""Seconds that anything is waited for."""


@dataclass
class Blow:
    """What befell a run.

    Attributes:
        what: the blow.
        run: one of RUNS.
        job: its number in Slurm.
        node: where it ran.
        step: of its last checkpoint when it was struck.
        unharmed: whether the same process went on.
    """

    what: str
    run: str
    job: str
    node: str
    step: int
    unharmed: bool = False


@dataclass
class Study:
    """A study that runs on a cluster, or has run."""

    folder: Path
    cluster: Cluster
    process: "subprocess.Popen[bytes]"
    blows: list[Blow] = field(default_factory=list)

    @property
    def results(self) -> Path:
        return self.folder / "results" / "slurm"

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """What the condition gives as soon as it is true; fails where the study ends or nothing comes of it."""
        end = time.monotonic() + PATIENCE
        while not (found := condition()):
            said = (self.folder / "output").read_text(errors="replace")
            assert self.process.poll() is None, f"the study has ended before it could be struck\n{said[-5000:]}"
            assert time.monotonic() < end, f"{said[-5000:]}\n{self.cluster.logs()}"
            time.sleep(0.05)
        return found

    def step(self, run: str) -> int:
        """Of the last checkpoint; 0 where there is none."""
        names = (file.name for file in (self.results / RUNS[run] / "checkpoints").glob("step-*"))
        return max((int(name.split("-")[1]) for name in names), default=0)

    def trainer(self, run: str) -> str:
        """Who trains the run: the words in its lock."""
        return (self.results / RUNS[run] / "checkpoints" / "lock").read_text()

    def training(self) -> Blow | None:
        """Of the runs that have a checkpoint and do train now, the one that has most still to do."""
        found = []
        for number, job in self.cluster.jobs().items():
            run = job["Comment"].removeprefix("rule_train_wildcards_slurm_")
            if run in RUNS and job["JobState"] == "RUNNING" and (step := self.step(run)):
                found.append(Blow("", run, number, job["NodeList"], step))
        return min(found, key=lambda blow: blow.step, default=None)

    def strike(self, what: str) -> Blow:
        """Choose a run that trains, and note it."""
        begun = {run: self.step(run) for run in RUNS}

        def got_on() -> Blow | None:
            """Not one that waits for Python to import torch."""
            found = self.training()
            return found if found and found.step > begun[found.run] else None

        blow: Blow = self.wait_for(got_on)
        blow.what = what
        self.blows.append(blow)
        return blow

    # --- blows ---------------------------------------------------------------------------------------

    def kill_daemon(self) -> None:
        blow = self.strike("the daemon of its node is killed, and starts again")
        trainer = self.trainer(blow.run)
        self.cluster.kill_daemon(blow.node)
        self.cluster.start_node(blow.node)
        self.wait_for(lambda: self.step(blow.run) > blow.step)
        blow.unharmed = self.trainer(blow.run) == trainer

    def cancel(self) -> None:
        blow = self.strike("its job is cancelled")
        self.cluster.run("scancel", blow.job)

    def lose_node(self) -> None:
        blow = self.strike("its node dies")
        self.cluster.kill_node(blow.node)
        (other,) = set(NODES) - {blow.node}
        self.wait_for(
            lambda: (job := self.cluster.jobs()[blow.job])["JobState"] == "RUNNING" and job["NodeList"] == other
        )
        self.cluster.start_node(blow.node)

    def reboot_node(self) -> None:
        blow = self.strike("its node dies, and is back at once")
        self.cluster.kill_node(blow.node)
        self.cluster.start_node(blow.node)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The same study on one machine, without Slurm."""
    workflow = copy_workflow(tmp_path_factory.mktemp("local"))
    done = workflow.run("snakemake", "--cores", "2", "--configfile", workflow.write_study(CHANGES))
    assert done.returncode == 0, done.stdout + done.stderr
    return final(workflow.folder / "results" / "slurm")


@pytest.fixture(scope="module")
def study(undisturbed: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    """The study after all blows, finished; the cluster still runs."""
    del undisturbed  # it goes first: what fails without Slurm would fail with it
    workflow = copy_workflow(tmp_path_factory.mktemp("study"))
    command = ("snakemake", "--profile", "profiles/slurm", "--configfile", workflow.write_study(CHANGES))
    # The plugin asks after 40 s, and then more rarely: long for jobs of seconds.
    interval = ("--slurm-init-seconds-before-status-checks", "2")
    with running(tmp_path_factory.mktemp("cluster") / "slurm") as cluster:
        environment = workflow.environment()
        path = f"{cluster.folder}/bin:{environment['PATH']}:{cluster.environment['PATH']}"
        begun = time.monotonic()
        with (workflow.folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [*command, *interval],
                cwd=workflow.folder,
                env=environment | cluster.environment | {"PATH": path},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        study = Study(workflow.folder, cluster, process)
        try:
            study.kill_daemon()
            study.cancel()
            study.lose_node()
            study.reboot_node()
            code = process.wait(timeout=PATIENCE)
            assert code == 0, (workflow.folder / "output").read_text(errors="replace")[-5000:] + cluster.logs()
            print(f"\n{time.monotonic() - begun:.0f} s", *study.blows, sep="\n")
            yield study
        finally:
            process.kill()
            process.wait()


def test_the_results_are_those_of_one_machine(study: Study, undisturbed: Mapping[str, Any]) -> None:
    compare(final(study.results), undisturbed)


def test_training_goes_on_from_its_last_checkpoint(study: Study) -> None:
    for blow in study.blows:
        resumed = json.loads((study.results / RUNS[blow.run] / "run.json").read_text())["resumed_at_steps"]
        if blow.unharmed:
            continue
        # A checkpoint more may have been written between the look and the blow.
        assert any(step in (blow.step, blow.step + 2) for step in resumed), (blow, resumed)


def test_a_job_does_not_mind_the_end_of_its_daemon(study: Study) -> None:
    assert [blow.unharmed for blow in study.blows] == [True, False, False, False]


def test_a_cancelled_job_gets_a_new_one_and_a_lost_one_is_queued_again(study: Study) -> None:
    jobs = study.cluster.jobs()
    _, cancelled, lost, rebooted = (jobs[blow.job] for blow in study.blows)
    assert cancelled["JobState"] == "CANCELLED"
    assert [job["JobState"] for job in jobs.values() if job["Comment"] == cancelled["Comment"]].count("COMPLETED") == 1
    for job in (lost, rebooted):
        assert (job["JobState"], int(job["Restarts"]) > 0) == ("COMPLETED", True)


def test_jobs_ask_for_what_the_profile_says(study: Study) -> None:
    profile = yaml.safe_load((ROOT / "profiles/slurm/profile.yaml").read_text())
    asked = dict[str, set[tuple[str, ...]]]()
    for job in study.cluster.jobs().values():
        rule = re.match(r"rule_([a-z]+)", job["Comment"])
        assert rule is not None
        of_job = job["NumCPUs"], job["MinMemoryNode"], job["TimeLimit"], job.get("TresPerJob", "")
        asked.setdefault(rule[1], set()).add(of_job)
    assert asked.keys() == {"problems", "policy", "train", "evaluate", "summarise"}
    settings = read_study(study.folder / "changed.yaml")
    sizes = {
        "train": training_request(settings, settings.run("naive"), 1),
        "evaluate": evaluation_request(settings, 1, 1),
    }
    sizes["policy"] = policy_request(settings)
    for rule, found in asked.items():
        planned = asdict(sizes[rule]) if rule in sizes else {}
        gpu = {"gpu": 1} if rule in ("train", "evaluate") else {}
        wanted = profile["default-resources"] | profile["set-resources"].get(rule, {}) | planned | gpu
        hours, minutes = divmod(wanted["runtime"], 60)
        time_limit = f"{hours // 24}-{hours % 24:02}:{minutes:02}:00" if hours >= 24 else f"{hours:02}:{minutes:02}:00"
        memory = f"{wanted['mem_mb']}M" if wanted["mem_mb"] % 512 else f"{wanted['mem_mb'] / 1024:.2f}G"
        gpus = f"gres:gpu:{wanted['gpu']}" if "gpu" in wanted else ""
        assert found == {(str(wanted["cpus_per_task"]), memory, time_limit, gpus)}, rule
