"""How fast this machine moves bytes: in memory, to a disk, through the loopback, and between its GPUs. In bytes/second.

Each is the best of a few runs, because whatever else runs can only slow it down; together they take about a second.
"""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..offload import AioOptions, FileStore

_MEMORY_BYTES = 256 << 20
_DISK_BYTES = 256 << 20
_LOOPBACK_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
_DEVICE_BYTES = 256 << 20
_ROUNDS = 3


def memory_copy() -> float:
    """Copying float32 with all threads: bytes read + bytes written."""
    source = torch.ones(_MEMORY_BYTES // 4)
    target = torch.empty_like(source)
    target.copy_(source)  # takes the pages from the system
    return 2 * _MEMORY_BYTES / _best(lambda: target.copy_(source))


def loopback() -> float:
    """One TCP connection of this process with itself: about what gloo can reach between two ranks of a host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:

        def send() -> None:
            chunk = bytes(_CHUNK_BYTES)
            for _ in range(_LOOPBACK_BYTES // _CHUNK_BYTES):
                sender.sendall(chunk)

        def transfer() -> None:
            thread = threading.Thread(target=send)
            thread.start()
            buffer, left = bytearray(_CHUNK_BYTES), _LOOPBACK_BYTES
            while left:
                left -= receiver.recv_into(buffer, min(left, _CHUNK_BYTES))
            thread.join()

        return _LOOPBACK_BYTES / _best(transfer)


def disk(folder: Path) -> tuple[float, float, bool]:
    """Writing and reading as the offload to "nvme" does, and whether past the page cache. Raises OffloadError."""
    values = torch.randint(256, (_DISK_BYTES,), dtype=torch.uint8)
    store = FileStore(folder, 0, AioOptions())
    try:
        store.reserve([_DISK_BYTES])
        store.save("values", values).wait()
        write = _DISK_BYTES / _best(lambda: store.save("values", values).wait())
        read = _DISK_BYTES / _best(lambda: store.load("values", values).wait())
        return write, read, store.is_direct
    finally:
        store.close()


def gpu_copies() -> dict[str, float]:
    """From and to pinned host memory for the first GPU, and from it to each other one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {}
    kind = accelerator.type
    first = torch.empty(_DEVICE_BYTES, dtype=torch.uint8, device=f"{kind}:0")
    host = torch.empty(_DEVICE_BYTES, dtype=torch.uint8, pin_memory=True)
    found = {
        f"host to {kind}:0": _device_speed(first, host),
        f"{kind}:0 to host": _device_speed(host, first),
        f"{kind}:0 to {kind}:0": 2 * _device_speed(torch.empty_like(first), first),
    }
    for index in range(1, torch.accelerator.device_count()):
        other = torch.empty(_DEVICE_BYTES, dtype=torch.uint8, device=f"{kind}:{index}")
        found[f"{kind}:0 to {kind}:{index}{_way_to(kind, index)}"] = _device_speed(other, first)
    return found


def _way_to(kind: str, index: int) -> str:
    if kind != "cuda":  # others do not say
        return ""
    return " (peer to peer)" if torch.cuda.can_device_access_peer(0, index) else " (through the host)"


def _device_speed(target: torch.Tensor, source: torch.Tensor) -> float:
    devices = {tensor.device for tensor in (target, source) if tensor.device.type != "cpu"}

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)

    copy()
    return _DEVICE_BYTES / _best(copy)


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of _ROUNDS calls."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
