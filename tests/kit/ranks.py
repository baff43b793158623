"""A pool of worker processes that act as the ranks of a job, forked once per pytest session from one that has torch.

    def sum_of_ranks(start: int) -> float:                     # module level, so that workers can import it
        total = torch.tensor(float(start + dist.get_rank()))
        dist.all_reduce(total)
        return total.item()

    def test_sum(ranks):
        assert ranks(2, sum_of_ranks, 10) == [21.0, 21.0]

Values travel by plain pickle over a pipe. A worker is used again as long as it answers; when one hangs or dies, all
are killed and the next call starts new ones.
"""

import contextlib
import gc
import importlib
import inspect
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

MAX_RANKS = 8
START_TIMEOUT = 120.0  # seconds until a new worker is ready; the first waits for torch
GRACE = 5.0  # seconds that the other ranks get to finish after one has failed
MAX_SLOWNESS = 6.0
GARBAGE = 10_000, 20, 20  # how seldom it is looked for: as Python has it, that is a sixteenth of the suite's time
POLL = 0.1  # seconds between two looks at whether a worker is still alive
SHOWN_LINES = 30  # lines of a dead worker's own output in the error
WORKER_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
    # torch's store asks for the name of each address that connects, and serves nobody meanwhile: where an answer is
    # lost, for one second, and not for five.
    "RES_OPTIONS": "timeout:1 attempts:3",
}
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["torch.distributed", "torch._dynamo", "lowtide.engine.build", "tests.kit.ranks"]
PRELOADED_WITH = {  # a package that one of the tests uses -> modules that take seconds
    "transformers": "transformers.models.llama.modeling_llama",
    "lowtide.huggingface": "lowtide.huggingface",
    "tests.integrations.lightning.modules": "lightning.pytorch",
    "tests.integrations.huggingface.test_trl": "trl.trainer.sft_trainer",
    "ray": "ray.train.torch",
}


class RankError(Exception):
    """One rank failed: `rank`, `kind` (class name of its exception, or "Hang", "Died") and `text` (traceback or stack).

    `str()` of the error that `ranks(...)` raises shows every rank that failed, first the one that failed first.
    """

    def __init__(self, rank: int, kind: str, text: str, others: Sequence["RankError"] = ()) -> None:
        self.rank, self.kind, self.text, self.others = rank, kind, text, tuple(others)
        super().__init__("\n\n".join([f"rank {rank}: {kind}\n{text}", *(str(other) for other in others)]))


