"""What each rank is in and who waits for whom is said while a rank stays away, and by the rank itself after a limit."""

import contextlib
import io
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.watch.progress import RankProgress, read_progress
from lowtide.watch.stacks import collect_stacks
from lowtide.watch.waiting import who_waits_for_whom
from tests.kit.models import Chain
from tests.kit.ranks import RankPool, in_a_new_process
from tests.kit.training import settings

BATCH = (torch.ones(2, 8),)
BLOCKED_SECONDS = 0.15
Seen = tuple[str, dict[int, str]]


def observed_net(in_block: Callable[[], None] = lambda: None) -> Chain:
    """`in_block` is called in the forward of the last block."""
    return Chain(*(nn.Linear(8, 8) for _ in range(3)), Observed(in_block))


class Observed(nn.Linear):
    def __init__(self, in_block: Callable[[], None]) -> None:
        super().__init__(8, 8)
        self.in_block = in_block

    def forward(self, x: Tensor) -> Tensor:
        self.in_block()
        return super().forward(x)


class Observer:
    """What rank 1 sees of both ranks while it stays away: the text, and the stacks."""

    def __init__(self, folder: str) -> None:
        self.paths = {rank: f"{folder}/rank{rank}" for rank in range(dist.get_world_size())}
        os.environ["LOWTIDE_PROGRESS_FILE"] = self.paths[dist.get_rank()]
        self.text, self.stacks = "", {0: "", 1: ""}
        self.reports: dict[int, RankProgress | None] = {}
        self.is_watching = False

    def stay_away(self) -> None:
        if dist.get_rank() != 1:
            return
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            time.sleep(0.02)
            self.reports = {rank: read_progress(path, rank) for rank, path in self.paths.items()}
            if self.is_held_up():
                break
        self.text = who_waits_for_whom(self.reports)
        self.stacks = collect_stacks(self.paths)

    def is_held_up(self) -> bool:
        """Whether rank 0 has waited for a while, and not for what has been begun here: it may be slow to leave that."""
        first, own = self.reports[0], self.reports[1]
        if first is None or first.wait is None or first.wait.seconds <= BLOCKED_SECONDS:
            return False
        begun = dict(own.begun) if own is not None else {}
        return not 0 < first.wait.sequence <= begun.get(first.wait.channel, 0)

    def when_watching(self) -> None:
        if self.is_watching:
            self.is_watching = False
            self.stay_away()

    def batches(self, count: int) -> Iterator[Any]:
        for index in range(count):
            if index == 1:
                self.stay_away()
            yield BATCH


def config(stage: int = 3, transport: str = "sockets", **others: Any) -> dict[str, Any]:
    others["communication"] = {"transport": transport, "timeout_seconds": 40}
    others["zero_optimization"] = {"stage3_prefetch_bucket_size": 0}
    return settings(stage, train_micro_batch_size_per_gpu=None, **others)


def late_to(what: str, folder: str, stage: int = 3, transport: str = "sockets", **others: Any) -> Seen:
    """Rank 1 stays away from the second step, its data, a block of it, a save, an evaluation or the start."""
    observer = Observer(folder)
    if what == "start":
        observer.stay_away()
    given = config(stage, transport, gradient_accumulation_steps=2, **others)
    engine = lowtide.initialize(observed_net(observer.when_watching), given)
    engine.train_step([*BATCH])
    if what == "block":
        observer.is_watching = dist.get_rank() == 1
    elif what not in ("data", "start"):
        observer.stay_away()
    if what in ("step", "block"):
        engine.train_step([*BATCH])
    elif what == "data":
        engine.train_step(observer.batches(2))
    elif what == "save":
        engine.save_checkpoint(f"{folder}/checkpoints")
    elif what == "evaluation":
        engine.eval_step([*BATCH])
    engine.close()
    return observer.text, observer.stacks


def lines(text: str) -> list[str]:
    """Without the seconds."""
    return [line.rpartition(" for ")[0] or line for line in text.splitlines()[:-1]] + text.splitlines()[-1:]


AGREEMENT = "waiting in the agreement of all ranks on the next action ("
IN_STEP = "rank 1: after step 1, between steps (data loading or the script's own code)"
REDUCTION = f"rank 0: after step 1, backward*: waiting in reduction of unit blocks.*(seq *|{IN_STEP}"
SHARED = {"transport": "shared_memory"}


@pytest.mark.parametrize(
    ("what", "options", "said", "stacks"),  # what rank 1 is late to; "*" is any text
    [
        (
            "step",
            {},
            f"rank 0: after step 1, forward of blocks.0, microbatch 0: {AGREEMENT}seq *)|{IN_STEP}",
            (["train_step", "sockets.py", "late_to"], ["stay_away", "late_to"]),  # in a wait of gloo
        ),
        ("step", SHARED, REDUCTION, (["backward", "late_to"], [])),
        (
            "data",
            {},
            f"rank 0: after step 1, forward of blocks.0, microbatch 1: {AGREEMENT}*|"
            "rank 1: after step 1, data loading, microbatch 1",
            ([], ["in batches"]),
        ),
        ("block", {}, "*|rank 1: after step 1, forward of blocks.3, microbatch 0", ([], ["in forward"])),
        (
            "block",
            {"stage": 0, "parallel": {"pipeline": 2}},
            "rank 0: after step 1, pipeline action 0*: waiting in pipeline action 0RECV_B0 (stage 0, microbatch 0)*|"
            "rank 1: after step 1, pipeline action 1F0",
            ([], ["in forward"]),
        ),
        ("save", {}, "rank 0: after step 1, saving a checkpoint: waiting in *", ([], [])),
        ("evaluation", {}, f"rank 0: after step 1, evaluation of blocks.0: {AGREEMENT}*", ([], [])),
        ("start", {}, "rank 0: after step 0, in lowtide.initialize: waiting in an exchange of objects*", ([], [])),
    ],
)
def test_what_ranks_are_in_and_who_waits_for_whom_is_said(
    ranks: RankPool, tmp_path: Path, what: str, options: Any, said: str, stacks: tuple[list[str], list[str]]
) -> None:
    text, found = ranks(2, late_to, what, str(tmp_path), **options)[1]
    assert fnmatchcase("|".join(lines(text)), f"{said}|rank 0 waits for rank 1."), text
    for rank, parts in enumerate(stacks):
        assert all(part in found[rank] for part in parts), found[rank]


