"""The table of schedules by name (`KINDS`), and `make_schedule`. Only this file knows schedules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .generators import dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from .schedule import Schedule, ScheduleError
from .simulator import simulate


@dataclass(frozen=True)
class ScheduleKind:
    """A row of the table of schedules."""

    name: str
    summary: str
    build: Callable[[int, int, int], Schedule]  # (ranks, microbatches, chunks)
    min_chunks: int  # stages per rank, also the default
    max_chunks: int | None  # None: no limit
    microbatches_per_rank: int = 0  # the minimum; 0: any number of microbatches
    splits_backward: bool = False  # uses I and W
    is_v: bool = False  # two stages per rank, the first and the last stage on rank 0


KINDS = {
    kind.name: kind
    for kind in (
        ScheduleKind(
            "gpipe",
            "all forwards, then all backwards",
            lambda ranks, microbatches, _: gpipe(ranks, microbatches),
            min_chunks=1,
            max_chunks=1,
        ),
        ScheduleKind(
            "1f1b",
            "forwards and backwards in turns: GPipe's bubble, at most p microbatches in flight",
            lambda ranks, microbatches, _: one_f_one_b(ranks, microbatches),
            min_chunks=1,
            max_chunks=1,
        ),
        ScheduleKind(
            "interleaved",
            "1F1B with several stages per rank: a smaller bubble, more messages and activations",
            interleaved,
            min_chunks=2,
            max_chunks=None,
        ),
        ScheduleKind(
            "zb-h1",
            "1F1B with split backwards: a third of its bubble, its memory",
            zb_h1,
            min_chunks=1,
            max_chunks=None,
            splits_backward=True,
        ),
        ScheduleKind(
            "zb-v",
            "two stages per rank as a V, split backwards: almost no bubble, 1F1B's memory",
            lambda ranks, microbatches, _: zb_v(ranks, microbatches),
            min_chunks=2,
            max_chunks=2,
            splits_backward=True,
            is_v=True,
        ),
        ScheduleKind(
            "dualpipe-v",
            "two stages per rank as a V, forwards and backwards in pairs that hide each other's messages",
            lambda ranks, microbatches, _: dualpipe_v(ranks, microbatches),
            min_chunks=2,
            max_chunks=2,
            microbatches_per_rank=2,
            splits_backward=True,
            is_v=True,
        ),
    )
}


def make_schedule(name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """Make the schedule of that name, or read it from the text file at that path.

    chunks: stages per rank; None: the schedule's minimum. A schedule from a name has F, B, I and W alone.
    Raises ScheduleError for an unknown name, for counts that the schedule does not allow, and for a file with
    different counts or with a schedule that cannot run.
    """
    if is_path(name):
        return _from_file(Path(name), num_ranks, num_microbatches, chunks)
    kind = check_counts(name, num_ranks, num_microbatches, chunks)
    return kind.build(num_ranks, num_microbatches, kind.min_chunks if chunks is None else chunks)


def check_counts(name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None) -> ScheduleKind:
    """Return the row of that name. Raises ScheduleError for counts that the schedule does not allow."""
    _check_positive(name, num_ranks, num_microbatches)
    kind = find_kind(name)
    chunks = kind.min_chunks if chunks is None else chunks
    if chunks < kind.min_chunks or (kind.max_chunks is not None and chunks > kind.max_chunks):
        raise ScheduleError(_chunks_text(kind, chunks))
    # From the table alone: a plan checks many counts, and making the schedules took half of its time.
    least = kind.microbatches_per_rank * num_ranks
    if num_microbatches < least:
        raise ScheduleError(
            f"schedule {name} needs {kind.microbatches_per_rank} microbatches for each rank, at least {least} on "
            f"{num_ranks} ranks, found {num_microbatches}; set pipeline.microbatches to {least} or more, or use a "
            f"schedule for any number: {', '.join(_names(lambda kind: not kind.microbatches_per_rank))}"
        )
    return kind


def _check_positive(name: str, num_ranks: int, num_microbatches: int) -> None:
    for what, count in (("ranks", num_ranks), ("microbatches", num_microbatches)):
        if count < 1:
            raise ScheduleError(f"schedule {name}: expected at least 1 of {what}, found {count}")


def find_kind(name: str) -> ScheduleKind:
    """Return the row of that name. Raises ScheduleError, with a similar name, for an unknown name."""
    if name not in KINDS:
        close = difflib.get_close_matches(name.lower().replace("_", "-"), KINDS, n=1)
        hint = (
            f'did you mean "{close[0]}"?'
            if close
            else f"the schedules are {', '.join(KINDS)}, or a path to a text file"
        )
        raise ScheduleError(f'unknown schedule "{name}"; {hint}')
    return KINDS[name]


def is_path(name: str) -> bool:
    """Tell if a schedule's name is the path of a text file: it ends in `.txt` or has a separator."""
    return name.endswith(".txt") or "/" in name or "\\" in name


def read_schedule(path: Path) -> Schedule:
    """Read the schedule in the text file at `path`. Raises ScheduleError if it cannot be read or cannot run."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ScheduleError(f"schedule file {path} cannot be read: {reason}") from error
    try:
        schedule = Schedule.from_text(text)
        simulate(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"schedule file {path}: {error}") from error
    if schedule.is_forward_only:
        raise ScheduleError(f"schedule file {path}: found no backward; a training step needs B, or I and W")
    return schedule


def _from_file(path: Path, num_ranks: int, num_microbatches: int, chunks: int | None) -> Schedule:
    _check_positive(str(path), num_ranks, num_microbatches)
    schedule = read_schedule(path)
    expected = {"ranks": num_ranks, "microbatches": num_microbatches}
    found = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    if chunks is not None:
        expected["stages"], found["stages"] = chunks * num_ranks, schedule.num_stages
    for what, count in expected.items():
        if found[what] != count:
            raise ScheduleError(
                f"schedule file {path}: expected {count} {what}, as in the config, found {found[what]}; change the "
                "file or the config"
            )
    return schedule


def _chunks_text(kind: ScheduleKind, chunks: int) -> str:
    least, most = kind.min_chunks, kind.max_chunks
    wanted = f"{least} or more" if most is None else str(least)
    text = (
        f"schedule {kind.name} needs {wanted} chunk{'s' if wanted != '1' else ''} (stages on each rank), found {chunks}"
    )
    fitting = _names(lambda kind: kind.min_chunks <= chunks <= (kind.max_chunks or chunks))
    choices = f", or use a schedule for {chunks}: {', '.join(fitting)}" if fitting else ""
    return f"{text}; set pipeline.chunks to {least}{choices}"


def _names(fits: Callable[[ScheduleKind], bool]) -> list[str]:
    return [kind.name for kind in KINDS.values() if fits(kind)]