@dataclass
class Worker:
    """One process of the pool, the pipe to it, and the file that takes its output."""

    process: ForkServerProcess
    pipe: Connection
    output: Path
    stacks: Path

    @property
    def pid(self) -> int:
        """That of the process, which has been started."""
        assert self.process.pid is not None
        return self.process.pid

    def output_since(self, offset: int) -> str:
        """What the worker has printed after byte `offset` of its output file."""
        with self.output.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")

    def python_stack(self) -> str:
        """The stacks of all Python threads of the worker now, innermost call first."""
        start = self.stacks.stat().st_size
        os.kill(self.pid, signal.SIGUSR1)
        size = start
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = self.stacks.stat().st_size
            if now > start and now == size:
                return self.stacks.read_text()[start:]
            size = now
        return "(the process does not answer SIGUSR1, so there is no stack: stopped, or deep in the kernel)"

    def kill(self) -> None:
        """Ends the worker and every process of its session; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()  # one that has just been forked has no session of its own yet
        self.process.join()
        self.pipe.close()


class RankPool:
    """Runs functions on up to MAX_RANKS worker processes: `pool(world_size, fn, *args)`.

    prepare: a module whose `load()` each of them calls before anything else.
    """

    def __init__(self, prepare: str = "") -> None:
        self._prepare = prepare
        self._workers: list[Worker] = []
        self._folder = Path(tempfile.mkdtemp(prefix="lowtide-ranks-"))
        self._started = 0

    def __call__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """The return values of `fn(*args, **kwargs)` by rank; raises RankError if any rank fails.

        `fn` must be importable by name. Each rank has torchrun's environment variables and, if `process_group`, a
        fresh default gloo group. `timeout` in seconds is for the whole call.
        """
        results, order = self._run(world_size, fn, args, kwargs, timeout, process_group)
        if order:
            first, *others = [results[rank] for rank in order]
            raise RankError(first.rank, first.kind, first.text, others)
        return results

    def fails(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """As the call itself, but a rank that failed gives its RankError in the list, and nothing is raised."""
        return self._run(world_size, fn, args, kwargs, timeout, process_group)[0]

    def close(self) -> None:
        """Ends all workers and removes their files."""
        self._kill_all()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        process_group: bool,
    ) -> tuple[list[Any], list[int]]:
        """The values or RankErrors by rank, and the ranks that failed in the order of their failing."""
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size must be from 1 to {MAX_RANKS}, found {world_size}")
        if "<" in fn.__qualname__ or fn.__module__ == "__main__":
            raise TypeError(f"{fn.__module__}.{fn.__qualname__} cannot be imported by workers; use a module's function")
        payload = pickle.dumps((args, kwargs))
        self._grow(world_size)
        workers = self._workers[:world_size]
        self._place(workers)
        call = Call(workers, timeout)
        reusable = False
        try:
            with reserved_port() as port:
                for rank, worker in enumerate(workers):
                    header = fn.__module__, fn.__qualname__, environment(rank, world_size, port), process_group
                    worker.pipe.send_bytes(pickle.dumps(header))
                    worker.pipe.send_bytes(payload)
                call.collect()
            call.print_output()
            reusable = call.release()
        finally:
            if not reusable:
                self._kill_all()
        return call.results, call.failed

    def _grow(self, world_size: int) -> None:
        """Starts workers until there are `world_size` and all are ready; replaces a pool with a dead worker."""
        if any(worker.process.exitcode is not None for worker in self._workers):
            self._kill_all()
        old = len(self._workers)
        while len(self._workers) < world_size:
            self._workers.append(self._start_worker())
        for worker in self._workers[old:]:
            try:
                if not worker.pipe.poll(START_TIMEOUT):
                    raise EOFError
                worker.pipe.recv_bytes()
            except EOFError:
                said = worker.output_since(0)
                self._kill_all()
                raise RuntimeError(f"a worker did not start in {START_TIMEOUT:.0f} s; its output:\n{said}") from None

    def _place(self, workers: Sequence[Worker]) -> None:
        """More ranks than cores take turns in any case. On one core that takes a fifth less of it: none wakes another.

        Pools of tests that run side by side draw cores of their own.
        """
        cores = os.sched_getaffinity(0)
        chosen = cores if len(workers) <= len(cores) else {random.SystemRandom().choice(sorted(cores))}
        for worker in workers:
            os.sched_setaffinity(worker.pid, chosen)

    def _start_worker(self) -> Worker:
        ours, theirs = Pipe()
        output = self._folder / f"worker{self._started}.out"
        stacks = self._folder / f"worker{self._started}.stacks"
        stacks.touch()
        self._started += 1
        output.touch()
        variables = {**os.environ, **WORKER_VARIABLES}
        FORKS.set_forkserver_preload(["tests.uncollected", *preloaded()])
        with mock.patch.dict(os.environ, WORKER_VARIABLES):  # the first start is that of the process that is forked
            process = FORKS.Process(target=serve, args=(theirs, output, stacks, variables, self._prepare))
            process.start()
        theirs.close()
        return Worker(process, ours, output, stacks)

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


class Call:
    """One call in flight: `results` by rank, `failed` ranks in the order of their failing."""

    def __init__(self, workers: list[Worker], timeout: float) -> None:
        self.results: list[Any] = [None] * len(workers)
        self.failed: list[int] = []
        self._workers = workers
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._offsets = [worker.output.stat().st_size for worker in workers]
        self._running = set(range(len(workers)))
        self._leaving: set[int] = set()
        self._lost = False

    def collect(self) -> None:
        """Waits until every rank has returned, failed, died, or run out of time.

        A rank that has returned keeps its process group until all have, so that nobody loses a peer. A rank that
        fails gives it up at once, so that those who wait for it fail too and do not hang.
        """
        self._hear_until_deadline()
        if self._running and not self.failed:  # a machine on which others compute too is slow, and not a hang
            self._deadline += (slowness() - 1) * self._timeout
            self._hear_until_deadline()
        for rank in sorted(self._running):
            self._lost = True
            why = "after another rank failed" if self.failed else f"after {self._timeout:g} s"
            stack = self._workers[rank].python_stack()
            self._fail(rank, "Hang", f"still running {why}; its Python stack:\n{stack}", 0.0)

    def _hear_until_deadline(self) -> None:
        while self._running and time.monotonic() < self._deadline:
            self._hear(POLL)

    def print_output(self) -> None:
        """Prints what the ranks have printed, each line with its rank in front; pytest shows it for a failing test."""
        for rank, worker in enumerate(self._workers):
            for line in worker.output_since(self._offsets[rank]).splitlines():
                print(f"[rank {rank}] {line}")

    def release(self) -> bool:
        """Lets every rank drop its process group; whether all did, and can be used again."""
        deadline = time.monotonic() + GRACE
        if not self._lost:
            for rank in set(range(len(self._workers))) - set(self.failed):
                self._tell_to_leave(rank)
        while self._leaving and not self._lost and time.monotonic() < deadline:
            self._hear(POLL)
        return not self._leaving and not self._lost

    def _tell_to_leave(self, rank: int) -> None:
        self._leaving.add(rank)
        with contextlib.suppress(BrokenPipeError):
            self._workers[rank].pipe.send_bytes(b"leave")

    def _hear(self, seconds: float) -> None:
        """Takes one message from every rank that has one, and looks whether silent ones are still alive."""
        busy = {self._workers[rank].pipe: rank for rank in self._running | self._leaving}
        ready = wait(list(busy), seconds)
        for pipe, rank in busy.items():
            if pipe in ready:
                try:
                    self._take(rank, *pickle.loads(pipe.recv_bytes()))
                except (EOFError, ConnectionResetError):
                    self._bury(rank)
            elif self._workers[rank].process.exitcode is not None and not pipe.poll():
                self._bury(rank)

    def _take(self, rank: int, what: str, *content: Any) -> None:
        if what == "returned":
            self._running.discard(rank)
            self.results[rank] = pickle.loads(content[0])
        elif what == "raised":
            self._fail(rank, content[0], content[1], GRACE)
            self._tell_to_leave(rank)
        else:
            self._leaving.discard(rank)

    def _fail(self, rank: int, kind: str, text: str, patience: float) -> None:
        """Notes that `rank` failed; the others get `patience` seconds more, of an idle machine."""
        self._running.discard(rank)
        self.results[rank] = RankError(rank, kind, text)
        self.failed.append(rank)
        self._deadline = min(self._deadline, time.monotonic() + slowness() * patience)

    def _bury(self, rank: int) -> None:
        worker = self._workers[rank]
        worker.process.join()
        code = worker.process.exitcode or 0
        self._lost = True
        self._leaving.discard(rank)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        output = "\n".join(worker.output_since(self._offsets[rank]).splitlines()[-SHOWN_LINES:])
        self._fail(rank, "Died", f"the process {how}; the last lines of its output:\n{output}", 1.0)
        self.failed.insert(0, self.failed.pop())  # others may have missed it, and failed, before it was found dead


def preloaded() -> list[str]:
    """What ranks would import otherwise, each for itself."""
    return PRELOADED + [module for package, module in PRELOADED_WITH.items() if package in sys.modules]


def fork_ranks_from_here() -> None:
    """Ranks are forked from this process as it is now, and not from a new one that imports anew what this one has.

    To be called where nothing has been computed yet, and nothing was asked of an accelerator: that no fork survives.
    """
    for module in preloaded():
        importlib.import_module(module)
    gc.freeze()
    sys.stdout.flush()
    FORKS.set_forkserver_preload([])
    with mock.patch.object(sys, "warnoptions", ["ignore:resource_tracker"]):  # killed ranks leave their semaphores
        resource_tracker.ensure_running()
    with mock.patch.dict(os.environ, WORKER_VARIABLES), mock.patch("multiprocessing.util.spawnv_passfds", run_in_fork):
        forkserver.ensure_running()


def run_in_fork(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """What a new Python would do with `-c SOURCE`, the last of its arguments. Returns the process's number."""
    if pid := os.fork():
        return pid
    logging.getLogger().handlers.clear()  # pytest's
    try:
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *descriptors}:
            with contextlib.suppress(OSError):  # that of the list itself
                kind = os.fstat(descriptor).st_mode
                if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):  # who has the other end waits until all are closed
                    os.close(descriptor)
        exec(arguments[-1], {})
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def on_ranks(
    num_ranks: int | str, timeout: float = 60, pool: str = "ranks", process_group: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test whose body runs on so many ranks, each with the parameters and fixtures of the test, which are pickled.

    num_ranks: the number, or the name of the parameter that has it. pool: the fixture that has the ranks.
    """

    def made(law: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            size, run = given[num_ranks] if isinstance(num_ranks, str) else num_ranks, given[pool]
            run(size, law, *map(given.get, signature.parameters), timeout=timeout, process_group=process_group)

        signature = inspect.signature(law)
        first = inspect.Parameter(pool, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=RankPool)
        test.__name__, test.__doc__, test.__module__ = law.__name__, law.__doc__, law.__module__
        of_test = signature.replace(parameters=[first, *signature.parameters.values()])
        vars(test).update(vars(law), law=law, __signature__=of_test)
        law.__qualname__ = f"{law.__name__}.law"  # by which workers find it
        return test

    return made


def on_device(num_ranks: int | str = 1, timeout: float = 60) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `on_ranks`, on ranks whose accelerator is the pretended one, and which have no process group yet."""
    return on_ranks(num_ranks, timeout, "pretend_ranks", process_group=False)


def in_a_new_process(fn: Callable[..., Any], *args: Any, timeout: float = 60) -> Any:
    """What `fn` returns in a process that has run nothing before; its modules are there already."""
    with contextlib.closing(RankPool()) as pool:
        return pool(1, fn, *args, timeout=timeout, process_group=False)[0]


def slowness() -> float:
    """How much longer than on an idle machine something takes now, from 1 to MAX_SLOWNESS: as work for 20 ms does."""
    started, end = time.monotonic(), time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    waiting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return min(MAX_SLOWNESS, max(1.0, waiting, (time.monotonic() - started) / 0.02))


def seed_present_devices_alone() -> None:
    """For each kind of device that is not there, `torch.manual_seed` writes down the stack from which it is called."""
    import torch

    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            vars(kind)["manual_seed_all"] = lambda seed: None


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of this host that nobody listens on, and that nobody else gets who asks for any port meanwhile.

    A socket that is bound and does not listen keeps it. One with SO_REUSEADDR, as stores and servers have it, may
    listen there.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with reserved_port() as port:
        return port


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for `rank` of `world_size` on one host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def serve(pipe: Connection, output: Path, stacks: Path, variables: dict[str, str], prepare: str) -> None:
    """The life of a worker: takes calls from `pipe` until it closes; SIGUSR1 writes to `stacks`.

    variables: its environment. prepare: as RankPool has it.
    """
    import ctypes
    import faulthandler

    import torch

    gc.freeze()
    gc.enable()
    gc.set_threshold(*GARBAGE)
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the test session
    with open(os.devnull) as nothing, output.open("w") as said:
        for stream, descriptor in ((nothing, 0), (said, 1), (said, 2)):
            os.dup2(stream.fileno(), descriptor)
    for said_text in (sys.stdout, sys.stderr):
        said_text.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(variables)
    faulthandler.enable()
    stack_file = open(stacks, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    seed_present_devices_alone()
    if prepare:
        importlib.import_module(prepare).load()
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            module, name, variables, process_group = pickle.loads(pipe.recv_bytes())
            payload = pipe.recv_bytes()
        except EOFError:
            return
        before = dict(os.environ), os.getcwd()
        os.environ.update(variables)
        faulthandler.unregister(signal.SIGUSR1)  # a trainer of others may have put its own handler in the place of ours
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        pipe.send_bytes(pickle.dumps(attempt(module, name, payload, process_group)))
        with contextlib.suppress(EOFError):
            pipe.recv_bytes()
        clean(*before)
        pipe.send_bytes(pickle.dumps(("left",)))


def attempt(module: str, name: str, payload: bytes, process_group: bool) -> tuple[Any, ...]:
    """("returned", pickled value) or ("raised", class name, traceback) of the function `module.name`."""
    import numpy
    import torch
    import torch.distributed as dist

    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "invalid escape sequence")  # as in pyproject.toml
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    try:
        fn: Any = importlib.import_module(module)
        for part in name.split("."):
            fn = getattr(fn, part)
        args, kwargs = pickle.loads(payload)
        gc.freeze()
        if process_group:
            dist.init_process_group("gloo")
        return "returned", pickle.dumps(fn(*args, **kwargs))
    except BaseException as error:
        return "raised", type(error).__name__, traceback.format_exc()


def clean(environ: dict[str, str], folder: str) -> None:
    """Undoes what a call may have left in this process: group, garbage, variables, folder, torch's global settings."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect(), gc.collect()  # an engine has cycles; with a loss scale, some go through nodes of the graph
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
