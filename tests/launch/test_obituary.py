"""Which failure was the first, and how it is told."""

import pytest

from lowtide.launch.hosts.host import Allocation, Host, LaunchError
from lowtide.launch.job.attempts import Attempts
from lowtide.launch.job.outcome import Failure, first_of, obituary
from lowtide.launch.job.preparation import Request


def failure(rank: int, clock: float, uncertainty: float = 0.0, status: int = 1) -> Failure:
    return Failure(clock, status, "h", rank, 10, last_lines=(), uncertainty=uncertainty)


def test_the_clocks_decide_where_they_are_sure_and_else_the_order_of_hearing() -> None:
    sure = [failure(0, 10.0, 0.01), failure(1, 9.9, 0.02), failure(2, 9.8, 0.03)]
    unsure = [failure(0, 10.0, 0.1), failure(1, 9.9, 0.1), failure(2, 5.0, float("inf"))]
    assert first_of(sure) is sure[2] and first_of(unsure) is unsure[0] and first_of([]) is None


def test_signals_are_told() -> None:
    text = obituary(failure(0, 1.0, status=-40), world_size=1, has_many_hosts=False)
    assert text == "rank 0 of 1 (process 10) was ended by signal 40. It printed nothing."
    killed = failure(0, 1.0, status=-9)
    text = obituary(killed, world_size=2, has_many_hosts=False)
    assert killed.exit_status == 137 and "was ended by SIGKILL before this job sent it. A usual cause is the" in text


@pytest.mark.parametrize(
    ("world_size", "ended", "told"),
    [
        (
            2,
            [1],
            "1. rank 1 had ended before with exit status 0: if rank 0 still trained, the ranks have different num",
        ),
        (4, [1, 2], "1; the other ranks were stopped. ranks 1-2 had ended before with exit status 0: if rank 0 still "),
    ],
)
def test_ranks_that_had_ended_are_told_with_what_to_do(world_size: int, ended: list[int], told: str) -> None:
    text = obituary(failure(0, 1.0), world_size, has_many_hosts=False, ended=ended)
    assert text.startswith(f"rank 0 of {world_size} (process 10) failed with exit status {told}")
    assert text.endswith(
        "let a DistributedSampler pad the batches, or end all ranks after the smallest number. If it saved, every rank "
        "must call save_checkpoint. It printed nothing."
    )


def test_restarts_of_joined_launchers_are_refused() -> None:
    allocation = Allocation("Kubernetes", "join", (Host("a"), Host("b")))
    with pytest.raises(
        LaunchError, match="--max-restarts needs a transport that can start agents again, found a launch"
    ):
        Attempts(Request(("x",), "/", max_restarts=1), allocation, lambda allocation: pytest.fail("unused"))
