"""`torch.pretend`: what torch, and programs, ask of the module of a device."""

from __future__ import annotations

import ctypes
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NUM_DEVICES = 8  # as device.cpp has it

_initialized = True  # torch asks for it by this name
default_generators = [torch.ops.pretend.default_generator(index) for index in range(NUM_DEVICES)]


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return torch.accelerator.current_device_index() if index is None else index


class device:
    """Makes a device the current one for a while."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def is_bf16_supported() -> bool:
    return True


def device_count() -> int:
    return len(default_generators)


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def _generator(device: Any) -> torch.Generator:
    return default_generators[_index(device)]


def get_rng_state(device: Any = None) -> Tensor:
    """While a graph is captured, a name of the state that there is at this point of each replay."""
    generator = _generator(device)
    if not is_current_stream_capturing():
        return generator.get_state()
    name = torch.tensor([next(_TOKENS)], dtype=torch.int64).view(torch.uint8)
    record(lambda: _STATES.__setitem__(bytes(name.numpy()), generator.get_state()))
    return name


def set_rng_state(state: Tensor, device: Any = None) -> None:
    generator = _generator(device)
    if not is_current_stream_capturing():
        generator.set_state(state)
        return
    name = bytes(state.numpy())
    if len(name) != 8:
        raise RuntimeError("a graph is captured: expected a state of the generator from the same capture")
    record(lambda: generator.set_state(_STATES[name]))


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: Iterable[Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _generator(None).initial_seed()


# -- graphs, as torch.cuda has them -----------------------------------------------------------------------------------


def is_current_stream_capturing() -> bool:
    return bool(torch.ops.pretend.is_capturing())


def graph_pool_handle() -> tuple[int, int]:
    return 0, torch.ops.pretend.new_pool()


Stream = torch.Stream


class CUDAGraph:
    """What streams are given between `capture_begin` and `capture_end`, run by each `replay`; see graphs.h.

    Capture runs nothing. What CUDA forbids meanwhile is a RuntimeError: waits of the host, copies of its memory, an end
    before other streams have joined. So are a capture in a pool whose graphs were all reset, as torch 2.11 has it, and
    a replay after a reset of another graph of the stream, with which torch 2.13 frees their workspace of cuBLAS.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self._number = 0
        self._pool = (0, 0)
        self._stream: torch.Stream | None = None
        self._has_workspace = True

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        self._pool = pool or graph_pool_handle()
        if _POOLS.get(self._pool, 1) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: all graphs of this pool were reset")
        _POOLS[self._pool] = _POOLS.get(self._pool, 0) + 1
        self._stream = torch.accelerator.current_stream()
        _CAPTURED.add(self)
        self._number = torch.ops.pretend.capture_begin(self._pool[1])

    def capture_end(self) -> None:
        torch.ops.pretend.capture_end()

    def replay(self) -> None:
        if not self._has_workspace:
            raise RuntimeError("the workspace of this graph's stream was freed with another graph")
        torch.ops.pretend.replay(self._number)
        if _ERRORS:
            raise _ERRORS.pop()

    def reset(self) -> None:
        torch.ops.pretend.capture_drop(self._number)
        _POOLS[self._pool] -= 1
        for one in _CAPTURED:
            one._has_workspace &= one._stream != self._stream

    def pool(self) -> tuple[int, int]:
        return self._pool


class graph:
    """Captures what the block gives to a stream that all captures share."""

    default_capture_stream: torch.Stream | None = None

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: tuple[int, int] | None = None,
        stream: torch.Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph, self._pool, self._mode = cuda_graph, pool, capture_error_mode
        if graph.default_capture_stream is None:
            graph.default_capture_stream = torch.Stream("pretend")
        self._stream: torch.Stream = stream or graph.default_capture_stream

    def __enter__(self) -> None:
        synchronize()
        gc.collect()
        self._outer = torch.accelerator.current_stream()
        self._stream.__enter__()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, *error: Any) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._outer.wait_stream(self._stream)  # the order of what was recorded; after an error nothing of it runs
        if error[0] is None:  # torch's too does not leave the stream after an error: the capture does not end then
            self._stream.__exit__(*error)


def record(run: Callable[[], object]) -> None:
    """Has `run` called at this point of each replay of the graph that is captured."""
    token = next(_TOKENS)
    _CALLS[token] = run
    torch.ops.pretend.record_call(token)


def _call(token: int) -> None:
    try:
        _CALLS[token]()
    except BaseException as error:  # it has no way through the device; `replay` raises it
        _ERRORS.append(error)


_POOLS: dict[tuple[int, int], int] = {}  # graphs that were not reset
_CAPTURED: weakref.WeakSet[CUDAGraph] = weakref.WeakSet()
_CALLS: dict[int, Callable[[], object]] = {}
_STATES: dict[bytes, Tensor] = {}
_ERRORS: list[BaseException] = []
_TOKENS = itertools.count()
ON_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64)(_call)
