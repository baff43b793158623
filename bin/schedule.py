"""`lowtide schedule`: draws a pipeline schedule, or ranks all of them."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ..pipe.schedules.costs import Costs
from ..pipe.schedules.grid import colour_grid, write_png
from ..pipe.schedules.registry import KINDS, is_path, make_schedule, read_schedule
from ..pipe.schedules.schedule import Schedule, ScheduleError
from ..pipe.schedules.simulator import Simulation, simulate
from .arguments import Parser, console_of

_EXAMPLES = """examples:
  lowtide schedule show 1f1b --ranks 4 --microbatches 8
  lowtide schedule show train.json --png schedule.png
  lowtide schedule show zb-v --ranks 4 --microbatches 8 --costs 1,1.2,0.8 --save own.txt
  lowtide schedule show own.txt
  lowtide schedule compare --ranks 8 --microbatches 32
  lowtide schedule compare --ranks 8 --microbatches 32 --activation-bytes 3GB --parameter-bytes 12GB --memory-limit 40GB
"""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(argv: Sequence[str]) -> int:
    """Runs the command; 0 if a schedule was shown or fits, 1 with the reason on stderr if not."""
    arguments = parser().parse_args(argv)
    # A file or a pipe gets the lines as wide as they are; a terminal its own width.
    console = console_of(132)
    try:
        return _show(arguments, console) if arguments.command == "show" else _compare(arguments, console)
    except ScheduleError as error:
        print(f"lowtide schedule: {error}", file=sys.stderr)
        return 1


def _show(arguments: argparse.Namespace, console: Console) -> int:
    simulation = simulate(schedule := _requested(arguments), _costs(schedule, arguments))
    console.print(colour_grid(simulation, console.width))
    console.print(_rank_table(simulation))
    if arguments.save:
        Path(arguments.save).write_text(schedule.to_text(), encoding="utf-8")
        print(f"schedule written to {arguments.save}")
    if arguments.png:
        try:
            write_png(simulation, Path(arguments.png))
        except ModuleNotFoundError as error:
            raise ScheduleError(f'--png needs matplotlib: pip install "lowtide[examples]" ({error})') from error
        print(f"picture written to {arguments.png}")
    return 0


def _requested(arguments: argparse.Namespace) -> Schedule:
    """The schedule of a config, of a text file, or of a name with counts; options win over the config."""
    name = arguments.schedule
    counts: dict[str, int | None] = {}
    if name.endswith(".json") or files("lowtide.configs").joinpath(f"{name}.json").is_file():
        name, counts = _settings(name)
    elif is_path(name):
        schedule = read_schedule(Path(name))
        counts = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    for key in ("ranks", "microbatches", "chunks"):
        if getattr(arguments, key) is not None:
            counts[key] = getattr(arguments, key)
    ranks, microbatches = counts.get("ranks"), counts.get("microbatches")
    if ranks is None or microbatches is None:
        missing = "ranks" if ranks is None else "microbatches"
        raise ScheduleError(f"schedule {name}: how many {missing}? Add --{missing} N")
    return make_schedule(name, ranks, microbatches, counts.get("chunks"))


def _settings(source: str) -> tuple[str, dict[str, int | None]]:
    """The schedule of a config file or preset, and its counts as far as the config has them."""
    from ..engine.config.config import Config, ConfigError  # takes seconds, and a schedule alone does not need it

    try:
        config = Config.load(source)
    except ConfigError as error:
        raise ScheduleError(str(error)) from error
    counts = {
        "ranks": config.parallel.pipeline if config.parallel.pipeline > 1 else None,
        "microbatches": config.pipeline.microbatches or config.gradient_accumulation_steps,
        "chunks": config.pipeline.chunks,
    }
    return config.pipeline.schedule, counts


def _costs(schedule: Schedule, arguments: argparse.Namespace) -> Costs:
    """Costs of stages, from those of a rank's share of the model, which its stages divide evenly."""
    chunks = schedule.num_stages / schedule.num_ranks
    forward, input_backward, weight_backward = (cost / chunks for cost in arguments.costs)
    kept = arguments.kept_bytes
    return Costs.uniform(
        schedule.num_stages,
        forward=forward,
        input_backward=input_backward,
        weight_backward=weight_backward,
        send=arguments.send,
        activation_bytes=arguments.activation_bytes / chunks,
        kept_bytes=None if kept is None else kept / chunks,
        parameter_bytes=arguments.parameter_bytes / chunks,
    )


