"""Messages between launcher and agents: a JSON object a line, with `kind` and the fields of a dataclass below.

    launcher -> agent    Welcome, Hold, Reach, Check, Start, Signal, Stacks, Shown, Beat, Leave
    agent -> launcher    Hello, Held, Reached, Checked, Started, Output, Ended, Signal, ProgressReport, StackDump,
                         Note, Beat

On a TCP connection handshake.py comes first, and seals every line. Bytes that ranks print travel as latin-1 text.
"""

import dataclasses
import json
import reprlib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ...watch.progress import RankProgress
from ..hosts.facts import CheckRequest, CheckResult
from ..hosts.host import HostReport
from ..hosts.plan import HostPlan


def to_plain(value: Any) -> Any:
    """Convert to JSON's types: dataclasses and mappings to dictionaries, tuples to lists."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, value: Any) -> Any:
    """Convert the result of `to_plain` back to a dataclass, tuple, mapping, union or plain type.

    Unknown fields are ignored, so that messages of a newer lowtide can be read. Raises ValueError for illegal values.
    """
    if dataclasses.is_dataclass(kind):
        return _from_object(kind, value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _from_union(arguments, value)
    if origin is tuple:
        return _from_tuple(arguments, value)
    if origin is Literal:
        if value not in arguments:
            raise _unexpected(f"one of {arguments}", value)
        return value
    if origin is not None:
        _check_type(dict, value)
        return {_from_key(arguments[0], key): from_plain(arguments[1], item) for key, item in value.items()}
    # JSON has a single kind of number: a peer may write 1.0 as 1.
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _unexpected("float", value) from None
    _check_type(kind, value)
    return value


def _check_type(kind: type, value: Any) -> None:
    if type(value) is not kind:  # a bool is no int here
        raise _unexpected(kind.__name__, value)


def _unexpected(what: str, value: Any) -> ValueError:
    return ValueError(f"expected {what}, found {reprlib.repr(value)}")


def _from_object(kind: Any, value: Any) -> Any:
    _check_type(dict, value)
    hints = _hints(kind)
    known = {name: from_plain(hints[name], item) for name, item in value.items() if name in hints}
    try:
        return kind(**known)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from None


def _from_union(kinds: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) == 1:
        return from_plain(others[0], value)
    if type(value) not in others:
        raise _unexpected(f"one of {others}", value)
    return value


def _from_tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    _check_type(list, value)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(from_plain(kinds[0], item) for item in value)
    return tuple(from_plain(kind, item) for kind, item in zip(kinds, value, strict=True))


def _from_key(kind: Any, key: str) -> Any:
    """Convert back the key of a mapping. JSON's keys are text, also of a mapping from ranks."""
    return int(key) if kind is int else key


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


PLAIN_RANK = 0  # its output is shown at once, as it comes


class Message:
    """The base of all kinds below."""


@dataclass(frozen=True)
class Welcome(Message):
    """The launcher's first message. The answer is Hello.

    wants_addresses: whether any host must reach this host.
    """

    wants_addresses: bool = True


@dataclass(frozen=True)
class Hold(Message):
    """Hold `port` (None: a free port) for the ranks' store until Start. The answer is Held.

    is_local: whether all ranks are on this host.
    """

    port: int | None
    is_local: bool = False


@dataclass(frozen=True)
class Reach(Message):
    """Try which `addresses` can be reached at the held `port` of rank 0's host. The answer is Reached."""

    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class Check(Message):
    """Check the host. The answer is Checked."""

    request: CheckRequest


@dataclass(frozen=True)
class Start(Message):
    """Start the host's ranks. The answer is Started.

    identity: of the job, a UUID in the environment of each of its processes. environment: set for every rank, over the
    agent's; `defaults`: if unset. inherits_terminal: if nothing is logged, PLAIN_RANK has the agent's stdin, stdout and
    stderr. sends_output: whether the remaining ranks' output is wanted. appends_logs: to the logs of earlier attempts.
    """

    host: HostPlan
    identity: str
    command: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    defaults: dict[str, str] = field(default_factory=dict)
    inherits_terminal: bool = False
    sends_output: bool = True
    log_folder: str | None = None
    appends_logs: bool = False


