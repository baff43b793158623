"""The transport of an allocation."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..hosts.host import Allocation
from .join import JoinTransport
from .link import Transport
from .local import LocalTransport
from .mpirun import mpirun_command
from .srun import srun_command
from .ssh import SshOptions, SshTransport
from .step import StepTransport


@dataclass(frozen=True)
class TransportOptions:
    """silence_seconds: after which an agent, or for it the launcher, is lost. needs_terminal: see LocalTransport."""

    ssh: SshOptions
    silence_seconds: float
    needs_terminal: bool = True


def transport_for(allocation: Allocation, options: TransportOptions, environ: Mapping[str, str]) -> Transport:
    """A fresh one, for one attempt."""
    if allocation.transport == "ssh":
        return SshTransport(options.ssh, options.silence_seconds)
    if allocation.transport == "srun":
        return StepTransport(srun_command, options.silence_seconds)
    if allocation.transport == "mpirun":
        return StepTransport(mpirun_command, options.silence_seconds)
    if allocation.transport == "join":
        assert allocation.meeting is not None
        return JoinTransport(allocation.meeting, options.silence_seconds, environ, options.needs_terminal)
    return LocalTransport(needs_terminal=options.needs_terminal)
