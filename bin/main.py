"""`lowtide COMMAND ...`: finds the command and runs it. Imports nothing that the command does not need."""

import difflib
import os
import signal
import sys
from importlib import import_module

COMMANDS = {
    "launch": "run a script as the ranks of a job, on this machine or on many",
    "config": "check a config file, explain what every key of it means, compare two",
    "plan": "say beforehand what a training takes, and which config is the fastest that fits",
    "tune": "try the planner's best configs with your own script, and keep the fastest",
    "report": "say what a recorded step held, when, and who held it, beside what was predicted",
    "schedule": "draw a pipeline schedule, or rank all of them for given costs and memory",
    "export": "write the weights of a checkpoint as safetensors, in the model's own names",
    "checkpoint": "list checkpoints, show what is in one, verify that they are whole",
    "env": "say what this machine has, what works on it, and why the rest does not",
}
REMOVED = {  # what to do in its place
    "completion": "`lowtide COMMAND --help` lists the options of a command, and a slip in one is named",
    "ssh": "run a command on all hosts with ClusterShell, `clush -bw 'node[1-4]' COMMAND`, or pdsh; "
    "in a SLURM job with `srun --ntasks-per-node=1 COMMAND`",
}


def usage() -> str:
    """The text of `lowtide --help`."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
    return (
        "usage: lowtide [--help] [--version] COMMAND ...\n\n"
        "Memory-optimized training for PyTorch, from one JSON file.\n\n"
        f"commands:\n{commands}\n\n"
        "example:\n  lowtide launch --nproc 2 examples/train_gpt.py\n\n"
        "`lowtide COMMAND --help` explains one command."
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (default: that of this process); returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        import importlib.metadata  # slow, and no other command needs it

        print(f"lowtide {importlib.metadata.version('lowtide')}")
        return 0
    if name in REMOVED:
        print(f'lowtide: the command "{name}" was removed; {REMOVED[name]}', file=sys.stderr)
        return 2
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f'did you mean "{close[0]}"?' if close else f"the commands are {', '.join(COMMANDS)}"
        print(f'lowtide: unknown command "{name}"; {hint}', file=sys.stderr)
        return 2
    try:
        status: int = import_module(f"lowtide.bin.{name}").main(rest)
        sys.stdout.flush()
    except BrokenPipeError:  # `lowtide ... | head`: whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again at its end
        return 128 + signal.SIGPIPE
    return status
