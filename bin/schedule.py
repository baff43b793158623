"""`lowtide schedule`: draw a pipeline schedule, or rank all schedules."""

import argparse
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..pipe.schedules.costs import Costs
from ..pipe.schedules.grid import colour_grid, write_png
from ..pipe.schedules.registry import KINDS, is_path, make_schedule, read_schedule
from ..pipe.schedules.schedule import Schedule, ScheduleError
from ..pipe.schedules.simulator import Simulation, simulate
from .arguments import (
    Parser,
    console_of,
    numbers,
    output_file,
    parse_count,
    parse_counts,
    parse_size,
    picture_file,
    reports,
)  # fmt: skip

_EXAMPLES = """examples:
  lowtide schedule show 1f1b --ranks 4 --microbatches 8
  lowtide schedule show train.json --png schedule.png
  lowtide schedule show zb-v --ranks 4 --microbatches 8 --costs 1,1.2,0.8 --save my.txt
  lowtide schedule show my.txt
  lowtide schedule compare --ranks 8 --microbatches 32
  lowtide schedule compare --ranks 8 --microbatches 32 --activation-bytes 3GB --parameter-bytes 12GB --memory-limit 40GB
"""


@reports("schedule", ValueError, OSError)
def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0 if a schedule was shown or fits, else 1 with the reason on stderr."""
    arguments = parser().parse_args(argv)
    console = console_of(132)
    return _show(arguments, console) if arguments.command == "show" else _compare(arguments, console)


def _show(arguments: argparse.Namespace, console: Console) -> int:
    simulation = simulate(schedule := _requested(arguments), _costs(schedule, arguments))
    console.print(colour_grid(simulation, console.width))
    console.print(_rank_table(simulation))
    if arguments.save:
        arguments.save.write_text(schedule.to_text(), encoding="utf-8")
        print(f"schedule written to {arguments.save}")
    if arguments.png:
        write_png(simulation, arguments.png)
        print(f"picture written to {arguments.png}")
    return 0


def _requested(arguments: argparse.Namespace) -> Schedule:
    """Make the schedule of a config, a text file, or a name with counts. Options override the config."""
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
        raise ScheduleError(f"schedule {name}: expected a number of {missing}; add --{missing} N")
    return make_schedule(name, ranks, microbatches, counts.get("chunks"))


def _settings(source: str) -> tuple[str, dict[str, int | None]]:
    """Return the schedule name of a config file or preset, and the counts that it sets."""
    from ..engine.config.config import Config, ConfigError  # takes seconds, and only configs need it

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
    """Return costs per stage. The options give those of a rank's share of the model, which its stages divide evenly."""
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
        *numbers("rank", "stages", "busy", "waits", "in flight", "activations", "parameters"),
        title=f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches",
        caption=f"step {simulation.makespan:.4g}; bubble {simulation.bubble:.1%} of the step, "
        f"{simulation.overhead:.1%} of the work",
    )
    rows = zip(simulation.busy, simulation.waits, simulation.peaks, strict=True)
    for rank, (busy, waits, peaks) in enumerate(rows):
        stages = " ".join(map(str, schedule.stages_of_rank(rank)))
        memory = (_size(peaks.activation_bytes), _size(peaks.parameter_bytes))
        table.add_row(str(rank), stages, f"{busy:.4g}", f"{waits:.4g}", str(peaks.in_flight), *memory)
    return table


def _compare(arguments: argparse.Namespace, console: Console) -> int:
    candidates, refusals = _candidates(arguments)
    limit = float("inf") if arguments.memory_limit is None else arguments.memory_limit
    fitting = [candidate for candidate in candidates if _fullest(candidate) <= limit]
    console.print(_comparison(fitting, [each for each in candidates if each not in fitting], arguments))
    for refusal in refusals:
        console.print(f"not possible: {refusal}", soft_wrap=True, highlight=False)
    if not fitting:
        least = min(map(_fullest, candidates), default=0.0)
        raise ScheduleError(f"no schedule fits in {_size(limit)}; the smallest needs {_size(least)}")
    return 0


def _candidates(arguments: argparse.Namespace) -> tuple[list[Simulation], list[str]]:
    """Simulate every schedule with every number of chunks: the fastest first, ties by memory. Also return refusals."""
    found, refusals = [], []
    for name, chunks in _variants(arguments.chunks):
        try:
            schedule = make_schedule(name, arguments.ranks, arguments.microbatches, chunks)
        except ScheduleError as error:
            refusals.append(str(error))
            continue
        found.append(simulate(schedule, _costs(schedule, arguments)))
    # Rounded: sums of the same times in another order must tie, so that memory decides.
    found.sort(key=lambda simulation: (round(simulation.makespan, 9), _fullest(simulation)))
    return found, refusals


def _fullest(simulation: Simulation) -> float:
    """Return the bytes of the fullest rank."""
    return max(peaks.total_bytes for peaks in simulation.peaks)


