"""`lowtide config`: check a config, show it with every default, print the JSON schema."""

import argparse
import json
import sys
from collections.abc import Sequence

from ..engine.config.config import Config, ConfigError
from ..engine.config.errors import printable
from ..engine.config.schema import schema_text
from .arguments import Parser

HELP = "check a config, show it with every default, print the JSON schema"


def main(argv: Sequence[str]) -> int:
    """Runs the command; 0 if the config is good, 1 if it has faults (they are printed to stderr)."""
    arguments = parser().parse_args(argv)
    if arguments.action == "schema":
        print(schema_text(), end="")
        return 0
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


def _world_size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of ranks, at least 1, found {text}")
    return int(text)


def parser() -> Parser:
    """The command line of `lowtide config`."""
    result = Parser(prog="lowtide config", description=HELP[0].upper() + HELP[1:] + ".")
    actions = result.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="report every fault and every note of a config")
    check.add_argument("config", metavar="FILE|NAME", help='a JSON file, or a preset such as "zero3"')
    show = actions.add_parser("show", help="print a config as JSON with every default")
    show.add_argument("config", metavar="FILE|NAME", nargs="?", help="a file or a preset; the defaults if left out")
    for action in (check, show):
        ranks = "fill the batch sizes for N data-parallel ranks"
        action.add_argument("--world-size", metavar="N", type=_world_size, help=ranks)
    actions.add_parser("schema", help="print the JSON schema, for editors")
    return result
