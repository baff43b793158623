"""The device "pretend": what a GPU would find in this code, found without one.

`load()` registers it, in a process that has run no backward yet; such are the ranks of the fixture `pretend_ranks`.
Then `torch.accelerator` is this device, with

- memory that only its own kernels may touch: the host, and what was freed, end in SIGSEGV with a Python stack;
- streams whose copies are made as late as is allowed, so that a wait of the host that is missing gives wrong values;
- clocks of those streams: where one uses what another one writes, and has not waited for it, that is an error;
- a count of its bytes: `torch.accelerator.memory_allocated`, `max_memory_allocated`;
- a record of all that the host waits for: `host_waits`;
- graphs, by the names that CUDA has for them: `torch.pretend.CUDAGraph`, `torch.pretend.graph`.

`device.cpp`, and the headers that it has, are how.
"""

import ctypes
import functools
import hashlib
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import backend_registration

from lowtide.kernels import cpu_build
from lowtide.kernels.cpu_build import load_library

NAME = "pretend"
BUILD_SECONDS = 900
_SOURCE = Path(__file__).with_name("device.cpp")
_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
_TASK = ctypes.CFUNCTYPE(None, ctypes.c_int64)


@dataclass(frozen=True)
class HostWait:
    """The host waited for the device: why, and where, the innermost call last."""

    why: str
    stack: traceback.StackSummary
    thread: str  # its name

    def __str__(self) -> str:
        return f"{self.why}\n{''.join(self.stack.format())}"


def load() -> None:
    """Builds the device where it is not kept already, and makes it known to torch. Raises BuildError.

    torch's headers take 25 s of an idle core to read, and much longer beside other tests: a build has BUILD_SECONDS.
    """
    _library()


@functools.cache
def _library() -> ctypes.CDLL:
    root = Path(torch.__file__).parent
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{root / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"]
    version = f"-DTORCH_BUILD={torch.__version__.translate(str.maketrans('.+-', '___'))}"
    source = hashlib.sha256("".join(file.read_text() for file in sorted(_SOURCE.parent.glob("*.h"))).encode())
    headers = f"-DHEADERS_{source.hexdigest()}"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    with patch.object(cpu_build, "_TIMEOUT_SECONDS", BUILD_SECONDS):
        library = load_library(_SOURCE, ("-O1", "-w", version, headers, abi, *includes, *libraries))
    library.pretend_issue.argtypes = [ctypes.c_int, ctypes.c_int64, _TASK, ctypes.c_int64]
    library.pretend_on_wait.argtypes = [_HOOK]
    library.pretend_on_call.argtypes = [_TASK]
    library.pretend_opened.restype = ctypes.c_uint64
    library.pretend_reuse.argtypes = [ctypes.c_int]
    from tests.pretend import torch_pretend  # it asks the library

    library.pretend_on_wait(_ON_WAIT)
    library.pretend_on_call(torch_pretend.ON_CALL)
    torch.ops.pretend.take_kernels_of_cpu()
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, torch_pretend)
    backend_registration.generate_methods_for_privateuse1_backend()
    return library


@contextmanager
def host_waits(raises: bool = False) -> Iterator[list[HostWait]]:
    """The list that takes every wait of the host from now on. raises: a wait is a RuntimeError, as in CUDA's mode."""
    watcher = _Watcher([], raises)
    _WATCHERS.append(watcher)
    try:
        yield watcher.waits
    finally:
        _WATCHERS.remove(watcher)


@contextmanager
def reused_addresses() -> Iterator[None]:
    """Memory that is taken meanwhile may have the addresses of what was freed, as torch's caching allocator has it."""
    _library().pretend_reuse(1)
    try:
        yield
    finally:
        _library().pretend_reuse(0)


@dataclass(eq=False)
class _Watcher:
    waits: list[HostWait]
    raises: bool


_WATCHERS: list[_Watcher] = []


def _note(why: bytes) -> int:
    if _WATCHERS:
        stack = traceback.StackSummary.extract(traceback.walk_stack(sys._getframe(1)), lookup_lines=False)
        stack.reverse()
        for watcher in _WATCHERS:
            watcher.waits.append(HostWait(why.decode(), stack, threading.current_thread().name))
    return int(any(watcher.raises for watcher in _WATCHERS))


_ON_WAIT = _HOOK(_note)


def opened() -> set[int]:
    """The devices that threads have made current since the last call, each of which has a context then on CUDA."""
    bits = _library().pretend_opened()
    return {index for index in range(bits.bit_length()) if bits >> index & 1}


def open_for_host(tensor: Tensor) -> Tensor:
    """The tensor's memory as a tensor of the CPU, for as long as that is there: how a pretended kernel gets at it."""
    return torch.ops.pretend.open(tensor)


def issue(run: Callable[[], object], stream: torch.Stream | None = None) -> None:
    """Gives a task to the stream, by default the current one. It is run as late as is allowed, by who waits for it."""
    stream = torch.accelerator.current_stream() if stream is None else stream
    token = next(_TOKENS)
    _TASKS[token] = run
    _library().pretend_issue(stream.device_index, stream.stream_id, _RUN, token)


def settle() -> None:
    """What the current stream was given is done; the host has not waited for it, and knows nothing of it."""
    _library().pretend_settle()


_TASKS: dict[int, Callable[[], object]] = {}
_TOKENS = itertools.count()
_RUN = _TASK(lambda token: _TASKS.pop(token)() and None)