def _variants(chunk_counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    for kind in KINDS.values():
        yield kind.name, kind.min_chunks
        if kind.max_chunks is None:
            yield from ((kind.name, chunks) for chunks in chunk_counts if chunks > kind.min_chunks)


def _comparison(fitting: Sequence[Simulation], too_big: Sequence[Simulation], arguments: argparse.Namespace) -> Table:
    limit, has_parameters = arguments.memory_limit, arguments.parameter_bytes > 0
    title = f"{arguments.ranks} ranks, {arguments.microbatches} microbatches, F,I,W = "
    title += ",".join(f"{cost:g}" for cost in arguments.costs)
    title += "" if limit is None else f", memory limit {_size(limit)}"
    table = Table(title=title, caption="the fastest first; memory of the fullest rank")
    columns = ["", "schedule", "chunks", "step", "bubble", "in flight", "activations"]
    for name in (*columns, *["with parameters"] * has_parameters, *["fits"] * (limit is not None)):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for place, simulation in enumerate((*fitting, *too_big), start=1):
        fits = place <= len(fitting)
        cells = [
            str(place) if fits else "",
            simulation.schedule.name,
            str(simulation.schedule.num_stages // simulation.schedule.num_ranks),
            f"{simulation.makespan:.4g}",
            f"{simulation.bubble:.1%}",
            str(max(peaks.in_flight for peaks in simulation.peaks)),
            _size(max(peaks.activation_bytes for peaks in simulation.peaks)),
        ]
        cells += [_size(_fullest(simulation))] * has_parameters + ["yes" if fits else "no"] * (limit is not None)
        table.add_row(*cells, style="" if fits else "dim")
    return table


def _size(count: float) -> str:
    """Return 1.5 (small numbers count microbatches), 12.3 MB or 4.57 GB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.4g}"


def _parse_costs(text: str) -> tuple[float, float, float]:
    try:
        found = [_parse_time(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        found = []
    if len(found) != 3 or not any(found):
        raise argparse.ArgumentTypeError(f'expected three times F,I,W, for example 1,1.2,0.8, found "{text}"')
    return found[0], found[1], found[2]


def _parse_time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f'expected a time of 0 or more, found "{text}"')
    return value


def parser() -> Parser:
    """Return the command line of `lowtide schedule`."""
    result = Parser.of("schedule", _EXAMPLES)
    result.description = f"{result.description}\n\nschedules:\n" + "\n".join(
        f"  {kind.name:<12} {kind.summary}" for kind in KINDS.values()
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="draw a schedule, with its time and memory on each rank")
    show.add_argument("schedule", metavar="CONFIG|NAME|FILE", help="a .json config, a name, or a text file")
    show.add_argument("--ranks", metavar="N", type=parse_count, help="pipeline ranks (default: from the config)")
    show.add_argument("--microbatches", metavar="N", type=parse_count, help="microbatches (default: from the config)")
    show.add_argument("--chunks", metavar="N", type=parse_count, help="stages on each rank")
    show.add_argument("--png", metavar="FILE", type=picture_file, help="draw a picture")
    show.add_argument(
        "--save", metavar="FILE", type=output_file, help="write a text file, which you can edit and name in a config"
    )
    compare = commands.add_parser("compare", help="rank all schedules for given costs and a memory limit")
    compare.add_argument("--ranks", metavar="N", type=parse_count, required=True, help="pipeline ranks")
    compare.add_argument("--microbatches", metavar="N", type=parse_count, required=True, help="microbatches")
    compare.add_argument(
        "--chunks",
        metavar="N,...",
        type=parse_counts,
        default=[2, 4],
        help="stages on each rank to try, for schedules that take any number (default: 2,4)",
    )
    compare.add_argument("--memory-limit", metavar="SIZE", type=parse_size, help="memory of a rank, for example 40GB")
    for command in (show, compare):
        _add_cost_options(command)
    return result


def _add_cost_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("costs of a microbatch on a rank's share of the model")
    group.add_argument(
        "--costs",
        metavar="F,I,W",
        type=_parse_costs,
        default=(1.0, 1.0, 1.0),
        help="times of forward, input backward and weight backward, in any unit (default: 1,1,1)",
    )
    group.add_argument("--send", metavar="T", type=_parse_time, default=0.0, help="time of a message (default: 0)")
    group.add_argument(
        "--activation-bytes",
        metavar="SIZE",
        type=parse_size,
        default=1.0,
        help="activations of a microbatch (default: 1, so that memory counts microbatches)",
    )
    group.add_argument(
        "--kept-bytes", metavar="SIZE", type=parse_size, help="activations kept from I to W (default: all)"
    )
    group.add_argument(
        "--parameter-bytes", metavar="SIZE", type=parse_size, default=0.0, help="parameters (default: 0)"
    )
