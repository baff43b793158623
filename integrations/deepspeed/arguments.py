"""`add_config_arguments`: the command line of scripts."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config, which `initialize(args=...)` reads, and returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "the engine, and its config")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script itself; the engine ignores it")
    group.add_argument("--deepspeed_config", type=str, default=None, help="the JSON config file")
    group.add_argument("--deepscale", action="store_true", help="the old name of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, help="the old name of --deepspeed_config")
    return parser