@dataclass(frozen=True)
class Signal(Message):
    """Send the signal `number` to every running rank. SIGKILL goes to everything that the ranks left too.

    From an agent: it received the signal, for example from a resource manager. It is meant for the whole job.
    """

    number: int


@dataclass(frozen=True)
class Stacks(Message):
    """Ask these ranks for the Python stacks of all their threads. The answer is a StackDump for each."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Shown(Message):
    """This many bytes of Output were shown, so as many more may be sent. See [Note: backpressure] in agent.py."""

    nbytes: int


@dataclass(frozen=True)
class Beat(Message):
    """A sign of life. sent: the launcher's clock, which the agent's answer repeats. clock: the agent's, in an answer.

    Both are time.monotonic() of the host, in seconds.
    """

    sent: float
    clock: float | None = None


@dataclass(frozen=True)
class Leave(Message):
    """Kill all that is left, and end with the job's exit status."""

    status: int


@dataclass(frozen=True)
class Hello(Message):
    """The agent's first message.

    index: of its host in the job, if it was told; else `names` identify the host. pid: of the agent. addresses: of the
    host's interfaces, the address that the launcher used first if known; empty if none was wanted.
    """

    index: int | None
    names: tuple[str, ...]
    pid: int
    addresses: tuple[str, ...]
    report: HostReport


@dataclass(frozen=True)
class Held(Message):
    """The held port, or the error."""

    port: int
    error: str = ""


@dataclass(frozen=True)
class Reached(Message):
    """The addresses of Reach that answered, each with this host's interface towards it ("" if unknown)."""

    interfaces: dict[str, str]


@dataclass(frozen=True)
class Checked(Message):
    """The facts about the host."""

    results: tuple[CheckResult, ...]


@dataclass(frozen=True)
class Started(Message):
    """Process ids of the host's ranks, in the order of their local ranks.

    error: the reason for the user if the ranks cannot be started; then none is left.
    """

    pids: tuple[int, ...]
    error: str = ""


@dataclass(frozen=True)
class Output(Message):
    """Output of a rank: whole lines, or any bytes of the plain rank, in latin-1."""

    rank: int
    text: str


@dataclass(frozen=True)
class Ended(Message):
    """A rank is gone. status: as Popen.returncode. clock: when, by the agent's time.monotonic().

    last_lines: of its output, oldest first; None if it writes to the terminal itself.
    """

    rank: int
    status: int
    clock: float
    last_lines: tuple[str, ...] | None


@dataclass(frozen=True)
class ProgressReport(Message):
    """The progress of the host's ranks that report it."""

    ranks: tuple[RankProgress, ...]


@dataclass(frozen=True)
class StackDump(Message):
    """The Python stacks of a rank, as text."""

    rank: int
    text: str


@dataclass(frozen=True)
class Note(Message):
    """A line for the user: a problem on the host that does not end the job."""

    text: str


_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """Encode a message as a line without newline. Surrogates (in odd file names) travel unchanged."""
    plain = {"kind": type(message).__name__, **to_plain(message)}
    # JSON escapes newlines in text, so a line is a message.
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decode(line: bytes) -> Message:
    """Decode a line of `encode`. Raises ValueError for anything else."""
    try:
        plain = json.loads(line.decode("utf-8", "surrogatepass"))
    except RecursionError as error:
        raise ValueError("lists nested too deeply") from error
    kind = plain.get("kind") if isinstance(plain, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"expected a message of the launcher's protocol, found {line[:80]!r}")
    message: Message = from_plain(_KINDS[plain.pop("kind")], plain)
    return message
