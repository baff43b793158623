"""`lowtide config`: check, explain, show and compare configs, and print the JSON schema."""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from ..engine.config.config import Config, ConfigError
from ..engine.config.errors import printable
from ..engine.config.explain import difference, explain
from ..engine.config.schema import schema_text
from .arguments import Parser, parse_count

_EXAMPLES = """examples:
  lowtide config check my.json --world-size 8
  lowtide config explain ds_config.json --given        explain the keys of a DeepSpeed config
  lowtide config explain zero3 --world-size 8
  lowtide config show zero3
  lowtide config diff old.json new.json
  lowtide config schema > schema.json
"""
_WIDTH, _INDENT = 120, "    "


def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0 if the config is valid, 1 if it has faults, which are printed to stderr."""
    arguments = parser().parse_args(argv)
    if arguments.action == "schema":
        print(schema_text(), end="")
        return 0
    if arguments.action == "explain":
        return _explain(arguments)
    if arguments.action == "diff":
        return _diff(arguments)
    try:
        config = Config.load(arguments.config if arguments.config is not None else {})
        if arguments.world_size is not None:
            config = config.resolve(arguments.world_size)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.action == "show":
        print(json.dumps(config.as_dict(), indent=2))
        return 0
    for note in config.notes:
        print(f"note: {note}")
    ranks = f" for {arguments.world_size} ranks" if arguments.world_size is not None else ""
    print(f"{printable(arguments.config)}: no faults{ranks}")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    try:
        found = explain(arguments.config, arguments.world_size)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    keys = [key for key in found.keys if not (arguments.given and key.is_silent)]
    if arguments.json:
        print(json.dumps([asdict(key) for key in keys], indent=2))
    else:
        for key in keys:
            print(key)
            if key.effect:
                print(textwrap.fill(key.effect, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT))
    if found.faults:
        print(ConfigError(found.faults, found.source), file=sys.stderr)
    return 1 if found.faults else 0


def _diff(arguments: argparse.Namespace) -> int:
    """Compare two configs. Return as `diff` does: 0 if they are equal, 1 if not, 2 if a config cannot be read."""
    try:
        found = difference(arguments.config, arguments.other, arguments.world_size)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    names = printable(arguments.config), printable(arguments.other)
    if not found:
        print(f"{names[0]} and {names[1]} ask for the same")
    for key in found:
        print(f"{key.path}: {key.sides[0]} -> {key.sides[1]}")
    return 1 if found else 0


def parser() -> Parser:
    """Return the command line of `lowtide config`."""
    result = Parser.of("config", _EXAMPLES)
    actions = result.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="report every fault and every note of a config")
    check.add_argument("config", metavar="FILE|NAME", help='a JSON file, or a preset, for example "zero3"')
    show = actions.add_parser("show", help="print a config as JSON with every default")
    show.add_argument("config", metavar="FILE|NAME", nargs="?", help="a file or a preset; the defaults if left out")
    explained = actions.add_parser("explain", help="explain each key: its effect, its value and the value's source")
    explained.add_argument("config", metavar="FILE|NAME", help="a JSON file (lowtide or DeepSpeed), or a preset")
    explained.add_argument("--given", action="store_true", help="only the keys in the file, and those with a remark")
    explained.add_argument("--json", action="store_true", help="print JSON")
    diff = actions.add_parser("diff", help="list the settings in which two configs differ, however they are written")
    diff.add_argument("config", metavar="FILE|NAME", help="a file or a preset")
    diff.add_argument("other", metavar="FILE|NAME", help="a file or a preset")
    for action in (check, show, explained, diff):
        ranks = "fill the batch sizes for N data-parallel ranks"
        action.add_argument("--world-size", metavar="N", type=parse_count, help=ranks)
    actions.add_parser("schema", help="print the JSON schema, for editors")
    return result
