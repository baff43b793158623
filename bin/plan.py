"""`lowtide plan`: predict memory and time of a training, and find the fastest config that fits."""

import argparse
import copy
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from torch import nn

from ..engine.config.config import Config, ConfigError
from ..engine.config.read import leaves, read
from ..engine.config.translate import AUTO
from ..engine.model.deferred import module_for_shapes
from ..engine.plan.llama import Shape, batch, build, short_profiler
from ..engine.plan.machine import Machine, calibrated, gigabytes
from ..engine.plan.measured import Measured, default_path, device_key
from ..engine.plan.plan import Plan, made_batch, plan, plan_with, uncollected
from ..engine.report.memory import predict
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
from .planned import draw, show

_STAGES = {
    0: "stage 0",
    1: "stage 1 (P_os)",
    2: "stage 2 (P_os+g)",
    3: "stage 3 (P_os+g+p)",
}
_NUM_STEPS = "scheduler.params.total_num_steps"
_OF_TRAINER = {path for path in AUTO if ".params." in path} | {_NUM_STEPS, "gradient_clipping"}
_FOLDER = "lowtide-nvme"  # in the working directory, as in the preset zero3_offload_nvme
_MIXED = (2, 2, 12)  # bytes of a parameter, of its gradient, and of its master weight and two moments
_OF_FORMULA = {"params", "ranks", "fp32"}  # options of the table of ZeRO's formula
_FULL = (4, 4, 8)  # without a separate master weight


_EXAMPLES = """examples:
  lowtide plan zero3-bf16 --layers 32 --hidden 4096 --heads 32 --vocab 128256 --sequence 8192 --gpus 64
  lowtide plan auto --hf path/to/config.json --gpus 64 --gpu-memory 80GB --global-batch 512 --write best.json
  lowtide plan auto --model my_package.models:build --sequence 2048 --gpus 16 --tokens 300B --png front.png
  lowtide plan zero1 --model my_package.models:build --gpus 2 --machine machine.json     2 CPU ranks on this machine
  lowtide plan --params 7b,70b --ranks 8,64
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0 if the plan fits, 1 if it does not."""
    command_line = parser()
    arguments = command_line.parse_args(argv)
    console = console_of(132)
    if arguments.config is None and arguments.params is None:
        command_line.error("expected CONFIG and a model, or --params N")
    # Parsed again without defaults: a given value may equal its default.
    bare = argparse.Namespace(**dict.fromkeys(vars(arguments)))
    given = {name for name, value in vars(command_line.parse_args(argv, bare)).items() if value is not None}
    wrong = given & _OF_FORMULA if arguments.config is not None else given - _OF_FORMULA
    if wrong:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(wrong))
        rule = "--params takes no CONFIG, only --ranks and --fp32; a plan of CONFIG has --gpus N instead of --ranks"
        command_line.error(f"found {names} {'with' if arguments.config is not None else 'without'} CONFIG: {rule}")
    if arguments.config is not None:
        return _plan(arguments, console)
    console = console if console.is_terminal else Console(width=100)
    for num_params in arguments.params:
        console.print(memory_table(num_params, arguments.ranks, arguments.fp32))
    return 0


@reports("plan", ValueError, ImportError, OSError)
@uncollected(is_last=True)
def _plan(arguments: argparse.Namespace, console: Console) -> int:
    plan = _planned(arguments)
    show(plan, console, arguments.tokens)
    if arguments.write:
        text = json.dumps(_to_write(plan.config, read(arguments.config)[0]), indent=2)
        arguments.write.write_text(text + "\n", encoding="utf-8")
        print(f"config written to {arguments.write}")
    if arguments.png:
        draw(plan, arguments.png)
        print(f"picture written to {arguments.png}")
    return 0 if plan.fits else 1


def _to_write(config: Mapping[str, Any], source: Mapping[str, object]) -> dict[str, Any]:
    """Return the config with "auto" where the source leaves a value to the trainer's arguments."""
    found = copy.deepcopy(dict(config))
    for path, value in leaves(source).items():
        section, _, key = path.rpartition(".")
        # A default in its place would contradict the arguments, or win.
        if value == "auto" and path in _OF_TRAINER:
            (found[section.partition(".")[0]]["params"] if section else found)[key] = "auto"
    return found


