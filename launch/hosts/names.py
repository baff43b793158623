"""Hosts in the user's own words: ranges of names, a hostfile, `--hosts`, and what `--include` and `--exclude` leave.

Many names in one word, and back: `node[01-03,07]`, `rack[0-1]n[1-2],login`, as SLURM and hostfiles do.
"""

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from .host import Host, LaunchError

MAX_HOSTS = 65536
# Nothing that a shell, an option parser or a URL would take for something else: a name stands on ssh's command line.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:@-]*[A-Za-z0-9_.])?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NUMBERED = re.compile(r"(\D*(?:\d+\D+)*)(\d+)(\D*)")
_KEYS = ("slots", "max_slots")
_SLOTS_HINT = 'write "node1 slots=8"'


def expand(text: str) -> list[str]:
    """The names of a list, in its order: `a[1-2],b` -> ["a1", "a2", "b"]. A width of `01` is kept.

    Raises LaunchError that quotes `text`; names that stand twice come twice.
    """
    return [name for item in split_outside_brackets(text, ",") for name in expand_one(item)]


def expand_one(item: str) -> list[str]:
    """The names of one word with any number of brackets; the last bracket counts fastest.

    Raises LaunchError where a bracket is not closed, a range is none, or a name cannot be one.
    """
    item = item.strip()
    parts = re.split(r"\[([^][]*)\]", item)
    if any("[" in fixed or "]" in fixed for fixed in parts[::2]):
        raise LaunchError(f'expected "node[01-03,07]", found "{item}": a bracket without its other half; close it')
    choices = [[part] if index % 2 == 0 else _numbers(part, item) for index, part in enumerate(parts)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MAX_HOSTS:
        raise LaunchError(f'"{item}" is {count} hosts; at most {MAX_HOSTS} are allowed; check the range')
    names = ["".join(choice) for choice in itertools.product(*choices)]
    for name in names:
        check_name(name)
    return names


def check_name(name: str) -> None:
    """Raises LaunchError where `name` cannot be that of a host: `name`, `name.domain`, `user@name` or an address."""
    if not _NAME.fullmatch(name):
        raise LaunchError(
            f'expected the name of a host, found "{name}": letters, digits, ".", "-" and "_" make one, with "user@" in '
            "front where ssh needs it"
        )


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """`text` cut at each `separator` that stands outside of [ and ]; empty pieces are left out."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == separator and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces if piece.strip()]


def parse_numbers(text: str) -> list[int]:
    """`0-2,5` -> [0, 1, 2, 5]. Raises LaunchError that quotes `text`."""
    return [int(number) for number in _numbers(text, text)]


def suggestion(name: str, names: Sequence[str]) -> str:
    """What to say to a name that is none of `names`: `did you mean "node2"?`, or what there is."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f'did you mean "{close[0]}"?'
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"there are {shown}"


def _numbers(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise LaunchError(f'expected numbers and ranges such as "0-3,7", found "{piece.strip()}" in "{whole}"')
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise LaunchError(f'the range "{piece.strip()}" in "{whole}" ends before it starts; swap its ends')
        if int(last) - int(first) >= MAX_HOSTS:
            raise LaunchError(f'the range "{piece.strip()}" in "{whole}" has more than {MAX_HOSTS} numbers; check it')
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def folded(names: Iterable[str]) -> str:
    """The names in their order, with neighbours that count up by one made into a range. A width of `01` is kept."""
    runs: list[tuple[str, str, list[str]]] = []  # what stands before and behind the last number, and the numbers
    for name in names:
        match = _NUMBERED.fullmatch(name)
        before, number, behind = match.groups() if match else (name, "", "")
        if runs and number and (before, behind) == runs[-1][:2] and number == _next(runs[-1][2][-1]):
            runs[-1][2].append(number)
        else:
            runs.append((before, behind, [number]))
    words: list[str] = []
    for before, behind, numbers in runs:
        span = numbers[0] if len(numbers) == 1 else f"[{numbers[0]}-{numbers[-1]}]"
        words.append(f"{before}{span}{behind}")
    return ",".join(words)


def _next(number: str) -> str:
    return str(int(number) + 1).zfill(len(number)) if number else ""


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file. Raises LaunchError, with the line where there is one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"cannot read the hostfile {path}: {reason}; check --hostfile") from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, where: str) -> tuple[Host, ...]:
    """The hosts of a hostfile's text; `where` names it in errors.

    A line is `NAME [slots=N] [max_slots=M]` or `NAME:N`; NAME may hold ranges, `node[01-04,07]`; `#` starts a comment.
    Without slots, a host has as many as accelerators. Sources: DeepSpeed's and Open MPI's `slots=`, MPICH's `NAME:N`.
    Raises LaunchError with `where`, the line's number, what was expected, and what to do.
    """
    hosts: list[Host] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0].strip()).split()
        if not words:
            continue
        try:
            for host in _hosts_of_line(words):
                if host.name in line_of:
                    raise LaunchError(
                        f'host "{host.name}" stands here and in line {line_of[host.name]}; '
                        f"write one line with the sum, such as {host.name} slots=8"
                    )
                line_of[host.name] = number
                hosts.append(host)
        except LaunchError as error:
            raise LaunchError(f"{where}, line {number}: {error}") from None
    if not hosts:
        raise LaunchError(f"{where} names no host; write one a line, such as node1 slots=8")
    return tuple(hosts)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of `--hosts a:8,node[1-3]:4,b`. Raises LaunchError that quotes it."""
    hosts: list[Host] = []
    try:
        for item in split_outside_brackets(text, ","):
            name, slots = _name_and_slots(item)
            hosts += [Host(each, slots) for each in expand_one(name)]
    except LaunchError as error:
        raise LaunchError(f"--hosts {text}: {error}") from None
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LaunchError(f'--hosts {text}: host "{twice[0]}" stands there twice; name it once, with all its slots')
    if not hosts:
        raise LaunchError('--hosts names no host; expected such as "node1:8,node2:8"')
    return tuple(hosts)


def select(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """What `--include` leaves of `hosts`, less what `--exclude` names, in the order of `hosts`.

    Both are `HOST[:SLOTS]@HOST[:SLOTS]...`, as with DeepSpeed: `node1@node2:0,2-3`; HOST may hold ranges. Slots stay in
    the order in which `--include` has them. Raises LaunchError for hosts and slots that are not there.
    """
    chosen = list(hosts)
    if include is not None:
        wanted = _parse_filter(include, "--include", hosts)
        chosen = [_included(host, wanted[host.name]) for host in chosen if host.name in wanted]
    if exclude is not None:
        unwanted = _parse_filter(exclude, "--exclude", hosts)
        kept = [_excluded(host, unwanted[host.name]) if host.name in unwanted else host for host in chosen]
        chosen = [host for host in kept if host is not None]
    if not chosen:
        flags = " and ".join(
            f"{name} {text}" for name, text in (("--include", include), ("--exclude", exclude)) if text
        )
        raise LaunchError(f"{flags} leaves no host; the hosts are {', '.join(host.name for host in hosts)}")
    return tuple(chosen)


def _hosts_of_line(words: list[str]) -> list[Host]:
    name, slots = _name_and_slots(words[0])
    found: dict[str, int] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_").lower()
        if not equals or key not in _KEYS:
            close = suggestion(key, _KEYS) if equals and key not in _KEYS else _SLOTS_HINT
            raise LaunchError(f'expected "slots=N" or "max_slots=M" after the host, found "{word}"; {close}')
        if key in found:
            raise LaunchError(f'"{key}" stands there twice; keep one')
        found[key] = _count(value, word)
    if slots is not None and "slots" in found:
        raise LaunchError(f'"{words[0]}" and "slots={found["slots"]}" both give slots; keep one')
    if "slots" in found:
        slots = tuple(range(found["slots"]))
    if "max_slots" in found:
        if slots is None:
            raise LaunchError(f'"max_slots" stands there without "slots"; {_SLOTS_HINT}')
        if len(slots) > found["max_slots"]:
            raise LaunchError(f"slots={len(slots)} is more than max_slots={found['max_slots']}; lower slots")
    return [Host(each, slots) for each in expand_one(name)]


def _name_and_slots(word: str) -> tuple[str, tuple[int, ...] | None]:
    """`node[1-2]:8` -> ("node[1-2]", slots 0 to 7); an IPv6 address is no name with slots."""
    pieces = split_outside_brackets(word, ":")
    if word.count(":") == 1 and len(pieces) == 2:
        return pieces[0], tuple(range(_count(pieces[1], word)))
    if word.endswith(":"):
        raise LaunchError(f'expected a number of slots after ":" in "{word}"; {_SLOTS_HINT}')
    return word, None


def _count(value: str, word: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise LaunchError(f'expected a number of slots of at least 1, found "{value}" in "{word}"; {_SLOTS_HINT}')
    return int(value)


def _parse_filter(text: str, flag: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...] | None]:
    """Host name -> its slots, None: all of them."""
    by_name = {host.name: host for host in hosts}
    by_name |= {host.name.partition("@")[2]: host for host in hosts if "@" in host.name}
    found: dict[str, tuple[int, ...] | None] = {}
    try:
        for item in split_outside_brackets(text, "@"):
            word, colon, numbers = item.partition(":") if "[" not in item else _cut_after_brackets(item)
            slots = tuple(parse_numbers(numbers)) if colon else None
            if slots is not None and len(set(slots)) < len(slots):
                raise LaunchError(f'"{item}" names a slot twice; name it once')
            for name in expand_one(word):
                check_name(name)
                if name not in by_name:
                    raise LaunchError(f'no host "{name}"; {suggestion(name, list(by_name))}')
                host = by_name[name]
                if host.name in found:
                    raise LaunchError(f'host "{name}" stands there twice; write all its slots in one place')
                missing = [slot for slot in slots or () if host.slots is not None and slot not in host.slots]
                if missing:
                    there = ", ".join(map(str, host.slots or ()))
                    raise LaunchError(f'host "{name}" has no slot {missing[0]}; its slots are {there}')
                found[host.name] = slots
    except LaunchError as error:
        raise LaunchError(f"{flag} {text}: {error}") from None
    if not found:
        raise LaunchError(f'{flag} names no host; expected such as "node1@node2:0,2"')
    return found


def _cut_after_brackets(item: str) -> tuple[str, str, str]:
    end = item.rfind("]") + 1
    tail, colon, numbers = item[end:].partition(":")
    return item[:end] + tail, colon, numbers


def _included(host: Host, slots: tuple[int, ...] | None) -> Host:
    return host if slots is None else replace(host, slots=slots)


def _excluded(host: Host, slots: tuple[int, ...] | None) -> Host | None:
    """`host` without `slots`; None where nothing is left."""
    if slots is None:
        return None
    if host.slots is None:
        return replace(host, excluded=tuple(sorted(set(host.excluded) | set(slots))))
    left = tuple(slot for slot in host.slots if slot not in slots)
    return replace(host, slots=left) if left else None
