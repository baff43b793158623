"""Hosts in the user's own words: a hostfile, `--hosts`, and what `--include` and `--exclude` leave of them."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..hosts.host import Host, LaunchError
from ..hosts.names import check_name, expand_one, parse_numbers, split_outside_brackets, suggestion

_KEYS = ("slots", "max_slots")
_SLOTS_HINT = 'write "node1 slots=8"'


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