def _rank_table(simulation: Simulation) -> Table:
    schedule = simulation.schedule
    table = Table(
        title=f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches",
        caption=f"a step takes {simulation.makespan:.4g}; bubble {simulation.bubble:.1%} of it, "
        f"{simulation.overhead:.1%} of the work",
    )
    for name in ("rank", "stages", "busy", "waits", "in flight", "activations", "parameters"):
        table.add_column(name, justify="right")
    rows = zip(simulation.busy, simulation.waits, simulation.peaks, strict=True)
    for rank, (busy, waits, peaks) in enumerate(rows):
        stages = " ".join(map(str, schedule.stages_of_rank(rank)))
        memory = (_size(peaks.activation_bytes), _size(peaks.parameter_bytes))
        table.add_row(str(rank), stages, f"{busy:.4g}", f"{waits:.4g}", str(peaks.in_flight), *memory)
    return table


class _Candidate(NamedTuple):
    simulation: Simulation
    chunks: int
    total_bytes: float  # on the rank that needs the most


def _compare(arguments: argparse.Namespace, console: Console) -> int:
    candidates, refusals = _candidates(arguments)
    limit = float("inf") if arguments.memory_limit is None else arguments.memory_limit
    fitting = [candidate for candidate in candidates if candidate.total_bytes <= limit]
    console.print(_comparison(fitting, [other for other in candidates if other not in fitting], arguments))
    for refusal in refusals:
        console.print(f"not possible: {refusal}", soft_wrap=True, highlight=False)
    if not fitting:
        least = min((candidate.total_bytes for candidate in candidates), default=0.0)
        raise ScheduleError(f"no schedule fits in {_size(limit)}; the least that any needs is {_size(least)}")
    return 0


def _candidates(arguments: argparse.Namespace) -> tuple[list[_Candidate], list[str]]:
    """Every schedule with every number of chunks that was asked for, the fastest first, then the smallest."""
    found, refusals = [], []
    for name, chunks in _variants(arguments.chunks):
        try:
            schedule = make_schedule(name, arguments.ranks, arguments.microbatches, chunks)
        except ScheduleError as error:
            refusals.append(str(error))
            continue
        simulation = simulate(schedule, _costs(schedule, arguments))
        found.append(_Candidate(simulation, chunks, max(peaks.total_bytes for peaks in simulation.peaks)))
    found.sort(key=lambda candidate: (round(candidate.simulation.makespan, 9), candidate.total_bytes))
    return found, refusals


