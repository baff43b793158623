"""What launcher and agents say to each other: one JSON object a line, `kind` and the fields of a dataclass below.

    launcher -> agent    Welcome, Hold, Reach, Check, Start, Signal, Kill, Stacks, Shown, Beat, Leave
    agent -> launcher    Hello, Held, Reached, Checked, Started, Refused, Output, Ended, Stopped, Progress, StackDump,
                         Note, Beat

On a TCP connection handshake.py comes before, and seals every line.

Bytes that ranks print travel as text in which each byte is the character of its number (latin-1).
"""

import dataclasses
import json
import reprlib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ...watch.progress import RankProgress
from ..hosts.facts import CheckRequest, CheckResult
from ..hosts.host import HostReport
from ..hosts.plan import HostPlan


def to_plain(value: Any) -> Any:
    """`value` as JSON has it: dataclasses and mappings become objects, tuples and lists become lists."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, value: Any) -> Any:
    """The `kind` that `to_plain` made `value` of; a dataclass, tuple, mapping, union or plain type.

    Fields that `kind` does not have are left out, so that a newer lowtide can be understood as far as it is the same.
    Raises ValueError where `value` is something else.
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
    """Keys of objects are text."""
    return int(key) if kind is int else key


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@dataclass(frozen=True)
class Job:
    """What all hosts of a job are told. identity: a UUID that stands in the environment of each of its processes.

    environment: set for every rank; over that of the agent. plain_rank: the rank whose output is shown as it comes;
    where `inherits_terminal` it has the agent's own stdin, stdout and stderr (where nothing is logged). sends_output:
    whether the other ranks' output is wanted. appends_logs: to those of the attempts before this one.
    """

    identity: str
    command: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    plain_rank: int = 0
    inherits_terminal: bool = False
    sends_output: bool = True
    log_folder: str | None = None
    appends_logs: bool = False


@dataclass(frozen=True)
class Welcome:
    """The first message of a launcher; the answer is Hello.

    wants_addresses: false where no other host is to reach this one.
    """

    wants_addresses: bool = True


@dataclass(frozen=True)
class Hold:
    """Take `port` (None: a free one) for the ranks' store and keep it until Start; the answer is Held.

    is_local: no other host has ranks.
    """

    port: int | None
    is_local: bool = False


@dataclass(frozen=True)
class Reach:
    """Try which of `addresses` can be reached at the held `port` of rank 0's host; the answer is Reached."""

    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class Check:
    """Look at the host; the answer is Checked."""

    request: CheckRequest


@dataclass(frozen=True)
class Start:
    """Start the host's ranks; the answer is Started or Refused. environment: set for each; defaults: where not set."""

    host: HostPlan
    job: Job
    environment: dict[str, str]
    defaults: dict[str, str]


@dataclass(frozen=True)
class Signal:
    """Send the signal `number` to every rank that runs."""

    number: int


@dataclass(frozen=True)
class Kill:
    """SIGKILL to everything that the ranks have left; Ended follows for each rank that still ran."""


@dataclass(frozen=True)
class Stacks:
    """Ask these ranks for the Python stacks of all their threads; a StackDump each."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Shown:
    """So many bytes of Output have been shown: as many more may be sent. See [Note: backpressure] in agent.py."""

    nbytes: int


@dataclass(frozen=True)
class Beat:
    """A sign of life. sent: the launcher's clock, which the agent's answer repeats; clock: the agent's, in an answer.

    Both in seconds of time.monotonic() of the host.
    """

    sent: float
    clock: float | None = None


@dataclass(frozen=True)
class Leave:
    """Kill what is left, and end with the exit status of the job."""

    status: int


@dataclass(frozen=True)
class Hello:
    """The first message of an agent.

    index: of its host among those of the job, where it was told; else names: those that the host may be known by.
    pid: of the agent. addresses: those of the host's interfaces, and first the one at which the launcher has reached it
    where that is known; none where none was wanted.
    """

    index: int | None
    names: tuple[str, ...]
    pid: int
    addresses: tuple[str, ...]
    report: HostReport


@dataclass(frozen=True)
class Held:
    """The port that is held, or why not."""

    port: int
    error: str = ""


@dataclass(frozen=True)
class Reached:
    """The addresses of Reach that answered, each with the interface of this host that leads there ("" if unknown)."""

    interfaces: dict[str, str]


@dataclass(frozen=True)
class Checked:
    """What the host has found out about itself."""

    results: tuple[CheckResult, ...]


@dataclass(frozen=True)
class Started:
    """Process ids of the host's ranks, in the order of their local ranks."""

    pids: tuple[int, ...]


@dataclass(frozen=True)
class RanksRefused:
    """The ranks cannot be started; none is left. text: why, for the user."""

    text: str


@dataclass(frozen=True)
class Output:
    """What a rank printed: whole lines, or for the plain rank any bytes, in latin-1."""

    rank: int
    text: str


@dataclass(frozen=True)
class Ended:
    """A rank is gone. status: as Popen.returncode has it; clock: when, by the agent's time.monotonic().

    last_lines: of its output, oldest first; None where the output was not read (it has the terminal).
    """

    rank: int
    status: int
    clock: float
    last_lines: tuple[str, ...] | None


@dataclass(frozen=True)
class Stopped:
    """The agent has received the signal `number`, from a resource manager, say: the whole job is meant."""

    number: int


@dataclass(frozen=True)
class ProgressReport:
    """What the ranks of the host that say so are doing."""

    ranks: tuple[RankProgress, ...]


@dataclass(frozen=True)
class StackDump:
    """The Python stacks of a rank, as text."""

    rank: int
    text: str


@dataclass(frozen=True)
class Note:
    """A line for the user: something on the host is not as it should be, and the job goes on."""

    text: str


Message = (
    Welcome
    | Hold
    | Reach
    | Check
    | Start
    | Signal
    | Kill
    | Stacks
    | Shown
    | Beat
    | Leave
    | Hello
    | Held
    | Reached
    | Checked
    | Started
    | RanksRefused
    | Output
    | Ended
    | Stopped
    | ProgressReport
    | StackDump
    | Note
)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """One line without its end. Text that is no Unicode (surrogates of odd file names) travels unchanged too."""
    plain = {"kind": type(message).__name__, **to_plain(message)}
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decode(line: bytes) -> Message:
    """The message that `encode` made `line` of. Raises ValueError where it is none."""
    try:
        plain = json.loads(line.decode("utf-8", "surrogatepass"))
    except RecursionError as error:
        raise ValueError("lists in lists without end") from error
    kind = plain.get("kind") if isinstance(plain, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"expected a message of the launcher's protocol, found {line[:80]!r}")
    message: Message = from_plain(_KINDS[plain.pop("kind")], plain)
    return message
