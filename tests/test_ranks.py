"""The pool of ranks itself: order, errors, hangs, deaths, and that it works again after each."""

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.kit.ranks import RankError, RankPool


def process_id() -> int:
    return os.getpid()


def square_of_rank(offset: int = 0) -> int:
    return dist.get_rank() ** 2 + offset


def variables() -> list[str]:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
    return [os.environ[name] for name in names]


def draws_and_leaves_a_mess() -> tuple[float, float, str | None, torch.dtype, int]:
    found = (torch.rand(()).item(), random.random(), os.environ.get("MESS"), torch.get_default_dtype(), os.getpid())
    os.environ["MESS"] = "1"
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    return found


def warns() -> None:
    warnings.warn("an odd thing", UserWarning, stacklevel=1)


def fails_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"bad number on {rank}")
    return dist.get_rank()


def fails_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise KeyError("missing")
    dist.barrier()


def hangs_on(rank: int) -> int:
    if dist.get_rank() == rank:
        time.sleep(1000)
    return dist.get_rank()


def dies_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        print("last words")
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_results_are_in_the_order_of_ranks(ranks: RankPool) -> None:
    assert ranks(1, square_of_rank) == [0]
    assert ranks(3, square_of_rank, offset=5) == [5, 6, 9]
    assert ranks(2, square_of_rank, 1) == [1, 2]


def test_environment_is_that_of_torchrun(ranks: RankPool) -> None:
    first, second = ranks(2, variables)
    assert first[:5] == ["0", "2", "0", "2", "127.0.0.1"] and second[:5] == ["1", "2", "1", "2", "127.0.0.1"]
    assert first[5] == second[5] and first[6] == "1"


def test_each_call_starts_clean_in_the_same_processes(ranks: RankPool) -> None:
    first = ranks(2, draws_and_leaves_a_mess)
    assert first == ranks(2, draws_and_leaves_a_mess)
    assert first[0][:4] == first[1][:4] and first[0][2:4] == (None, torch.float32)


def test_a_call_starts_no_process(ranks: RankPool) -> None:
    pids = ranks(2, process_id)
    assert pids == ranks(2, process_id)  # starting one takes seconds


def test_a_warning_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="UserWarning: an odd thing"):
        ranks(1, warns)


def test_an_exception_names_its_rank(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"^rank 1: ValueError\n") as caught:
        ranks(2, fails_on, 1)
    assert (caught.value.rank, caught.value.kind, caught.value.others) == (1, "ValueError", ())
    assert "in fails_on" in caught.value.text and "ValueError: bad number on 1" in caught.value.text
    value, error = ranks.fails(2, fails_on, 1)
    assert value == 0 and isinstance(error, RankError) and error.rank == 1


def test_the_first_failure_is_shown_first(ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, fails_while_others_wait)
    assert (caught.value.rank, caught.value.kind) == (1, "KeyError")
    assert [other.rank for other in caught.value.others] == [0]
    assert str(caught.value).index("rank 1: KeyError") < str(caught.value).index("rank 0: ")
    assert ranks(2, square_of_rank) == [0, 1]


def test_a_hang_shows_the_stack_and_the_pool_recovers(ranks: RankPool) -> None:
    start = time.monotonic()
    value, error = ranks.fails(2, hangs_on, 1, timeout=10)
    assert value == 0 and (error.rank, error.kind) == (1, "Hang")
    assert "still running after 10 s" in error.text and "in hangs_on" in error.text, error.text
    assert time.monotonic() - start > 10
    assert ranks(2, square_of_rank) == [0, 1]


@pytest.mark.parametrize(("how", "text"), [("exit", "exit status 7"), ("kill", "killed by SIGKILL")])
def test_a_death_is_seen_at_once_and_the_pool_recovers(ranks: RankPool, how: str, text: str) -> None:
    ranks(2, square_of_rank)
    start = time.monotonic()
    with pytest.raises(RankError, match=text) as caught:
        ranks(2, dies_on, 0, how)
    assert time.monotonic() - start < 40  # of 60, after which it would be a hang
    assert (caught.value.rank, caught.value.kind) == (0, "Died") and "last words" in caught.value.text
    assert ranks(2, square_of_rank) == [0, 1]


def test_what_cannot_run_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="world_size must be from 1 to 8, found 9"):
        ranks(9, square_of_rank)
    with pytest.raises(TypeError, match="cannot be imported by workers"):
        ranks(1, lambda: 1)


def test_a_test_that_hangs_without_ranks_ends_the_run_with_its_stack(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("import time\n\n\ndef test_one():\n    time.sleep(1000)\n")
    settings = Path(__file__).parent.parent / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-c", str(settings), "-o", "faulthandler_timeout=2", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1 and 'test_one.py", line 5 in test_one' in ended.stderr, ended
