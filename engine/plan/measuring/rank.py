"""A rank of a measurement: `python -m lowtide.engine.plan.measuring.rank REQUEST`.

REQUEST: a JSON file, {"folder": of files or null, "seconds": curves that are already known}. The curves of rank 0 go to
rank0.json beside it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import torch

from ....comm import Axis, Mesh, ParallelDims, World
from ....kernels.optimizer_step import update_shard
from ....kernels.sum_of_squares import squares_by_block
from ....offload import AioOptions, FileStore, OffloadError, keep_heap
from ....optimizers import OPTIMIZERS
from ....zero.codec import sum_in_rank_order
from ....zero.layout import BLOCK_NUMEL
from ..measured import Curve, Measured, Speeds, curve
from .operations import Meet, curve_of, host_curves, measure_calls, measure_operations, seconds_of

_NUMELS = (1 << 12, 1 << 16, 1 << 20, 1 << 22)  # float32 elements of a message or an update
_COLD_BYTES = 256 << 20
_FILE_BYTES = (1 << 20, 1 << 23, 1 << 26)
_ROUNDS = 6
_PASSES = 3  # spread over time, because load from other processes comes and goes within seconds
_SLOTS = 3
_ROUTES = ("shared_memory", "sockets")

Curves = dict[str, Curve]


def main(arguments: list[str]) -> None:
    """Measure, and write the curves of this rank."""
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    curves = {name: curve(points) for name, points in request["seconds"].items()}
    # As the engine does: else each new tensor of a large call would pay for new pages of the system.
    keep_heap()
    world = World.join("cpu")

    def say(text: str) -> None:
        if world.rank == 0:
            print(text, flush=True)

    if not curves:
        curves = _least_of([_pass(say, world) for _ in range(_PASSES)])
        curves |= measure_calls(say, world.barrier, Speeds(world.size, torch.get_num_threads(), curves))
        if request["folder"] is not None:
            say("files")
            curves |= _files(Path(request["folder"]), world.rank)
    if world.size > 1:
        say("messages")
        for transport in _ROUTES:
            curves |= _messages(world, transport)
    say("host times of an engine")
    curves |= host_curves(Measured({world.size: Speeds(world.size, torch.get_num_threads(), curves)}), world)
    found = {name: curve.points for name, curve in curves.items()}
    made = {"threads": torch.get_num_threads(), "seconds": found}
    Path(arguments[0]).with_name(f"rank{world.rank}.json").write_text(json.dumps(made), encoding="utf-8")
    world.leave()


def _pass(say: Callable[[str], None], world: World) -> Curves:
    curves = measure_operations(say, world.barrier)
    say("updates")
    return curves | _updates(world.barrier)


def _least_of(passes: list[Curves]) -> Curves:
    """Return the minimum of the passes at each point."""
    found = {}
    for name, first in passes[0].items():
        times = zip(*(curves[name].times for curves in passes), strict=True)
        found[name] = Curve(first.sizes, tuple(map(min, times)))
    return found


def _updates(meet: Meet) -> Curves:
    """Measure AdamW in float32: it reads gradient, weight and two moments, and writes the last three."""
    update, inspect = [], []
    pool = torch.ones(_COLD_BYTES // 4)  # larger than caches, as the states of a model
    rule = OPTIMIZERS["adamw"]
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    for numel in _NUMELS:
        gradient = torch.ones(numel)
        # Each call takes the next states of the pool, because the last states are still in a cache.
        parts = cycle(pool[: pool.numel() // (4 * numel) * 4 * numel].view(-1, 4, numel).unbind())

        def step(parts: Iterator[torch.Tensor] = parts) -> None:
            cold, master, *states = next(parts).unbind()
            update_shard(rule, master, cold, states, 1, options, 1.0, None)

        def look(g: torch.Tensor = gradient) -> None:
            torch.isfinite(squares_by_block(g, BLOCK_NUMEL)).all()

        # Bytes as `update_seconds` counts them: 2 x 8 of the moments, 4 of the gradient, 4 of the parameter.
        update.append((24.0 * numel, seconds_of(step, meet)))
        inspect.append((4.0 * numel, seconds_of(look, meet)))
    return {"update": curve_of(update), "inspect": curve_of(inspect)}


def _files(folder: Path, rank: int) -> Curves:
    """Measure files as the offload uses them. Raises OffloadError if the folder cannot be used."""
    write, read = [], []
    for nbytes in _FILE_BYTES:
        values = torch.ones(nbytes, dtype=torch.uint8)
        store = FileStore(folder, rank, AioOptions())
        try:
            store.reserve([nbytes])
            write.append((float(nbytes), _least(partial(_save, store, values))))
            read.append((float(nbytes), _least(partial(_load, store, values))))
        finally:
            store.close()
    return {"file write": curve_of(write), "file read": curve_of(read)}


def _save(store: FileStore, values: torch.Tensor) -> None:
    store.save("values", values).wait()


def _load(store: FileStore, values: torch.Tensor) -> None:
    store.load("values", values).wait()


def _messages(world: World, transport: str) -> Curves:
    """Measure collectives and messages by bytes that a rank sends."""
    size = world.size
    parallel_dims = ParallelDims((("shard", size),), ("shard",))
    mesh = Mesh.create(world, parallel_dims, transport, 0, "shard")
    try:
        axis = mesh.axes["shard"]
        axis.transport.reserve_slots(4 * _NUMELS[-1], _SLOTS)
        # A rank sends (r - 1) / r of n float32 elements.
        sizes = [(4.0 * (numel // size) * (size - 1), numel) for numel in _NUMELS]
        found = {
            f"{transport} reduce": [(sent, _together(world, partial(_reduce, axis, numel))) for sent, numel in sizes]
        }
        if transport == "sockets":
            found["sockets gather"] = [(sent, _together(world, partial(_gather, axis, numel))) for sent, numel in sizes]
            found["sockets message"] = [
                (4.0 * numel, _together(world, partial(_pass_on, mesh, numel))) for numel in _NUMELS
            ]
        return {name: curve_of(points) for name, points in found.items()}
    finally:
        mesh.axes["shard"].transport.close()
        mesh.peers.close()


def _reduce(axis: Axis, numel: int) -> None:
    out = torch.empty(numel // axis.size)
    slot = axis.transport.open_slot(numel, torch.float32, "a gradient")
    terms = axis.transport.reduce_scatter(slot, None, "a gradient")
    terms.arrived.wait()
    sum_in_rank_order(terms.read(), out, False)
    torch.isfinite(squares_by_block(out, BLOCK_NUMEL)).all()
    terms.summed()


def _gather(axis: Axis, numel: int) -> None:
    share = numel // axis.size
    full = torch.empty(axis.size * share)
    axis.transport.gather(full, full[axis.place * share :][:share], "parameters").wait()


def _pass_on(mesh: Mesh, numel: int) -> None:
    """Exchange messages between ranks 0 and 1, 2 and 3, and so on."""
    # With an odd number of ranks the last has no partner and only waits at the barriers.
    pair = mesh.axes["shard"].rank ^ 1
    if pair < mesh.axes["shard"].size:
        mesh.peers.exchange(torch.empty(numel), torch.empty(numel), pair, 0, "a message").wait()


def _together(world: World, call: Callable[[], None]) -> float:
    """Return seconds of a call that all ranks make at the same time."""
    return _least(call, world.barrier)


def _least(call: Callable[[], None], before: Callable[[], object] = lambda: None) -> float:
    call()
    times = []
    for _ in range(_ROUNDS):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OffloadError as error:
        raise SystemExit(str(error)) from error
