"""`lowtide COMMAND ...`: find the command and run it. Nothing is imported that the command does not need."""

import difflib
import os
import signal
import sys
from importlib import import_module

COMMANDS = {
    "launch": "run a script as the ranks of a job, on this machine or on many",
    "config": "check a config file, explain its keys, or compare two configs",
    "plan": "predict memory and time of a training, and find the fastest config that fits",
    "tune": "run the planner's best configs with your script, and keep the fastest",
    "report": "show the memory of a recorded step by owner, beside the prediction",
    "schedule": "draw a pipeline schedule, or rank all schedules by time and memory",
    "export": "write the weights of a checkpoint as safetensors",
    "checkpoint": "list, inspect, verify or import checkpoints",
    "env": "report this machine's hardware and software, and which features work on it",
}
REMOVED = {  # command of an earlier version -> its replacement
    "completion": "`lowtide COMMAND --help` lists the options of a command, and errors correct misspelled options",
    "ssh": "run a command on all hosts with ClusterShell, `clush -bw 'node[1-4]' COMMAND`, or pdsh; "
    "in a SLURM job with `srun --ntasks-per-node=1 COMMAND`",
}


def usage() -> str:
    """Return the text of `lowtide --help`."""
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
    """Run the command line `argv` (default: this process's arguments) and return the exit status."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `lowtide ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes again at exit, and fails
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # a plan or a measurement takes a minute; its stack says nothing to the user
        return 128 + signal.SIGINT


def _run(arguments: list[str]) -> int:
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
    status: int = import_module(f"lowtide.bin.{name}").main(rest)
    return status
