"""Programs that stand in for ssh, srun and mpirun, and really run what they are given; and agents that only talk."""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lowtide.launch.hosts.report import report_host
from lowtide.launch.transports.link import AgentTransport, Events, Link
from lowtide.launch.wire.channel import Channel
from lowtide.launch.wire.loop import Loop
from lowtide.launch.wire.messages import Hello, Message

# A host that is named "gone" cannot be reached. The remote shell talks before it runs the command.
SSH = """
import os, subprocess, sys
host, command = sys.argv[sys.argv.index("--") + 1 :]
if host == "gone":
    print("ssh: connect to host gone port 22: No route to host", file=sys.stderr)
    sys.exit(255)
print(f"Welcome to {host}", flush=True)
os.environ["FAKE_HOST"] = host
os.execvp("sh", ["sh", "-c", command])
"""

SRUN = """
import os, subprocess, sys
words = sys.argv[1:]
options = dict(word.lstrip("-").partition("=")[::2] for word in words if word.startswith("--") and "=" in word)
start = words.index(sys.executable)
hosts = options["nodelist"].split(",")
assert options["ntasks-per-node"] == "1" and int(options["nodes"]) == len(hosts)
tasks = []
for index, host in enumerate(hosts):
    environ = {**os.environ, "SLURMD_NODENAME": host, "SLURM_PROCID": str(index), "FAKE_HOST": host}
    tasks.append(subprocess.Popen(words[start:], env=environ))
sys.exit(max(task.wait() for task in tasks))
"""

MPIRUN = """
import os, subprocess, sys
if sys.argv[1:] == ["--version"]:
    print("mpirun (Open MPI) 5.0.3")
    sys.exit()
words = sys.argv[1:]
hosts = [entry.split(":")[0] for entry in words[words.index("--host") + 1].split(",")]
passed = {name: os.environ[name] for name in ("PATH", "HOME", words[words.index("-x") + 1])}  # nothing else travels
start = words.index(sys.executable)
tasks = []
for index, host in enumerate(hosts):
    environ = {**passed, "OMPI_COMM_WORLD_RANK": str(index), "LSB_HOSTNAME": host, "FAKE_HOST": host}
    tasks.append(subprocess.Popen(words[start:], env=environ))
sys.exit(max(task.wait() for task in tasks))
"""


def install(folder: Path, name: str, source: str) -> dict[str, str]:
    """Makes the program `name`; gives the variables with which it is found before any other of that name."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


class ScriptedTransport(AgentTransport):
    """A transport whose agents live in this process: what each answers is a function of the host and the message.

    answer: gives the agent's message, or None for silence; Beats are answered always.
    """

    advice = "This is the advice."

    def __init__(self, answer: Callable[[str, Message], Message | None]) -> None:
        self._answer = answer
        self._channels: list[Channel] = []

    def start(self, loop: Loop, hosts: Sequence[str], events: Events) -> None:
        """See Transport."""
        for index, host in enumerate(hosts):
            ours, theirs = (end.detach() for end in socket.socketpair())
            self._channels.append(self._agent(loop, host, theirs))
            events.linked(Link(index, ours, os.dup(ours), False, None))

    def why_lost(self, index: int) -> str:
        """See Transport."""
        return "this is what is known"

    def close(self) -> None:
        """See Transport."""
        for channel in self._channels:
            channel.close()

    def _agent(self, loop: Loop, host: str, fd: int) -> Channel:
        def received(message: Message) -> None:
            if (answer := self._answer(host, message)) is not None:
                channel.send(answer)

        channel = Channel(loop, fd, os.dup(fd), received, lambda reason: None, None, sends_beats=False)
        return channel


def hello(host: str) -> Hello:
    """That of an agent on the host `n1`, say, whose address is 10.0.0.1."""
    return Hello(None, (host,), 1, (f"10.0.0.{host[-1]}",), report_host({}, list_nvidia=lambda: None))
