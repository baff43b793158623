"""A schedule is made by its name or from its file; what cannot be made is refused with what to do."""

import time
from pathlib import Path

import pytest

from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import ScheduleError
from lowtide.pipe.schedules.simulator import simulate


def refusal(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> str:
    with pytest.raises(ScheduleError) as error:
        make_schedule(name, ranks, microbatches, chunks)
    return str(error.value)


@pytest.mark.parametrize("name", KINDS)
def test_every_number_of_microbatches_that_is_taken_makes_a_schedule_that_can_run(name: str) -> None:
    kind = KINDS[name]
    for p in (1, 2, 3, 5):
        for m in range(max(1, kind.microbatches_per_rank * p), 4 * p + 2):
            for chunks in range(kind.min_chunks, (kind.max_chunks or kind.min_chunks + 2) + 1):
                schedule = make_schedule(name, p, m, chunks)
                assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (name, p, m)
                assert schedule.num_stages == p * chunks
                simulate(schedule)


@pytest.mark.parametrize("name", KINDS)
def test_the_table_says_what_a_schedule_is(name: str) -> None:
    kind = KINDS[name]
    schedule = make_schedule(name, 4, 8)
    assert schedule.num_stages == 4 * kind.min_chunks
    assert kind.splits_backward == any("I" in str(action) for actions in schedule.actions for action in actions)
    looped = tuple(range(4)) * kind.min_chunks
    assert schedule.rank_of_stage == ((0, 1, 2, 3, 3, 2, 1, 0) if kind.is_v else looped)


@pytest.mark.parametrize("name", KINDS)
def test_64_ranks_and_512_microbatches_are_made_in_seconds(name: str) -> None:
    start = time.process_time()
    make_schedule(name, 64, 512)
    assert time.process_time() - start < 10


def test_an_unknown_name_is_refused_with_the_name_that_may_be_meant() -> None:
    assert refusal("1f1", 4, 8) == 'unknown schedule "1f1"; did you mean "1f1b"?'
    assert refusal("ZB_V", 4, 8) == 'unknown schedule "ZB_V"; did you mean "zb-v"?'
    assert refusal("fast", 4, 8) == (
        'unknown schedule "fast"; the schedules are gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v, '
        "or a path to a text file"
    )


def test_too_few_microbatches_are_refused() -> None:
    assert refusal("dualpipe-v", 4, 7) == (
        "schedule dualpipe-v needs 2 microbatches for each rank, at least 8 on 4 ranks, found 7; set "
        "pipeline.microbatches to 8 or more, or use a schedule for any number: gpipe, 1f1b, interleaved, zb-h1, zb-v"
    )
    assert refusal("1f1b", 4, 0) == "schedule 1f1b: expected at least 1 of microbatches, found 0"
    assert refusal("1f1b", 0, 4) == "schedule 1f1b: expected at least 1 of ranks, found 0"


def test_chunks_that_a_schedule_does_not_have_are_refused() -> None:
    assert refusal("zb-v", 4, 8, 1) == (
        "schedule zb-v needs 2 chunks (stages on each rank), found 1; set pipeline.chunks to 2, "
        "or use a schedule for 1: gpipe, 1f1b, zb-h1"
    )
    assert refusal("1f1b", 4, 8, 3) == (
        "schedule 1f1b needs 1 chunk (stages on each rank), found 3; set pipeline.chunks to 1, "
        "or use a schedule for 3: interleaved, zb-h1"
    )
    assert refusal("interleaved", 4, 8, 1).startswith(
        "schedule interleaved needs 2 or more chunks (stages on each rank), "
    )
    assert refusal("zb-h1", 4, 8, 0).endswith("found 0; set pipeline.chunks to 1")


def test_a_path_gives_the_schedule_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    mine = make_schedule("zb-h1", 2, 4, 2)
    path.write_text(mine.to_text())
    assert make_schedule(str(path), 2, 4) == mine
    assert make_schedule(str(path), 2, 4, 2) == mine


def test_a_file_for_other_counts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(make_schedule("1f1b", 2, 4).to_text())
    assert refusal(str(path), 4, 4) == (
        f"schedule file {path}: expected 4 ranks, as in the config, found 2; change the file or the config"
    )
    assert "expected 1 ranks, as in the config, found 2" in refusal(str(path), 1, 4)
    assert "expected 8 microbatches, as in the config, found 4" in refusal(str(path), 2, 8)
    assert "expected 4 stages, as in the config, found 2" in refusal(str(path), 2, 4, 2)


def test_a_file_that_cannot_be_read_or_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    assert refusal(str(path), 2, 2).startswith(f"schedule file {path} cannot be read: ")
    path.write_bytes(b"\xff\xfe")
    assert refusal(str(path), 2, 2).startswith(f"schedule file {path} cannot be read: ")
    text = make_schedule("1f1b", 2, 2).to_text()
    path.write_text(text.replace("1B1", ""))
    assert "rank 1, action 2 (1F1): leak: its activations are held to the end; 1B1 is missing" in refusal(
        str(path), 2, 2
    )
    path.write_text(text.replace("1B1", "1Z1"))
    assert refusal(str(path), 2, 2).startswith(f'schedule file {path}: line 7, column 21: unknown op "Z"')
    path.write_text("".join(word for word in text.splitlines(keepends=True)).replace(" 0B0", "").replace(" 0B1", ""))
    assert "leak" in refusal(str(path), 2, 2)


def test_a_file_without_a_backward_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(
        "name: own\nranks: 1\nstages: 1\nmicrobatches: 1\nrank of stage: 0\nrank 0: 0F0\n",
    )
    assert refusal(str(path), 1, 1) == (f"schedule file {path}: found no backward; a training step needs B, or I and W")
