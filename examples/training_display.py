"""What is seen while training: a progress bar in a terminal, plain lines elsewhere, nothing on other ranks."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

MEBIBYTE = 1 << 20


class TrainingDisplay:
    """Shows step, loss, tokens per second and memory; `update` is called after every step."""

    def __init__(self, *, num_steps: int, tokens_per_step: int, print_every: int, visible: bool) -> None:
        self.num_steps = num_steps
        self.tokens_per_step = tokens_per_step
        self.print_every = print_every
        self.visible = visible
        self.console = Console(quiet=not visible)
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (visible and self.console.is_terminal),
        )
        self.task = self.progress.add_task("training", total=num_steps, numbers="")
        self.timed_since = time.perf_counter()
        self.timed_steps = 0
        self.has_warmed_up = False
        self.tokens_per_second = 0.0

    def update(self, step: int, loss: float, memory_bytes: int) -> None:
        """step: counted from 1. The first step of the run warms up and is left out of the speed of the later ones."""
        now = time.perf_counter()
        is_first, self.has_warmed_up = not self.has_warmed_up, True
        self.timed_steps += 1
        self.tokens_per_second = self.timed_steps * self.tokens_per_step / (now - self.timed_since)
        if is_first:
            self.timed_since, self.timed_steps = now, 0
        numbers = (
            f"loss {loss:.3f}  {self.tokens_per_second:,.0f} tokens/s  {memory_bytes / MEBIBYTE:,.0f} MiB per process"
        )
        self.progress.update(self.task, completed=step, numbers=numbers)
        due = is_first or step % self.print_every == 0 or step == self.num_steps
        if due and self.progress.disable:
            self.say(f"step {step:>5}/{self.num_steps}  {numbers}")

    def say(self, text: str) -> None:
        """Prints one plain line, above the bar where there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "TrainingDisplay":
        self.progress.start()
        self.timed_since = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
