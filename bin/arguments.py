"""Helpers of all commands: a parser with "did you mean", types of arguments, sizes as text, pictures."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Self, TypeVar

from .main import COMMANDS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column

T = TypeVar("T")
P = ParamSpec("P")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are short and suggest the closest option. Subparsers have the same class."""

    removed: Mapping[str, str] = {}
    """Option of an earlier version -> its replacement, for the error."""
    elsewhere: Mapping[str, str] = {}
    """Option of another program, with "-" for "_" -> ours, for the error."""
    _given: Sequence[str] = ()

    def add_subparsers(self, **kwargs: Any) -> Any:
        """Add actions as argparse does. Their help ends with the examples of the command."""
        made = partial(type(self), epilog=self.epilog, formatter_class=self.formatter_class)
        return super().add_subparsers(**{"parser_class": made, **kwargs})

    @classmethod
    def of(cls, command: str, examples: str) -> Self:
        """Make the parser of `lowtide COMMAND`, described by its line in COMMANDS. examples: text after the options."""
        line = COMMANDS[command]
        return cls(
            prog=f"lowtide {command}",
            description=f"{line[0].upper()}{line[1:]}.",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but fail on unknown options here, where this parser's options are known."""
        # Kept for `error`: argparse names the missing argument, not the misspelled option that swallowed it.
        self._given = sys.argv[1:] if args is None else list(args)
        options, extra = super().parse_known_args(args, namespace)
        if extra:
            unknown = next((word for word in extra if _is_option(word)), None)
            self.error(f'expected nothing more, found "{extra[0]}"' if unknown is None else self._hint(unknown))
        return options, extra

    def error(self, message: str) -> NoReturn:
        """Print the error and where help is, and exit with 2."""
        if message.startswith("the following arguments are required"):  # often the argument is given, misspelled
            message = self._slip_before("--") or message
        if message.endswith("expected one argument"):  # argparse takes a value such as "--quiet-ranks" for an option
            message += '; if its value begins with "-", write OPTION="-VALUE"'
        self.exit(2, f"{self.prog}: error: {message}\nsee `{self.prog} --help`\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            if not action.option_strings and (slip := self._slip_before(str(value))):
                raise argparse.ArgumentError(None, slip)  # `value` belongs to a misspelled option before it
            what = "/".join(action.option_strings) or action.metavar or action.dest
            hint = did_you_mean(str(value), list(map(str, action.choices)))
            raise argparse.ArgumentError(None, f'unknown {what} "{value}"; {hint}')

    def _slip_before(self, end: str) -> str:
        """Return the error for the first unknown option before the word `end`; "" if all are known."""
        words = self._given[: self._given.index(end)] if end in self._given else self._given
        return next((self._hint(word) for word in words if self._is_unknown(word)), "")

    def _is_unknown(self, word: str) -> bool:
        name = word.partition("=")[0]
        if not _is_option(word) or (word[1] != "-" and word[:2] in self._option_string_actions):
            return False
        return not any(option == name or option.startswith(name) for option in self._option_string_actions)

    def _hint(self, word: str) -> str:
        name = word.partition("=")[0]
        if name in self.removed:
            return f"{name} was removed; {self.removed[name]}"
        options = [option for option in self._option_string_actions if option.startswith("--")]
        ours = self.elsewhere.get(name.replace("_", "-"))
        close = difflib.get_close_matches(name, options, n=1) if ours is None else [ours]
        return f'unknown option "{name}"' + (f'; did you mean "{close[0]}"?' if close else "")


def reports(command: str, *errors: type[Exception]) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorate a function that returns an exit status: print errors of these classes to stderr, and return 1."""

    def decorate(run: Callable[P, int]) -> Callable[P, int]:
        @wraps(run)
        def reporting(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return run(*args, **kwargs)
            except errors as error:
                text = re.sub(r"\[Errno \d+\] ", "", str(error))  # the text behind it says the same
                if isinstance(error, (FileExistsError, NotADirectoryError)) and error.filename:  # of `mkdir`
                    where = "" if isinstance(error, FileExistsError) else " in its path"
                    text = f"{error.filename}: expected a folder, or a new name, found a file{where}"
                print(f"lowtide {command}: {text}", file=sys.stderr)
                return 1

        return reporting

    return decorate


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `did you mean "show"?`, or the list of known words if none is close."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f'did you mean "{close[0]}"?' if close else f"expected one of {', '.join(names)}"


def _is_option(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not word[1:].replace(".", "", 1).isdigit()


def console_of(width: int) -> "Console":
    """Return a console of the terminal's width. Files and pipes get whole lines of up to `width`."""
    from rich.console import Console  # slow to import, and `lowtide launch` does not need it

    console = Console()
    return console if console.is_terminal else Console(width=width)


def numbers(*names: str) -> "list[Column]":
    """Return columns of a table whose cells are numbers: they end at the same place."""
    from rich.table import Column

    return [Column(name, justify="right") for name in names]


def three_figures(number: float, units: Sequence[str]) -> str:
    """Return three figures and a unit: 713, 85.5M, 1.03 GB.

    units: for 1, 1000, 1000**2 and so on.
    """
    power = max((power for power in range(len(units)) if abs(number) >= 1000**power), default=0)
    return f"{number / 1000**power:.3g}{units[power]}"


def size_of(nbytes: int) -> str:
    """Return a size with three figures and a unit: 12 bytes, 69.8 KB, 1.03 GB."""
    return three_figures(nbytes, (" bytes", " KB", " MB", " GB", " TB"))


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Let argparse print the text of the ValueError that `parse` raises, instead of a text of its own."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def parse_count(text: str) -> int:
    """Parse a whole number of at least 1, as argparse's `type`."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'expected a whole number of at least 1, found "{text}"')
    return int(text)


def output_file(text: str) -> Path:
    """Parse the name of a file to write, as argparse's `type`: a wrong name is an error before the work."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f'expected a file in an existing folder, found "{text}"; make its folder first'
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f'expected the name of a file, found the folder "{text}"')
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f'expected a file that you may write, found "{text}"')
    return path


