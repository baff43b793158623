"""Many host names in one word, and back: `node[01-03,07]`, `rack[0-1]n[1-2],login`, as SLURM and hostfiles do."""

import difflib
import itertools
import re
from collections.abc import Iterable, Sequence

from .host import LaunchError

MAX_HOSTS = 65536
# Nothing that a shell, an option parser or a URL would take for something else: a name stands on ssh's command line.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:@-]*[A-Za-z0-9_.])?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NUMBERED = re.compile(r"(\D*(?:\d+\D+)*)(\d+)(\D*)")


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
