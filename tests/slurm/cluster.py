"""A Slurm of its own on one machine: two nodes, whose daemons can be killed like those of a real one.

    apt-get install --no-install-recommends slurm-wlm munge   # Debian 12: Slurm 22.05
    python tests/slurm/cluster.py /tmp/cluster                # says how to reach it; Ctrl-C stops it

Nothing outside the folder is written or configured: keys, logs, spool and the states of jobs lie in it, ports are free
ones, and every daemon is a child of this process. Slurm must have been built for several daemons on one machine, as
Debian's is. The nodes say that they have more cores and memory than the machine, and two GPUs, which are /dev/null and
/dev/zero, so that jobs ask for what they would ask for elsewhere.
"""

import getpass
import os
import platform
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NODES = ("node1", "node2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
"""Debian keeps the daemons where only root's path leads."""
PATIENCE = 60
"""Seconds within which the daemons must be up, or down."""

CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
# Slurm starts a job again only when the credential of its first start has expired: 2 minutes by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
# No cgroups: a container has none to give.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
# Seconds after which a silent node is down, and between the SIGTERM and the SIGKILL of a cancelled job.
SlurmdTimeout=10
KillWait=5
GresTypes=gpu
# What became of a job is looked at when all is over.
MinJobAge=86400
MailProg=/bin/true
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""
NODE = "NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=500000 Gres=gpu:2"
SRUN = """\
#!/bin/sh
# Snakemake's plugin takes SLURM_CONF out of the environment of srun (slurm-jobstep 0.6.1).
SLURM_CONF={folder}/slurm.conf exec {srun} "$@"
"""
SACCT = """\
#!/bin/sh
# There is no accounting. The plugin turns to sacct where the controller was slow to answer, and an error would let it
# wait for ever: let it hear what squeue says of the run that its last argument names.
for run; do :; done
exec squeue --noheader --states=all --format='%i|%T' --name "$run"
"""
DEVICES = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"


def missing() -> list[str]:
    """The programs of Slurm and munge that this machine lacks."""
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


class Cluster:
    """A running cluster.

    Attributes:
        folder: where all of it lies.
        environment: what a command needs to reach it, on top of the caller's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"tailrl{os.getpid()}"
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{folder}/bin{os.pathsep}{PATH}"}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._write()

    def _write(self) -> None:
        for part in ("bin", "state", *NODES):
            (self.folder / part).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        controller, *ports = free_ports(1 + len(NODES))
        host = platform.node()
        lines = [NODE.format(node=node, host=host, port=port) for node, port in zip(NODES, ports, strict=True)]
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                name=self.name,
                host=host,
                controller=controller,
                user=getpass.getuser(),
                folder=self.folder,
                nodes="\n".join(lines),
            )
        )
        (self.folder / "gres.conf").write_text(DEVICES)
        for name, script in (("srun", SRUN), ("sacct", SACCT)):
            file = self.folder / "bin" / name
            file.write_text(script.format(folder=self.folder, srun=shutil.which("srun", path=PATH)))
            file.chmod(0o755)

    # --- daemons -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all daemons; returns when the nodes take jobs."""
        files = {name: f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
        # Without --force munged insists on a socket that other users can reach.
        self._daemon("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files.values())
        wait_for(lambda: (self.folder / "munge.socket").exists(), self.logs)
        self._daemon("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: self.run("sinfo", "--noheader", "--format=%T").split() == ["idle"], self.logs)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node that has none."""
        self._daemon("slurmd", "-D", "-N", node, name=node)

    def _daemon(self, program: str, *arguments: str, name: str = "") -> None:
        with (self.folder / f"{name or program}.out").open("ab") as output:
            self.daemons[name or program] = subprocess.Popen(
                [shutil.which(program, path=PATH) or program, *arguments],
                env=os.environ | self.environment,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill_daemon(self, node: str) -> None:
        """SIGKILL for the daemon of a node alone: its jobs go on."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def kill_node(self, node: str) -> None:
        """SIGKILL for a node's daemon and all that runs there, as in a power cut."""
        self.kill_daemon(node)
        while processes := self.processes(node):
            for process in processes:
                kill(process)

    def processes(self, node: str) -> list[int]:
        """The jobs on a node, and what Slurm started beside them."""
        ours = {f"SLURM_CLUSTER_NAME={self.name}".encode(), f"SLURMD_NODENAME={node}".encode()}
        log, found = self.folder / f"{node}.log", []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                # Slurm's process beside a job shows its title for an environment, but it writes the node's log.
                beside = any(file.readlink() == log for file in (process / "fd").iterdir())
                if beside or ours <= set((process / "environ").read_bytes().split(b"\0")):
                    found.append(int(process.name))
            except OSError:
                continue  # it has ended, or is another user's
        return found

    def stop(self) -> None:
        """Kill the jobs and every daemon."""
        for node in NODES:
            if node in self.daemons:
                self.kill_node(node)
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()

    # --- commands ------------------------------------------------------------------------------------

    def run(self, *command: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        return done.stdout

    def jobs(self) -> dict[str, dict[str, str]]:
        """Every job that the cluster remembers, by its number, with what `scontrol show job` says of it."""
        shown = self.run("scontrol", "--oneliner", "show", "job")
        jobs = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in shown.splitlines()]
        return {job["JobId"]: job for job in jobs if "JobId" in job}

    def logs(self) -> str:
        """The last lines of each daemon's log."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"{file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster within the block."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens to."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def kill(process: int) -> None:
    """SIGKILL, where it still runs."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_for(condition: Callable[[], bool], logs: Callable[[], str]) -> None:
    """Return as soon as the condition holds.

    Raises:
        TimeoutError: it did not within PATIENCE; holds the logs.
    """
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(logs())
        time.sleep(0.05)


def main() -> None:
    if lacking := missing():
        sys.exit(f"not installed: {', '.join(lacking)}")
    with running(Path(sys.argv[1]).absolute()) as cluster:
        print(
            "\n".join(f"export {name}={shlex.quote(value)}" for name, value in cluster.environment.items()), flush=True
        )
        try:
            signal.pause()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
