"""What can stand where on the command line, read from the parsers of all commands; for completion."""

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module

from .arguments import Parser

_FILES = re.compile(r"FILE|FOLDER|DIR|PATH|SCRIPT|CHECKPOINT|CONFIG")  # in the name of a value: it is one of these


@dataclass(frozen=True)
class Option:
    """names: ("-m", "--module"). takes_value: a word follows; one of `choices` if there are any; a file if is_file.

    is_repeatable: it may stand any number of times.
    """

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...] = ()
    is_file: bool = False
    is_repeatable: bool = False


@dataclass(frozen=True)
class Command:
    """path: ("schedule", "show"); () is `lowtide` itself. choices: of the first word that is no option.

    takes_files: words that are no options may be files. ends_options: what follows the first of them is not lowtide's.
    """

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...] = ()
    commands: tuple["Command", ...] = ()
    choices: tuple[str, ...] = ()
    takes_files: bool = False
    ends_options: bool = False

    @property
    def place(self) -> str:
        """`lowtide schedule show`"""
        return " ".join(("lowtide", *self.path))

    def every(self) -> Iterator["Command"]:
        """This one, and all below it."""
        yield self
        for command in self.commands:
            yield from command.every()

    def places_of_values(self) -> Iterator[str]:
        """`lowtide launch --nproc`: behind each of these follows a value."""
        for command in self.every():
            for option in command.options:
                if option.takes_value:
                    yield from (f"{command.place} {name}" for name in option.names)


def command_tree(commands: Mapping[str, str]) -> Command:
    """`lowtide` with its commands: name -> help. Imports all of them, and with them torch."""
    parts = []
    for name, line in commands.items():
        parser: Parser = import_module(f"lowtide.bin.{name}").parser()
        parts.append(_command((name,), line, parser))
    options = (Option(("-h", "--help"), "show the commands", False), Option(("--version",), "show the version", False))
    return Command((), "", options, tuple(parts))


def _command(path: tuple[str, ...], text: str, parser: argparse.ArgumentParser) -> Command:
    options: list[Option] = []
    words: list[argparse.Action] = []
    commands: list[Command] = []
    for action in parser._actions:  # argparse has no public list of them
        if isinstance(action, argparse._SubParsersAction):
            lines = {choice.dest: choice.help or "" for choice in action._choices_actions}
            commands += [_command((*path, name), lines.get(name, ""), part) for name, part in action.choices.items()]
        elif action.option_strings:
            options.append(_option(action))
        else:
            words.append(action)
    return Command(
        path,
        text,
        tuple(options),
        tuple(commands),
        choices=tuple(map(str, words[0].choices or ())) if words else (),
        takes_files=any(_is_file(word) for word in words),
        ends_options=any(word.nargs == argparse.REMAINDER for word in words),
    )


def _option(action: argparse.Action) -> Option:
    return Option(
        tuple(action.option_strings),
        (action.help or "") % {**vars(action), "prog": "lowtide"},
        takes_value=action.nargs != 0,
        choices=tuple(map(str, action.choices or ())),
        is_file=action.nargs != 0 and _is_file(action),
        is_repeatable=isinstance(action, argparse._AppendAction),
    )


def _is_file(action: argparse.Action) -> bool:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return bool(_FILES.search(metavar)) or action.nargs == argparse.REMAINDER
