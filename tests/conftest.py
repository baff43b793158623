"""Fixtures that every test can ask for."""

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.kit.ranks import GARBAGE, RankPool, fork_ranks_from_here, seed_present_devices_alone

_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri")
_END_SECONDS = 300.0
_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def pytest_configure(config: pytest.Config) -> None:
    """Accelerators are for tests that are marked `gpu`, with -m gpu: others would take several ranks to one device."""
    if any(map(os.path.exists, _DEVICES)) and not config.option.markexpr.startswith("gpu"):
        os.environ.update(dict.fromkeys(_MASKS, ""))
    os.environ["LOWTIDE_MACHINE"] = "/nonexistent/machine.json"  # what was measured of this machine changes plans
    gc.disable()  # imports make much that stays: to look for garbage in it takes a sixth of their time


def pytest_collection_finish() -> None:
    """What imports and the list of tests have made stays to the end: collections need not go through it again."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(*GARBAGE)
    if "torch" in sys.modules:
        seed_present_devices_alone()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Here are all imports, and none of the places that pytest puts itself in while it collects and runs tests."""
    # A shell that runs tests in the background has them ignore SIGINT, and so would every process that they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "torch" in sys.modules and not any(map(os.path.exists, _DEVICES)):
        fork_ranks_from_here()


def pytest_unconfigure() -> None:
    """A thread that a test has left behind holds up the end of the process: not for longer than a test may take."""
    faulthandler.dump_traceback_later(_END_SECONDS, exit=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(world_size, fn, *args)` runs a module-level function on several processes; see `tests/kit/ranks.py`."""
    pool = RankPool()
    yield pool
    pool.close()
