"""Parse host names: ranges like `node[01-03,07]`, hostfiles, `--hosts`, `--include` and `--exclude`.

Ranges are written as in SLURM: `node[01-03,07]`, `rack[0-1]n[1-2],login`.
"""

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from .host import Host, LaunchError

MAX_HOSTS = 65536
# A name goes onto ssh's command line, so it must not look like an option, a URL or shell syntax.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:@-]*[A-Za-z0-9_.])?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NUMBERED = re.compile(r"(\D*(?:\d+\D+)*)(\d+)(\D*)")
_KEYS = ("slots", "max_slots")
_SLOTS_HINT = 'write "node1 slots=8"'


def expand(text: str) -> list[str]:
    """Return the names of a list in order: `a[1-2],b` -> ["a1", "a2", "b"]. Keeps the width of `01`, and duplicates.

    Raises LaunchError that quotes `text`.
    """
    return [name for item in split_outside_brackets(text, ",") for name in expand_one(item)]


def expand_one(item: str) -> list[str]:
    """Return the names of a word with any number of brackets. The last bracket varies fastest.

    Raises LaunchError for an unclosed bracket, an invalid range or an invalid name.
    """
    item = item.strip()
    parts = re.split(r"\[([^][]*)\]", item)
    if any("[" in fixed or "]" in fixed for fixed in parts[::2]):
        raise LaunchError(f'expected "node[01-03,07]", found "{item}" with an unmatched bracket: close it')
    choices = [[part] if index % 2 == 0 else _numbers(part, item) for index, part in enumerate(parts)]
    count = 1
    for choice in choices:
        count *= len(choice)
    # Before the product is made: several ranges in a word multiply.
    if count > MAX_HOSTS:
        raise LaunchError(f'"{item}" is {count} hosts, more than the limit of {MAX_HOSTS}: check the range')
    names = ["".join(choice) for choice in itertools.product(*choices)]
    for name in names:
        check_name(name)
    return names


def check_name(name: str) -> None:
    """Raise LaunchError if `name` is no valid host: `name`, `name.domain`, `user@name` or an address."""
    if not _NAME.fullmatch(name):
        raise LaunchError(
            f'expected a host name, found "{name}". Use letters, digits, ".", "-" and "_", after "user@" if ssh needs '
            "a user"
        )


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Split `text` at each `separator` outside of [ and ], without empty pieces."""
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == separator and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces if piece.strip()]


def parse_numbers(text: str) -> list[int]:
    """Return the numbers of `0-2,5`: [0, 1, 2, 5]. Raises LaunchError that quotes `text`."""
    return [int(number) for number in _numbers(text, text)]


def suggestion(name: str, names: Sequence[str]) -> str:
    """Return a hint for an unknown name: `did you mean "node2"?`, or `choose from` the known names."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f'did you mean "{close[0]}"?'
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"choose from {shown}"


