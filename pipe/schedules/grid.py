"""Draw a schedule, rank by time: as text, in a terminal's colours, or as a PNG."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .schedule import COMPUTE_OPS, Action, Op, Schedule
from .simulator import Simulation, TimeSlot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.text import Text

_MAX_PANELS = 12  # a longer grid is drawn to a smaller scale, and its labels are cut
_TERMINAL = {  # background colours by op, of even and of odd chunks
    Op.F: ("blue", "cyan"),
    Op.B: ("green", "bright_green"),
    Op.I: ("magenta", "bright_magenta"),
    Op.W: ("yellow", "bright_yellow"),
}
_PAPER = {
    Op.F: ("#4292c6", "#9ecae1"),
    Op.B: ("#41ab5d", "#a1d99b"),
    Op.I: ("#1d91a3", "#8fd1cf"),
    Op.W: ("#fd8d3c", "#fdd0a2"),
}
_MEANINGS = {Op.F: "forward", Op.B: "backward", Op.I: "input half", Op.W: "weight half"}


_Cell = tuple[str, Action | None]  # (text, action); no action: idle time, or the name of the rank


def colour_grid(simulation: Simulation, width: int = 120) -> Text:
    """Draw a line per rank, time from left to right. A grid wider than `width` continues in further panels.

    A cell begins with its action, and its length is the action's time: `0F0` of stage 0, or `F0` if each rank has a
    single stage. Dots are idle time. F is blue, B green, I magenta, W yellow; odd chunks of a rank are brighter.
    """
    from rich.text import Text

    text = Text(no_wrap=True)
    for number, panel in enumerate(_panels(simulation, width)):
        text.append("\n" if number else "")
        for row in panel:
            for cell_text, action in row:
                text.append(cell_text.rstrip(" "), _style(simulation.schedule, action))
                text.append(cell_text[len(cell_text.rstrip(" ")) :])
            text.append("\n")
    return text


def write_png(simulation: Simulation, path: Path) -> None:
    """Draw the timeline to a PNG file. Raises ModuleNotFoundError without matplotlib, an optional dependency."""
    from matplotlib.figure import Figure

    schedule = simulation.schedule
    figure = Figure(figsize=(12, 1.5 + 0.38 * schedule.num_ranks), layout="constrained")
    axes = figure.add_subplot()
    draw(axes, simulation)
    axes.set_xlim(0, simulation.makespan)
    chunks = "" if schedule.num_stages == schedule.num_ranks else "; light: a rank's second stage, its fourth, ..."
    axes.set_title(
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches, bubble {simulation.bubble:.1%}{chunks}",
        loc="left",
    )
    figure.legend(ncols=len(COMPUTE_OPS), loc="outside lower left", frameon=False)
    figure.savefig(path, dpi=120)


def draw(axes: Axes, simulation: Simulation) -> None:
    """Draw a line per rank, time from left to right, with a label for the legend of each op that occurs."""
    schedule = simulation.schedule
    for rank, slots in enumerate(simulation.timeline):
        for slot in slots:
            if slot.end > slot.start:
                _draw(axes, schedule, rank, slot, simulation.makespan)
    for op in COMPUTE_OPS:
        if schedule.has_any(op):
            # An empty bar, for the legend.
            axes.barh(0, 0, color=_PAPER[op][0], label=f"{op.value}: {_MEANINGS[op]}")
    axes.set_yticks(range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)])
    axes.set_ylim(schedule.num_ranks - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(axes: Axes, schedule: Schedule, rank: int, slot: TimeSlot, makespan: float) -> None:
    """Draw an action as a bar, labelled with its microbatch if the bar is wide enough."""
    width = slot.end - slot.start
    color = _PAPER[slot.action.op][_chunk(schedule, slot.action) % 2]
    axes.barh(rank, width, left=slot.start, height=0.86, color=color, edgecolor="white", linewidth=0.6)
    if width > makespan / 120:
        axes.text((slot.start + slot.end) / 2, rank, str(slot.action.microbatch), ha="center", va="center", fontsize=7)


def _chunk(schedule: Schedule, action: Action) -> int:
    """Return the index of the action's stage among the stages of its rank."""
    return schedule.stages_of_rank(schedule.rank_of_stage[action.stage]).index(action.stage)


def _style(schedule: Schedule, action: Action | None) -> str:
    if action is None:
        return ""
    return f"black on {_TERMINAL[action.op][_chunk(schedule, action) % 2]}"


def _panels(simulation: Simulation, width: int) -> Iterator[list[list[_Cell]]]:
    """Cut the grid into panels of rows of cells. A cell at the cut continues in the next panel."""
    num_ranks = simulation.schedule.num_ranks
    names = [f"rank {rank:<{len(str(num_ranks - 1))}}  " for rank in range(num_ranks)]
    room = max(width - len(names[0]), 20)
    scale = _columns_per_time(simulation, room)
    total = max(round(simulation.makespan * scale), 1)
    rows = [_cells(simulation, rank, scale, total) for rank in range(num_ranks)]
    size = -(-total // -(-total // room))  # panels of equal size, rather than a last panel of a few columns
    for begin in range(0, total, size):
        yield [[(name, None), *_cut(row, begin, begin + size)] for name, row in zip(names, rows, strict=True)]


def _columns_per_time(simulation: Simulation, room: int) -> float:
    """Choose the scale: the shortest action has room for its label, unless the grid would become too long."""
    slots = [slot for row in simulation.timeline for slot in row if slot.end > slot.start]
    if not slots:
        return 1.0
    shortest = min(slot.end - slot.start for slot in slots)
    longest_label = max(len(_label(simulation.schedule, slot.action)) for slot in slots)
    return min((longest_label + 1) / shortest, _MAX_PANELS * room / simulation.makespan)


def _label(schedule: Schedule, action: Action) -> str:
    return str(action) if schedule.num_stages > schedule.num_ranks else f"{action.op.value}{action.microbatch}"


def _cells(simulation: Simulation, rank: int, scale: float, total: int) -> list[_Cell]:
    """Make a rank's line: actions as `F0--- `, idle time as dots."""
    cells: list[_Cell] = []
    column = 0
    for slot in simulation.timeline[rank]:
        if slot.end == slot.start:
            continue
        begin, end = round(slot.start * scale), round(slot.end * scale)
        if begin > column:
            cells.append(("." * (begin - column - 1) + " ", None))
        # A free column separates the cell from the next.
        size = max(end - begin - 1, 0)
        cells.append((f"{_label(simulation.schedule, slot.action):-<{size}}"[:size] + " ", slot.action))
        column = end
    if total > column:
        cells.append(("." * (total - column - 1) + " ", None))
    return cells


def _cut(cells: list[_Cell], begin: int, end: int) -> Iterator[_Cell]:
    """Cut a line to the columns from `begin` to `end`."""
    column = 0
    for text, action in cells:
        if part := text[max(begin - column, 0) : max(end - column, 0)]:
            yield part, action
        column += len(text)
