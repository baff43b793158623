"""Transports that start agents on several hosts: "ssh" with a client for each, "srun" and "mpirun" with a single step.

ssh's stdin and stdout are the channel. The agents of a step connect to this process by TCP, without an MPI library.
"""

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from ..agent.agent import TOKEN_VARIABLE
from ..hosts.host import LaunchError
from ..hosts.reach import own_addresses
from ..wire.loop import Loop
from .link import END_SECONDS, AgentTransport, Client, Events, agent_command, module_command
from .listener import Listener

CONNECT_SECONDS = 10
_VERSION_SECONDS = 20.0
_POLL_SECONDS = 0.5


class StepTransport(AgentTransport):
    """Listens, runs `command(agent's command line, hosts)` once, and accepts the agents that it starts.

    Agents get a random token through the environment, passed on by the command, never by a command line.
    """

    advice = "The command that starts the agents must reach every host, and every host must reach this one by TCP."

    def __init__(self, command: Callable[[Sequence[str], Sequence[str]], list[str]], silence_seconds: float) -> None:
        self._token = secrets.token_hex(16)
        self._command = command
        self._silence_seconds = silence_seconds
        self._client: Client | None = None
        self._listener: Listener | None = None

    def start(self, loop: Loop, hosts: Sequence[str], peers: Events) -> None:
        """See Transport."""
        self._listener = Listener(loop, 0, self._token, peers, self._silence_seconds)
        own = own_addresses(os.environ) or ("127.0.0.1",)
        # Brackets separate an IPv6 address from the port. `_proved` in handshake.py strips them.
        where = ",".join(f"[{address}]:{self._listener.port}" for address in own)
        agent = agent_command("--connect", where, "--silence", f"{self._silence_seconds:g}")
        command = self._command(agent, hosts)
        environment = {**os.environ, TOKEN_VARIABLE: self._token}
        self._client = Client(loop, command[0], command, peers.talk, is_link=False, environment=environment)
        # The launcher has no handler for SIGCHLD, so it asks whether the command still runs.
        loop.after(_POLL_SECONDS, lambda: self._look(loop, peers))

    def admit_no_more(self) -> None:
        """See Transport."""
        if self._listener is not None:
            self._listener.close()

    def why_lost(self, index: int) -> str:
        """See Transport."""
        return "" if self._client is None or self._client.exit_status is None else self._client.epitaph()

    # No give_up: the step continues for the other hosts. No orphans_command: a second step might wait for the resources
    # of the first.

    def close(self) -> None:
        """See Transport."""
        self.admit_no_more()
        if self._client is not None:
            self._client.close()

    def _look(self, loop: Loop, peers: Events) -> None:
        if self._client is None or self._client.exit_status is None:
            loop.after(_POLL_SECONDS, lambda: self._look(loop, peers))
        else:
            peers.unreachable(None, self._client.epitaph())