def numbers_after_training(folder: str, transport: str) -> list[tuple[tuple[int, int], ...]]:
    """What both ranks have counted after three steps, as this rank sees it."""
    observer = Observer(folder)
    engine = lowtide.initialize(observed_net(), config(2 if transport == "native" else 3, transport))
    for _ in range(3):
        engine.train_step(BATCH)
    dist.barrier()
    reports = [read_progress(path, rank) for rank, path in observer.paths.items()]
    dist.barrier()
    engine.close()
    return [report.begun for report in reports if report is not None]


@pytest.mark.parametrize("transport", ["sockets", "shared_memory", "native"])
def test_all_ranks_count_their_collectives_alike(ranks: RankPool, tmp_path: Path, transport: str) -> None:
    first, second = ranks(2, numbers_after_training, str(tmp_path), transport)[0]
    assert first == second and max(count for _, count in first) >= 6


def after_closing(folder: str) -> str:
    observer = Observer(folder)
    with lowtide.initialize(observed_net(), config()) as engine:
        engine.train_step(BATCH)
    return str(read_progress(observer.paths[0], 0)).rpartition(" for ")[0]


def test_a_closed_engine_is_no_hang(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(1, after_closing, str(tmp_path)) == ["after step 1, after engine.close()"]


NOTES = ("lowtide: config: ", "lowtide: CPU optimizer: ", "lowtide: training alone on ")


class Slow(nn.Linear):
    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def train(limit: float | None, steps: list[float], after: float = 0.0) -> tuple[list[str], str, list[float]]:
    """Steps that wait so long. The Python threads of the engine, what was said on stderr, and what each step took."""
    config = settings(communication={"step_timeout_seconds": limit})
    model = nn.Sequential(Slow(4, 4), Slow(4, 4))
    before = set(threading.enumerate())  # a rank of the pool may have some of another engine's
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        with lowtide.initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as engine:
            ends = [time.monotonic()]  # what is between two steps counts as the later one's
            for Slow.seconds in steps:
                engine.train_step((torch.ones(2, 4),))
                ends.append(time.monotonic())
            took = [end - start for start, end in itertools.pairwise(ends)]
            assert engine.global_step == len(steps)
            threads = sorted(thread.name for thread in set(threading.enumerate()) - before)
        time.sleep(after)
    said = stderr.getvalue().splitlines(keepends=True)
    return threads, "".join(line for line in said if not line.startswith(NOTES)), took


def said_by(ranks: RankPool, limit: float, steps: list[float], after: float = 0.0) -> tuple[str, list[int]]:
    """By a rank of its own, so that nothing else of this process has to do with it; and which steps took longer."""
    _, said, took = ranks(1, train, limit, steps, after, process_group=False)[0]
    return said, [step for step, seconds in enumerate(took) if seconds > limit]


def test_each_step_over_the_limit_is_told_once_with_the_stack_and_training_goes_on(ranks: RankPool) -> None:
    said, late = said_by(ranks, 0.4, [0.0, 1.4, 0.0, 1.0, 0.0])
    sentences = re.findall(r"lowtide: rank 0: .*", said)
    steps = [int(step) for step in re.findall(r"goes on; after step (\d)", said)]
    assert {1, 3} <= set(steps) <= set(late) and steps == sorted(set(steps))
    for step in (1, 3):
        assert re.sub(r"for \d s", "for N s", sentences[steps.index(step)]) == (
            "lowtide: rank 0: a step has taken longer than 0.4 s (communication.step_timeout_seconds) and goes on; "
            f"after step {step}, forward of 0, microbatch 0 for N s. The stacks of its threads:"
        )
    assert said.count(", in train_step\n") == len(steps) and said.count(", in forward\n") >= 2
    assert said.count("thread MainThread:") == len(steps) and "lowtide watchdog" not in said


def test_what_is_in_time_or_after_the_end_is_not_told(ranks: RankPool) -> None:
    for limit, after in ((5.0, 0.0), (0.5, 1.2)):
        said, late = said_by(ranks, limit, [0.0, 0.0], after)
        assert said == "" or late


def test_without_a_limit_nothing_is_told_and_no_thread_runs(ranks: RankPool) -> None:
    assert ranks(1, train, None, [0.5], process_group=False)[0][:2] == ([], "")
    assert ranks(1, train, 60.0, [], process_group=False)[0][:2] == (["lowtide watchdog"], "")


def train_beside_a_launcher(record: str) -> str:
    """What is said of a step over the limit where a launcher has named that file."""
    os.environ["LOWTIDE_PROGRESS_FILE"] = record
    return train(0.3, [0.8])[1]


def test_a_launcher_that_reads_the_record_says_it_instead(tmp_path: Path) -> None:
    assert in_a_new_process(train_beside_a_launcher, str(tmp_path / "rank0")) == ""
    assert (tmp_path / "rank0").exists()