def _planned(arguments: argparse.Namespace) -> Plan:
    """Make the plan that the command line describes. Raises ValueError unless it names exactly one model."""
    machine = _machine(arguments)
    sizes = ("layers", "hidden", "heads", "vocab")
    given = [name for name in (*sizes, "kv_heads", "mlp") if getattr(arguments, name) is not None]
    kinds = [bool(given), arguments.model is not None, arguments.hf is not None]
    if sum(kinds) != 1:
        raise ValueError(
            "expected one model: --model MODULE:FACTORY, --hf FOLDER, or --layers --hidden --heads --vocab"
        )
    config = _config(arguments)
    for note in config.notes:
        # For a trainer it is an argument, and it decides the bytes of all parameters.
        if note.startswith(("bf16.enabled", "fp16.enabled")):
            print(note)
    if given:
        missing = [f"--{name}" for name in sizes if name not in given]
        if missing:
            name = given[0].replace("_", "-")
            raise ValueError(f"expected {', '.join(missing)} with --{name}: a shape needs layers, hidden, heads, vocab")
        shape = Shape(
            arguments.layers, arguments.hidden, arguments.heads, arguments.vocab, arguments.sequence or 2048,
            kv_heads=arguments.kv_heads or 0, mlp=arguments.mlp or 0,
        )  # fmt: skip
        return plan_with(build(shape), config, machine, partial(short_profiler, shape), batch(shape))
    made = _made(_factory(arguments.model) if arguments.model else _hugging_face(arguments.hf))
    sample = made_batch(made, arguments.sequence)
    return plan(made, config, world_size=arguments.gpus, machine=machine, hosts=machine.num_hosts, sample_batch=sample)


def _config(arguments: argparse.Namespace) -> Config:
    values = dict(read(arguments.config)[0])
    if arguments.global_batch is not None:
        values["train_batch_size"] = arguments.global_batch
    try:
        # Any number of steps in place of "auto": no memory and no time of a step depends on it.
        fill = {_NUM_STEPS: 1_000_000}
        return Config.load(values if arguments.nvme is None else _with_folders(values), fill=fill)
    except ConfigError as error:
        raise ConfigError(error.faults, arguments.config) from error


def _with_folders(values: Mapping[str, object]) -> dict[str, object]:
    """Add `nvme_path` to each kind of offload that has none, because --nvme says that there are drives."""
    found = dict(values)
    for section, kinds in (
        ("zero_optimization", ("offload_optimizer", "offload_param")),
        ("activation_checkpointing", ("offload",)),
    ):
        inner = found.get(section, {})
        if isinstance(inner, Mapping):
            known = {kind: inner.get(kind) or {} for kind in kinds}
            more = {kind: {"nvme_path": _FOLDER, **one} for kind, one in known.items() if isinstance(one, Mapping)}
            found[section] = {**inner, **more}
    return found


def _machine(arguments: argparse.Namespace) -> Machine:
    # Fewer GPUs than a node has: they are a part of a node.
    per_host = min(arguments.gpus_per_node, arguments.gpus)
    if arguments.gpus % per_host:
        raise ValueError(f"gpus({arguments.gpus}) = gpus per node({per_host}) x nodes(?) does not hold")
    names = {
        "gpu_memory": "device_bytes", "host_memory": "host_bytes", "nvme": "nvme_bytes", "intra": "intra",
        "inter": "inter", "flops": "flops",
    }  # fmt: skip
    changes = {field: getattr(arguments, name) for name, field in names.items() if getattr(arguments, name) is not None}
    num_hosts = arguments.gpus // per_host
    if arguments.machine is None:
        if arguments.device is not None:
            raise ValueError("--device: expected --machine FILE with it; the file has the device's speed")
        return replace(Machine(num_hosts=num_hosts, devices_per_host=per_host), **changes)
    measured = Measured.read(arguments.machine)
    if arguments.device is not None:
        if arguments.device not in measured.factors:
            known = ", ".join(f'"{name}"' for name in measured.factors) or "no device"
            raise ValueError(
                f'--device: expected a device in {arguments.machine}, found "{arguments.device}"; it has {known}'
            )
        machine = replace(Machine(num_hosts=num_hosts, devices_per_host=per_host), **changes)
        return calibrated(machine, measured.factors[arguments.device])
    if changes.keys() - {"device_bytes"}:
        raise ValueError(f"--machine: {arguments.machine} has the machine's speeds; leave out options that set them")
    if not measured.by_ranks:
        advice = f"lowtide env --measure {arguments.machine}"
        raise ValueError(f"--machine: expected measured speeds, found only factors of `lowtide tune`; first: {advice}")
    memory = changes.get("device_bytes", psutil.virtual_memory().total / per_host)
    machine = Machine.measured(measured, per_host, memory)
    return replace(calibrated(machine, measured.factor(device_key("cpu", per_host))), num_hosts=num_hosts)


