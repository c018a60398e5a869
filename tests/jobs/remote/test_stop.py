"""`draftmill stop` without a cluster: the driver of this machine that holds a run directory gets a SIGTERM, and no one else."""

import json
import subprocess
import sys
import time

from draftmill.jobs.cli import main
from draftmill.storage.runs.lease import LEASE, acquire, this_process
from draftmill.storage.stores.store import open_store

DRIVER = """
import signal, sys, time
from draftmill.storage.runs.lease import acquire, this_process
from draftmill.storage.stores.store import open_store
lease = acquire(open_store(sys.argv[1]), this_process(), 60.0)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
print("held", flush=True)
try:
    time.sleep(300)
finally:
    lease.release()
"""


def test_the_driver_that_holds_a_run_is_asked_to_end_and_waited_for(tmp_path):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "held\n"
    assert main(["stop", str(tmp_path)]) == 0
    assert driver.wait(60) == 4


def test_nothing_to_stop_is_no_error(tmp_path, capsys):
    acquire(open_store(str(tmp_path)), this_process(), 60.0).release()
    assert main(["stop", str(tmp_path)]) == 0
    assert "nothing to stop: no driver holds" in capsys.readouterr().err


def test_a_driver_of_another_machine_is_named_and_not_touched(tmp_path, capsys):
    acquire(open_store(str(tmp_path)), "elsewhere:1234-5:1", 60.0)
    assert main(["stop", str(tmp_path)]) == 2
    assert "runs on elsewhere (elsewhere:1234-5:1); stop it there" in capsys.readouterr().err


def test_a_process_that_is_younger_than_the_lease_is_not_the_driver(tmp_path, capsys):
    acquire(open_store(str(tmp_path)), this_process(), 60.0)
    lease = json.loads((tmp_path / LEASE).read_text())
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    lease["owner"] = this_process().rpartition(":")[0] + f":{innocent.pid}"
    lease["expires_at_s"] = time.time() + 30.0  # renewed 30 s ago, before that process began
    (tmp_path / LEASE).write_text(json.dumps(lease))
    assert main(["stop", str(tmp_path)]) == 2
    assert "is not the driver" in capsys.readouterr().err
    assert innocent.poll() is None
    innocent.kill()
    innocent.wait()


def test_a_submitted_jobs_name_needs_its_cluster(capsys):
    assert main(["stop", "draftmill-job-123-1"]) == 2
    assert "--address: missing" in capsys.readouterr().err
