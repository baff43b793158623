"""The hosts that other tests are made of: real enough to fail as hosts do, and gone when their maker is."""

import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.launch import network as network_module
from tests.launch.network import FOLDER_PREFIX, REQUIRED, Network, require_network

# A process that makes hosts of its own, says where their files are, and waits.
MAKER = """
import sys
from tests.launch.network import Network
network = Network(["a", "b"])
sleeper = network["b"].popen(["sleep", "1000"])
print(network.folder, flush=True)
sys.stdin.read()
"""


def test_nothing_outlives_a_maker_that_is_killed(network: Network) -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None and maker.stdin is not None
    folder = Path(maker.stdout.readline().strip())
    assert folder.name.startswith(FOLDER_PREFIX) and folder.parent == Path(tempfile.gettempdir())
    below = psutil.Process(maker.pid).children(recursive=True)
    assert {"sshd", "sleep"} <= {process.name() for process in below}
    maker.kill()
    maker.communicate()
    _, left = psutil.wait_procs(below, timeout=60)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)  # of a machine whose init reaps nothing
    assert folder.exists()
    network_module.remove_dead_folders()
    assert not folder.exists() and network.folder.exists()


def test_a_machine_without_namespaces_skips_and_ci_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "network_fault", lambda: "sshd not found")
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="sshd not found"):
        require_network()
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match=f"{REQUIRED}=1, but sshd not found"):
        require_network()