class SshTransport(AgentTransport):
    """An OpenSSH client for each host, all at once. Its stdin and stdout are the channel.

    port: None: as in ssh's configuration. options: `Name=Value` for -o, or arguments like `-F FILE`.
    """

    advice = (
        "Try `ssh HOST true` by hand: it must work without a password (keys, known_hosts). The same Python, with "
        f"lowtide, must exist there: {sys.executable}. Leave hosts out with --exclude."
    )

    def __init__(self, silence_seconds: float, port: int | None = None, options: Sequence[str] = ()) -> None:
        self._silence_seconds = silence_seconds
        self._port, self._options = port, options
        self._hosts: Sequence[str] = ()
        self._clients: list[Client] = []

    def start(self, loop: Loop, hosts: Sequence[str], peers: Events) -> None:
        """See Transport."""
        self._hosts = hosts
        for index, host in enumerate(hosts):
            remote = agent_command("--stdio", "--index", str(index), "--silence", f"{self._silence_seconds:g}")
            client = Client(loop, host, self._with_path(host, remote), peers.talk, is_link=True)
            self._clients.append(client)
            peers.linked(client.link(index, self._silence_seconds))

    def why_lost(self, index: int) -> str:
        """See Transport."""
        return self._clients[index].epitaph()

    def give_up(self, index: int) -> None:
        """See Transport."""
        self._clients[index].kill()

    def orphans_command(self, index: int, identity: str) -> list[str]:
        """See Transport: a second ssh."""
        return self._with_path(self._hosts[index], module_command("agent.orphans", identity))

    def close(self) -> None:
        """See Transport."""
        deadline = time.monotonic() + END_SECONDS  # for all together, maybe hundreds
        for client in self._clients:
            client.close(max(0.0, deadline - time.monotonic()))

    def _with_path(self, host: str, remote: Sequence[str]) -> list[str]:
        """Pass PYTHONPATH on, because the module imports lowtide."""
        path = os.environ.get("PYTHONPATH")
        before = ["env", f"PYTHONPATH={path}"] if path else []
        return self.command(host, [*before, *remote])

    def command(self, host: str, remote: Sequence[str]) -> list[str]:
        """Return the client's command line. `remote` reaches the host word by word."""
        words = ["ssh"]
        for option in self._options:  # ssh takes the first value of a name, so the user's options come first
            words += shlex.split(option) if option.startswith("-") else ["-o", option]
        # -T: a terminal on the host would change bytes of the channel. BatchMode: nobody could answer a question.
        words += ["-T", "-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        words += [] if self._port is None else ["-p", str(self._port)]
        # ssh joins its words by spaces, and the shell of the host splits them again: hence the quotes of shlex.
        return [*words, "--", host, shlex.join(remote)]


def mpirun_command(agent: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Return mpirun's command: an agent a host, not bound to cores. Raises LaunchError without a known mpirun."""
    program = shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise LaunchError(
            "--transport mpirun needs mpirun or mpiexec on the PATH, found neither. Load the MPI module of your "
            "cluster, or use --transport ssh"
        )
    return [program, *_flags(_version(program), hosts), *agent]


def _version(program: str) -> str:
    try:
        # The loop is not running yet, so this may block: transports make their command in `start`.
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"`{program} --version` does not work: {error}") from error
    return done.stdout + done.stderr


def _flags(version: str, hosts: Sequence[str]) -> list[str]:
    """Return the flags of this mpirun.

    Sources: mpirun(1) of Open MPI 4 and 5; the Hydra manual of MPICH, which Intel MPI's mpiexec.hydra follows.
    """
    count = str(len(hosts))
    if "Open MPI" in version or "OpenRTE" in version:
        # Agents are not bound, since ranks inherit their cores: with a bound agent all ranks would share its core.
        places = ",".join(f"{host}:1" for host in hosts)
        return ["-np", count, "--host", places, "--map-by", "ppr:1:node", "--bind-to", "none", "-x", TOKEN_VARIABLE]
    if "HYDRA" in version or "Intel(R) MPI" in version:
        names = ",".join(hosts)
        return ["-n", count, "-ppn", "1", "-hosts", names, "-bind-to", "none", "-genvlist", TOKEN_VARIABLE]
    first = version.strip().splitlines()[0] if version.strip() else "nothing"
    raise LaunchError(
        f'expected the mpirun of Open MPI, MPICH (Hydra) or Intel MPI, found the version text "{first}". Use '
        "--transport ssh or srun"
    )


def srun_command(agent: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Return srun's command: a task for each node, with all of the job's resources there, even during other steps.

    Source: SLURM's srun manual; --overlap since 20.11. Without --exact a step has all cores of its nodes.
    """
    return [
        "srun",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(hosts)}",
        # Steps of the job that run already (or this process's step) would otherwise make this step wait for their end.
        "--overlap",
        "--export=ALL",
        "--input=none",
        "--cpu-bind=none",
        # A cluster may set 1 (KillOnBadExit). An agent that dies would then take the agents that must stop their ranks.
        "--kill-on-bad-exit=0",
        *agent,
    ]