def _variants(chunk_counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    for kind in KINDS.values():
        yield kind.name, kind.min_chunks
        if kind.max_chunks is None:
            yield from ((kind.name, chunks) for chunks in chunk_counts if chunks > kind.min_chunks)


def _comparison(fitting: Sequence[_Candidate], others: Sequence[_Candidate], arguments: argparse.Namespace) -> Table:
    limit, has_parameters = arguments.memory_limit, arguments.parameter_bytes > 0
    title = f"{arguments.ranks} ranks, {arguments.microbatches} microbatches, F,I,W = "
    title += ",".join(f"{cost:g}" for cost in arguments.costs)
    title += "" if limit is None else f", memory limit {_size(limit)}"
    table = Table(title=title, caption="the fastest first; memory is that of the rank that needs the most")
    columns = ["", "schedule", "chunks", "step", "bubble", "in flight", "activations"]
    for name in (*columns, *["with parameters"] * has_parameters, *["fits"] * (limit is not None)):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for place, candidate in enumerate((*fitting, *others), start=1):
        simulation = candidate.simulation
        fits = place <= len(fitting)
        cells = [
            str(place) if fits else "",
            simulation.schedule.name,
            str(candidate.chunks),
            f"{simulation.makespan:.4g}",
            f"{simulation.bubble:.1%}",
            str(max(peaks.in_flight for peaks in simulation.peaks)),
            _size(max(peaks.activation_bytes for peaks in simulation.peaks)),
        ]
        cells += [_size(candidate.total_bytes)] * has_parameters + ["yes" if fits else "no"] * (limit is not None)
        table.add_row(*cells, style="" if fits else "dim")
    return table


def _size(count: float) -> str:
    """1.5 (small numbers are microbatches), 12.3 MB, 4.57 GB."""
    for unit in ("GB", "MB"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.3g} {unit}"
    return f"{count:.4g}"


def _parse_size(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f'expected a size such as 8, 500MB or 1.5GiB, found "{text}"')
    return float(match[1]) * _UNITS[match[2].upper()]


def _parse_costs(text: str) -> tuple[float, float, float]:
    try:
        forward, input_backward, weight_backward = map(float, text.split(","))
    except ValueError:
        forward = input_backward = weight_backward = -1.0
    if min(forward, input_backward, weight_backward) < 0 or forward + input_backward + weight_backward == 0:
        raise argparse.ArgumentTypeError(f'expected three times F,I,W such as 1,1.2,0.8, found "{text}"')
    return forward, input_backward, weight_backward


def _parse_time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f'expected a time of 0 or more, found "{text}"')
    return value


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'expected a whole number of at least 1, found "{text}"')
    return int(text)


def _parse_counts(text: str) -> list[int]:
    return [_parse_count(part) for part in text.split(",")]


def parser() -> Parser:
    """The command line of `lowtide schedule`."""
    result = Parser.of("schedule", _EXAMPLES)
    result.description = f"{result.description}\n\nschedules:\n" + "\n".join(
        f"  {kind.name:<12} {kind.summary}" for kind in KINDS.values()
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="draw one schedule and say what it costs on each rank")
    show.add_argument("schedule", metavar="CONFIG|NAME|FILE", help="a .json config, a name, or a text file")
    show.add_argument("--ranks", metavar="N", type=_parse_count, help="pipeline ranks (default: as the config)")
    show.add_argument("--microbatches", metavar="N", type=_parse_count, help="microbatches (default: as the config)")
    show.add_argument("--chunks", metavar="N", type=_parse_count, help="stages on each rank")
    show.add_argument("--png", metavar="FILE", help="draw it into a picture too")
    show.add_argument("--save", metavar="FILE", help="write it as a text file, to change and to name in a config")
    compare = commands.add_parser("compare", help="rank all schedules for given costs and a memory limit")
    compare.add_argument("--ranks", metavar="N", type=_parse_count, required=True, help="pipeline ranks")
    compare.add_argument("--microbatches", metavar="N", type=_parse_count, required=True, help="microbatches")
    compare.add_argument(
        "--chunks", metavar="N,...", type=_parse_counts, default=[2, 4], help="chunks to try, where any will do (2,4)"
    )
    compare.add_argument("--memory-limit", metavar="SIZE", type=_parse_size, help="of each rank, such as 40GB")
    for command in (show, compare):
        _add_cost_options(command)
    return result


def _add_cost_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("costs of one microbatch on one rank's share of the model")
    group.add_argument(
        "--costs", metavar="F,I,W", type=_parse_costs, default=(1.0, 1.0, 1.0), help="times, in any unit (1,1,1)"
    )
    group.add_argument("--send", metavar="T", type=_parse_time, default=0.0, help="time of a message (0)")
    group.add_argument(
        "--activation-bytes", metavar="SIZE", type=_parse_size, default=1.0, help="(1: memory counts in microbatches)"
    )
    group.add_argument("--kept-bytes", metavar="SIZE", type=_parse_size, help="of it, what is kept from I to W (all)")
    group.add_argument("--parameter-bytes", metavar="SIZE", type=_parse_size, default=0.0, help="parameters (0)")