def _numbers(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise LaunchError(f'expected numbers and ranges like "0-3,7", found "{piece.strip()}" in "{whole}"')
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise LaunchError(f'the range "{piece.strip()}" in "{whole}" ends before it starts: swap its ends')
        # Before the list is made: a range with a digit too many would fill the memory.
        if int(last) - int(first) >= MAX_HOSTS:
            raise LaunchError(f'the range "{piece.strip()}" in "{whole}" has more than {MAX_HOSTS} numbers: check it')
        # Width as in the first number: node[08-11] means node08 to node11.
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def folded(names: Iterable[str]) -> str:
    """Return the names in order, with consecutive numbers folded into ranges. Keeps the width of `01`."""
    runs: list[tuple[str, str, list[str]]] = []  # text before and after the last number, and the numbers
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
    """Read a hostfile. Raises LaunchError, with the line if known."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"cannot read the hostfile {path}: {reason}. Check --hostfile") from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, where: str) -> tuple[Host, ...]:
    """Parse the text of a hostfile. `where` names the file in errors.

    A line is `NAME [slots=N] [max_slots=M]` or `NAME:N`; NAME may have ranges, `node[01-04,07]`; `#` starts a comment.
    Without slots, a host has a slot for each accelerator. Sources: DeepSpeed's and Open MPI's `slots=`, MPICH's
    `NAME:N`. Raises LaunchError with `where` and the line's number.
    """
    hosts: list[Host] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        # `slots = 8` is the same as `slots=8`.
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0].strip()).split()
        if not words:
            continue
        try:
            for host in _hosts_of_line(words):
                if host.name in line_of:
                    raise LaunchError(
                        f'host "{host.name}" is also in line {line_of[host.name]}: write a single line with the sum of '
                        f"the slots, like {host.name} slots=8"
                    )
                line_of[host.name] = number
                hosts.append(host)
        except LaunchError as error:
            raise LaunchError(f"{where}, line {number}: {error}") from None
    if not hosts:
        raise LaunchError(f"{where} has no host: write a line for each, like node1 slots=8")
    return tuple(hosts)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse `--hosts a:8,node[1-3]:4,b`. Raises LaunchError that quotes it."""
    hosts: list[Host] = []
    try:
        for item in split_outside_brackets(text, ","):
            name, slots = _name_and_slots(item)
            hosts += [Host(host_name, slots) for host_name in expand_one(name)]
    except LaunchError as error:
        raise LaunchError(f"--hosts {text}: {error}") from None
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LaunchError(f'--hosts {text}: host "{twice[0]}" appears twice: name it once, with all its slots')
    if not hosts:
        raise LaunchError('--hosts has no host: expected a list like "node1:8,node2:8"')
    return tuple(hosts)


def select(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Return the hosts that `--include` selects, without those of `--exclude`, in the order of `hosts`.

    Both are `HOST[:SLOTS]@HOST[:SLOTS]...`, as in DeepSpeed: `node1@node2:0,2-3`; HOST may have ranges. Slots keep the
    order of `--include`. Raises LaunchError for unknown hosts and slots.
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
        raise LaunchError(f"{flags} leaves no host of {', '.join(host.name for host in hosts)}")
    return tuple(chosen)


def _hosts_of_line(words: list[str]) -> list[Host]:
    name, slots = _name_and_slots(words[0])
    found: dict[str, int] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_").lower()
        if not equals or key not in _KEYS:
            close = suggestion(key, _KEYS) if equals and key not in _KEYS else _SLOTS_HINT
            raise LaunchError(f'expected "slots=N" or "max_slots=M" after the host, found "{word}": {close}')
        if key in found:
            raise LaunchError(f'"{key}" appears twice: remove either')
        found[key] = _count(value, word)
    if slots is not None and "slots" in found:
        raise LaunchError(f'"{words[0]}" and "slots={found["slots"]}" both set slots: remove either')
    if "slots" in found:
        slots = tuple(range(found["slots"]))
    if "max_slots" in found:
        if slots is None:
            raise LaunchError(f'"max_slots" needs "slots": {_SLOTS_HINT}')
        if len(slots) > found["max_slots"]:
            raise LaunchError(f"slots={len(slots)} is more than max_slots={found['max_slots']}: lower slots")
    return [Host(host_name, slots) for host_name in expand_one(name)]


def _name_and_slots(word: str) -> tuple[str, tuple[int, ...] | None]:
    """Split `node[1-2]:8` into ("node[1-2]", slots 0 to 7). An IPv6 address has no slots."""
    pieces = split_outside_brackets(word, ":")
    # With more colons it is an IPv6 address. Its end looks like a number of slots.
    if word.count(":") == 1 and len(pieces) == 2:
        return pieces[0], tuple(range(_count(pieces[1], word)))
    if word.endswith(":"):
        raise LaunchError(f'expected a number of slots after ":" in "{word}": {_SLOTS_HINT}')
    return word, None


def _count(value: str, word: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise LaunchError(f'expected a number of slots of at least 1, found "{value}" in "{word}": {_SLOTS_HINT}')
    return int(value)


def _parse_filter(text: str, flag: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...] | None]:
    """Return host name -> slots; None: all."""
    by_name = {host.name: host for host in hosts}
    # The filter separates hosts by "@", so a filter has `node1` for `user@node1`.
    by_name |= {host.name.partition("@")[2]: host for host in hosts if "@" in host.name}
    found: dict[str, tuple[int, ...] | None] = {}
    try:
        for item in split_outside_brackets(text, "@"):
            word, colon, numbers = item.partition(":") if "[" not in item else _cut_after_brackets(item)
            slots = tuple(parse_numbers(numbers)) if colon else None
            if slots is not None and len(set(slots)) < len(slots):
                raise LaunchError(f'"{item}" has a slot twice: name it once')
            for name in expand_one(word):
                check_name(name)
                if name not in by_name:
                    raise LaunchError(f'no host "{name}": {suggestion(name, list(by_name))}')
                host = by_name[name]
                if host.name in found:
                    raise LaunchError(f'host "{name}" appears twice: write all its slots together')
                missing = [slot for slot in slots or () if host.slots is not None and slot not in host.slots]
                if missing:
                    there = ", ".join(map(str, host.slots or ()))
                    raise LaunchError(f'host "{name}" has no slot {missing[0]}. Its slots are {there}')
                found[host.name] = slots
    except LaunchError as error:
        raise LaunchError(f"{flag} {text}: {error}") from None
    if not found:
        raise LaunchError(f'{flag} has no host: expected a list like "node1@node2:0,2"')
    return found


def _cut_after_brackets(item: str) -> tuple[str, str, str]:
    end = item.rfind("]") + 1
    tail, colon, numbers = item[end:].partition(":")
    return item[:end] + tail, colon, numbers


def _included(host: Host, slots: tuple[int, ...] | None) -> Host:
    return host if slots is None else replace(host, slots=slots)


def _excluded(host: Host, slots: tuple[int, ...] | None) -> Host | None:
    """Return `host` without `slots`; None if none is left."""
    if slots is None:
        return None
    # The devices of the host are not known yet, so the exclusion is kept for the plan.
    if host.slots is None:
        return replace(host, excluded=tuple(sorted(set(host.excluded) | set(slots))))
    left = tuple(slot for slot in host.slots if slot not in slots)
    return replace(host, slots=left) if left else None