def picture_file(text: str) -> Path:
    """Parse the name of a picture to write, as argparse's `type`: nothing else can fail after the work."""
    path = output_file(text)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError as error:
        why = f'a picture needs matplotlib: pip install "lowtide[examples]" ({error})'
        raise argparse.ArgumentTypeError(why) from error
    # To a name without an ending matplotlib would add ".png", and the command would print the name without it.
    if path.suffix[1:].lower() not in (known := FigureCanvasBase.get_supported_filetypes()):
        raise argparse.ArgumentTypeError(f'expected a name that ends with one of .{", .".join(known)}, found "{text}"')
    return path


def parse_size(text: str) -> float:
    """Parse "80GB", "1.5GiB", "330GB/s" or "450e12", as argparse's `type`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f'expected a size, for example 80GB, 1.5GiB or 450e12, found "{text}"')
    base = 1024.0 if match[3] else 1000.0
    return float(match[1]) * base ** "\0KMGTP".index(match[2].upper() or "\0")


_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:e\+?\d{1,2})?)\s*([KMGTP]?)(i?)B?(?:/s)?", re.IGNORECASE)


def parse_counts(text: str) -> list[int]:
    """Parse "1,4,16", as argparse's `type`."""
    return [parse_count(part.strip()) for part in text.split(",")]


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yield axes to draw on, and write them to a file at the end.

    width, height: inches of the axes; labels and legend come in addition. Raises ValueError without matplotlib (an
    optional dependency) and for an unknown file type, OSError if the file cannot be written.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError(f'{path}: a picture needs matplotlib: pip install "lowtide[examples]" ({error})') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height))
    try:
        yield axes
        figure.savefig(path, dpi=110, bbox_inches="tight")  # makes room for a legend beside the axes
    finally:
        pyplot.close(figure)
