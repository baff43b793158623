"""What commands share: a parser with "did you mean" for what does not exist, short errors, widths, sizes, pictures."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from .main import COMMANDS

if TYPE_CHECKING:
    from rich.console import Console


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what was meant; `add_subparsers` gives parsers of the same kind."""

    removed: Mapping[str, str] = {}
    """Options that earlier versions had -> what to use instead."""
    _given: Sequence[str] = ()

    @classmethod
    def of(cls, command: str, examples: str) -> Self:
        """That of `lowtide COMMAND`, which `lowtide --help` says in a line."""
        line = COMMANDS[command]
        return cls(
            prog=f"lowtide {command}",
            description=f"{line[0].upper()}{line[1:]}.",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse has it, but unknown options and arguments are errors here, where the parser knows its own."""
        self._given = sys.argv[1:] if args is None else list(args)
        options, extra = super().parse_known_args(args, namespace)
        if extra:
            unknown = next((word for word in extra if _is_option(word)), None)
            self.error(f'expected nothing more, found "{extra[0]}"' if unknown is None else self._hint(unknown))
        return options, extra

    def error(self, message: str) -> NoReturn:
        """Prints the message and where help is, and exits with 2. What is missing is often there, with a slip in it."""
        if message.startswith("the following arguments are required"):
            message = self._slip_before("--") or message
        self.exit(2, f"{self.prog}: error: {message}\nsee `{self.prog} --help`\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            if not action.option_strings and (slip := self._slip_before(str(value))):
                raise argparse.ArgumentError(None, slip)  # the value is that of an option with a slip in it
            what = "/".join(action.option_strings) or action.metavar or action.dest
            hint = did_you_mean(str(value), list(map(str, action.choices)))
            raise argparse.ArgumentError(None, f'unknown {what} "{value}"; {hint}')

    def _slip_before(self, end: str) -> str:
        """What to say to the first unknown option before the word `end`; "" if there is none."""
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
        close = difflib.get_close_matches(name, options, n=1)
        return f'unknown option "{name}"' + (f'; did you mean "{close[0]}"?' if close else "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean "show"?`, or what there is."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f'did you mean "{close[0]}"?' if close else f"expected one of {', '.join(names)}"


def _is_option(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not word[1:].replace(".", "", 1).isdigit()


def console_of(width: int) -> "Console":
    """A terminal has its own width; a file or a pipe gets whole lines, up to `width`."""
    from rich.console import Console  # `lowtide launch` starts without it

    console = Console()
    return console if console.is_terminal else Console(width=width)


def three_figures(number: float, units: Sequence[str]) -> str:
    """713, 85.5M, 1.03 GB. units: of 1, of 1000 and so on."""
    power = max((power for power in range(len(units)) if number >= 1000**power), default=0)
    return f"{number / 1000**power:.3g}{units[power]}"


def size_of(nbytes: int) -> str:
    """Three figures and a unit: 12 bytes, 69.8 KB, 1.03 GB."""
    return three_figures(nbytes, (" bytes", " KB", " MB", " GB", " TB"))


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Any]:
    """Axes to draw on, of which a file is written at the end. width, height: inches, without what is beside the axes.

    Raises ValueError without matplotlib, which is not always there, and for a kind of file that it does not know;
    OSError where the file cannot be written.
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
        figure.savefig(path, dpi=110, bbox_inches="tight")  # as wide as a legend beside the axes needs
    finally:
        pyplot.close(figure)
