"""Where in a schedule something is wrong: a few actions of each rank, the failing cells marked."""

from collections.abc import Mapping

from .schedule import Schedule

_REACH = 4  # actions shown on each side
_MOST_RANKS = 16


def excerpt(schedule: Schedule, cells: Mapping[int, int]) -> str:
    """The lists around `cells` (rank: index in its list), one line per rank; an index past the end marks the end.

        rank 0  ... 0F1 >0B0<  0F2  0B1  0F3 ...
        rank 1      1F0  1F1   1B0  1F2  1B1 ...

    Ranks without a cell are shown around the first one's index. Of many ranks those around the first cell are shown.
    """
    first_rank = min(cells)
    last = max(schedule.num_ranks - _MOST_RANKS, 0)
    begin = min(max(first_rank - _MOST_RANKS // 2, 0), last)
    ranks = [rank for rank in range(schedule.num_ranks) if begin <= rank < begin + _MOST_RANKS or rank in cells]
    width = max(len(str(action)) for rank in ranks for action in (*schedule.actions[rank], "end"))
    lines = [_line(schedule, rank, cells.get(rank), cells[first_rank], width) for rank in ranks]
    if left_out := schedule.num_ranks - len(ranks):
        lines.append(f"({left_out} more ranks)")
    return "\n".join(lines)


def _line(schedule: Schedule, rank: int, cell: int | None, center: int, width: int) -> str:
    actions = schedule.actions[rank]
    center = center if cell is None else cell
    texts = []
    for index in range(center - _REACH, center + _REACH + 1):
        text = str(actions[index]) if 0 <= index < len(actions) else ""
        if index == cell:
            text = f">{text or 'end'}<"
        texts.append(f"{text:^{width + 2}}")
    before = "..." if center > _REACH and actions else "   "
    after = "..." if center + _REACH + 1 < len(actions) else ""
    return f"rank {rank:<{len(str(schedule.num_ranks - 1))}}  {before} {' '.join(texts)} {after}".rstrip()