def _factory(text: str) -> Callable[[], nn.Module]:
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f'--model: expected MODULE:FACTORY, for example my_package.models:build, found "{text}"')
    # The console script has no current folder in its path, unlike `python -m`.
    sys.path.insert(0, "")
    try:
        factory = getattr(import_module(module), name, None)
    except Exception as error:
        raise ValueError(f"--model: {module} cannot be imported from here ({error})") from error
    if not callable(factory):
        raise ValueError(f"--model: expected a callable that builds a model, found {type(factory).__name__} at {text}")
    made: Callable[[], nn.Module] = factory
    return made


def _made(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model without memory. Raises ValueError if that is not possible."""
    try:
        return module_for_shapes(build)
    except ValueError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"--model: expected a callable without arguments that builds a model ({error}: {type(error).__name__} in "
            f"{last.filename}:{last.lineno})"
        ) from error


def _hugging_face(text: str) -> Callable[[], nn.Module]:
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--hf: expected a folder with config.json, or that file, found nothing at {text}")
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"--hf needs transformers: pip install transformers ({error})") from error
    config = transformers.AutoConfig.from_pretrained(path)
    # A cache of keys would count as activations, and a training has none.
    config.use_cache = False
    # By its name, as a causal model would be the decoder of T5 or BART alone.
    model_class = getattr(transformers, (config.architectures or [""])[0], None)
    auto = transformers.AutoModelForCausalLM.from_config
    made: Callable[..., nn.Module] = auto if model_class is None else model_class._from_config
    return partial(made, config)


def memory_table(num_params: int, ranks: Sequence[int], is_fp32: bool) -> Table:
    """Make a table of GB (1e9 bytes) of model states per rank, with a row for each number of ranks."""
    param, gradient, state = _FULL if is_fp32 else _MIXED
    kind = "fp32" if is_fp32 else "mixed precision"
    table = Table(
        *numbers("ranks", *_STAGES.values()),
        title=f"{num_params / 1e9:,g} billion parameters, Adam, {kind}: GB per rank",
        caption="without activations, padding and gathered parameters; arXiv 1910.02054, table 1",
    )
    for count in ranks:
        totals = [predict(num_params, stage, count, param, gradient, state).total_bytes for stage in _STAGES]
        table.add_row(str(count), *(gigabytes(total) for total in totals))
    return table


def _params(text: str) -> list[int]:
    """Parse "7.5b,350M,13e9" to [7_500_000_000, 350_000_000, 13_000_000_000]."""
    found = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    # Decimal: 8.03 x 1e9 as floats need not be a whole number.
    counts = [Decimal(match[1]).scaleb(_POWERS[match[2].lower()]) for match in found if match is not None]
    if len(counts) < len(found) or any(count < 1 or count != int(count) for count in counts):
        raise argparse.ArgumentTypeError(
            f'expected numbers of parameters with commas between, for example 7b,1.5B,350M,13e9, found "{text}"'
        )
    return [int(count) for count in counts]


_POWERS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}
_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:e\+?\d{1,2})?)([kmbt]?)", re.IGNORECASE)


def _tokens(text: str) -> float:
    match = _SIZE.fullmatch(text.strip())
    count = float(match[1]) * 10 ** _POWERS[match[2].lower()] if match is not None else 0.0
    if not 0 < count < float("inf"):
        raise argparse.ArgumentTypeError(f'expected a number of tokens, for example 300B, 15T or 1e12, found "{text}"')
    return count


def parser() -> Parser:
    """Return the command line of `lowtide plan`."""
    result = Parser.of("plan", _EXAMPLES)
    result.add_argument(
        "config", metavar="CONFIG", nargs="?", help='a JSON file or a preset; "auto" chooses all settings'
    )
    _add_model(result)
    _add_machine(result)
    training = result.add_argument_group("the training")
    training.add_argument("--global-batch", metavar="N", type=parse_count, help="samples in a step, over all GPUs")
    training.add_argument(
        "--tokens", metavar="N", type=_tokens, help="tokens of the whole training, for example 15T: shows its days"
    )
    training.add_argument(
        "--write", metavar="FILE", type=output_file, help="write the config to FILE, for lowtide.initialize"
    )
    training.add_argument(
        "--png", metavar="FILE", type=picture_file, help="draw the time and memory of the best configs"
    )
    table = result.add_argument_group("model states by the formula of ZeRO, without CONFIG")
    table.add_argument(
        "--params",
        metavar="N,...",
        type=_params,
        help="parameters of the model, or of several: 7b, 1.5B, 350M, 13e9",
    )
    table.add_argument(
        "--ranks",
        metavar="N,...",
        type=parse_counts,
        default=[1, 4, 16, 64, 256, 1024],
        help="data-parallel ranks (default: 1,4,16,64,256,1024)",
    )
    table.add_argument("--fp32", action="store_true", help="fp32 instead of mixed precision")
    return result


def _add_model(result: Parser) -> None:
    model = result.add_argument_group("the model")
    model.add_argument("--model", metavar="MODULE:FACTORY", help="a callable that builds the model")
    model.add_argument("--hf", metavar="FOLDER", help="the folder of a Hugging Face model, or its config.json")
    for name, text in (("layers", "number of blocks; this and the next six options describe a Llama"),
                       ("hidden", "hidden size: features of a token between the blocks"),
                       ("heads", "number of attention heads"),
                       ("vocab", "number of tokens in the vocabulary"),
                       ("sequence", "tokens in a sample (default: 2048)"),
                       ("kv-heads", "number of key and value heads (default: as many as --heads)"),
                       ("mlp", "hidden features of an MLP (default: 8/3 of --hidden)")):  # fmt: skip
        model.add_argument(f"--{name}", metavar="N", type=parse_count, help=text)


def _add_machine(result: Parser) -> None:
    machine = result.add_argument_group("the machine (defaults: hosts of 8 H100)")
    machine.add_argument("--gpus", metavar="N", type=parse_count, default=8, help="number of GPUs in all (default: 8)")
    machine.add_argument(
        "--gpus-per-node", metavar="N", type=parse_count, default=8, help="GPUs in a node (default: 8)"
    )
    machine.add_argument(
        "--machine",
        metavar="FILE",
        type=Path,
        nargs="?",
        const=default_path(),
        help="plan CPU ranks, with speeds from a file of `lowtide env --measure` (default: its default file)",
    )
    for name, text in (("gpu-memory", "memory of a GPU (default: 80GB)"),
                       ("host-memory", "memory of a node (default: 2TB)"),
                       ("nvme", "size of a node's drives for offload (default: no drives)"),
                       ("intra", "bytes/s between the GPUs of a node (default: 330GB)"),
                       ("inter", "bytes/s from a GPU to other nodes (default: 45GB)"),
                       ("flops", "operations/s of matrix products in 16 bits (default: 450e12)")):  # fmt: skip
        machine.add_argument(f"--{name}", metavar="SIZE", type=parse_size, help=text)
    machine.add_argument(
        "--device", metavar="NAME", help="a GPU on which `lowtide tune` ran, by its name in the file of --machine"
    )
