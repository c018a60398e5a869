"""A Slurm on this machine with two virtual nodes that have fake GPUs: real munged, slurmctld and slurmd, ended with the test."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")

CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=60
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port=17001 CPUs={cpus} RealMemory=4096 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port=17002 CPUs={cpus} RealMemory=4096 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can't be a Slurm here; empty if there can."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


@dataclass(frozen=True, slots=True)
class Slurm:
    """A running Slurm; `environment` is for its clients."""

    folder: Path
    environment: dict[str, str]

    def call(self, *words: str) -> str:
        """The output of a client; raises CalledProcessError with its errors in the notes."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False, cwd=self.folder)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, script: str) -> str:
        return self.call("sbatch", "--parsable", script)

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED and so on."""
        found = self.call("scontrol", "show", "job", job)
        return found.split("JobState=")[1].split()[0]

    def exit_code(self, job: str) -> int:
        found = self.call("scontrol", "show", "job", job)
        return int(found.split("ExitCode=")[1].split(":")[0])

    def start_now(self, job: str) -> None:
        """Start a requeued job without the wait of two minutes that Slurm gives it."""
        self.call("scontrol", "update", f"jobid={job}", "StartTime=now")


def wait_until(happened: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, what
        time.sleep(0.5)


@contextmanager
def slurm_here(folder: Path) -> Iterator[Slurm]:
    """Start all daemons; end those that were started."""
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool/n1", "spool/n2", "log"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, cpus=max(os.cpu_count() or 1, 2)))
    (folder / "gres.conf").write_text(
        "NodeName=n1 Name=gpu File=/dev/tty[1-2]\nNodeName=n2 Name=gpu File=/dev/tty[1-2]\n"
    )
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    slurm = Slurm(folder, environment | {"SLURM_CONF": str(folder / "slurm.conf")})
    own_munge = _munge(folder)
    try:
        for daemon in (["slurmctld", "-c"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]):
            subprocess.run(daemon, env=slurm.environment, check=True, capture_output=True, timeout=60)
        wait_until(lambda: slurm.call("sinfo", "-h", "-o", "%T") == "idle", 60, "the nodes did not come up")
        yield slurm
    finally:
        subprocess.run(["scancel", "--user=root"], env=slurm.environment, check=False, capture_output=True)
        with suppress(AssertionError):
            wait_until(lambda: not slurm.call("squeue", "--noheader"), 90, "jobs do not end")
        for name in ("slurmd.n1", "slurmd.n2", "slurmctld"):
            _end(folder / f"{name}.pid")
        if own_munge is not None:
            _end(own_munge)


def _munge(folder: Path) -> Path | None:
    """Start munged unless one runs; returns the file with its process id if it was started here."""
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
        return None
    for name in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
        Path(name).mkdir(parents=True, exist_ok=True)
        shutil.chown(name, "munge")
    key = Path("/etc/munge/munge.key")
    if not key.exists() or not key.stat().st_size:
        key.write_bytes(os.urandom(1024))
        shutil.chown(key, "munge")
        key.chmod(0o400)
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged"], check=True, capture_output=True)
    return Path("/run/munge/munged.pid")


def _end(file: Path) -> None:
    """End the daemon of a file with a process id; one that has ended already, or waits for its parent, counts as ended."""
    if not file.exists():
        return
    pid = int(file.read_text())
    with suppress(ProcessLookupError):
        os.kill(pid, 15)
    wait_until(lambda: not _lives(pid), 30, f"{file.name} did not end")


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
