"""`lowtide plan`: bytes of model states per rank, before anything is started."""

import argparse
import re
from collections.abc import Sequence
from decimal import Decimal

from rich.console import Console
from rich.table import Table

from ..engine.memory import predict
from .arguments import Parser

HELP = "say beforehand how much memory the model states take on each rank"
_STAGES = {
    0: "stage 0",
    1: "stage 1 (P_os)",
    2: "stage 2 (P_os+g)",
    3: "stage 3 (P_os+g+p)",
}
_MIXED = (2, 2, 12)  # bytes of a parameter, of its gradient, and of master weight and two moments
_FULL = (4, 4, 8)  # the parameter is its own master weight


def main(argv: Sequence[str]) -> int:
    """Runs the command; prints one table for each model size."""
    arguments = parser().parse_args(argv)
    # A file or a pipe gets the whole table, however wide; a terminal its own width.
    console = Console() if Console().is_terminal else Console(width=100)
    for num_params in arguments.params:
        console.print(memory_table(num_params, arguments.ranks, arguments.fp32))
    return 0


def memory_table(num_params: int, ranks: Sequence[int], is_fp32: bool) -> Table:
    """GB (1e9 bytes) of parameters, gradients and optimizer states per rank: a row for each number of ranks."""
    param, gradient, state = _FULL if is_fp32 else _MIXED
    kind = "fp32" if is_fp32 else "mixed precision"
    table = Table(
        title=f"{num_params / 1e9:,g} billion parameters, Adam, {kind}: GB per rank",
        caption="without activations, padding and what gathering needs; arXiv 1910.02054, table 1",
    )
    table.add_column("ranks", justify="right")
    for name in _STAGES.values():
        table.add_column(name, justify="right")
    for count in ranks:
        totals = [predict(num_params, stage, count, param, gradient, state).total_bytes for stage in _STAGES]
        table.add_row(str(count), *(_gigabytes(total) for total in totals))
    return table


def _gigabytes(count_bytes: int) -> str:
    """Three figures, or all before the point: 4187, 31.4, 1.88, 0.117."""
    value = count_bytes / 1e9
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _params(text: str) -> list[int]:
    """ "7.5b,350M,13e9" -> [7_500_000_000, 350_000_000, 13_000_000_000]"""
    found = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    counts = [Decimal(match[1]).scaleb(_POWERS[match[2].lower()]) for match in found if match is not None]
    if len(counts) < len(found) or any(count < 1 or count != int(count) for count in counts):
        raise argparse.ArgumentTypeError(
            f'expected numbers of parameters with commas between, such as 7b, 1.5B, 350M or 13e9, found "{text}"'
        )
    return [int(count) for count in counts]


_POWERS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}
_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:e\+?\d{1,2})?)([kmbt]?)", re.IGNORECASE)


def _ranks(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f'expected whole numbers of at least 1 with commas between, found "{text}"')
    return list(map(int, parts))


def parser() -> Parser:
    """The command line of `lowtide plan`."""
    result = Parser(prog="lowtide plan", description=HELP[0].upper() + HELP[1:] + ".")
    result.add_argument(
        "--params",
        metavar="N,...",
        type=_params,
        required=True,
        help="parameters of the model: 7b, 1.5B, 350M, 13e9; or of several",
    )
    result.add_argument(
        "--ranks",
        metavar="N,...",
        type=_ranks,
        default=[1, 4, 16, 64, 256, 1024],
        help="data-parallel ranks (default: 1,4,16,64,256,1024)",
    )
    result.add_argument("--fp32", action="store_true", help="fp32 throughout in place of mixed precision")
    return result
