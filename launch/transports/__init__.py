"""Start the agents of hosts, and connect to them."""

from collections.abc import Mapping, Sequence

from ..hosts.host import Allocation
from .join import JoinTransport, LocalTransport
from .link import AgentTransport
from .remote import SshTransport, StepTransport, mpirun_command, srun_command


def transport_for(
    allocation: Allocation,
    silence_seconds: float,
    environ: Mapping[str, str],
    needs_terminal: bool = True,
    ssh_port: int | None = None,
    ssh_options: Sequence[str] = (),
) -> AgentTransport:
    """Make a new transport for an attempt.

    silence_seconds: until an agent, or on its side the launcher, is lost. needs_terminal: see LocalTransport.
    """
    if allocation.transport == "ssh":
        return SshTransport(silence_seconds, ssh_port, ssh_options)
    if allocation.transport == "srun":
        return StepTransport(srun_command, silence_seconds)
    if allocation.transport == "mpirun":
        return StepTransport(mpirun_command, silence_seconds)
    if allocation.transport == "join":
        assert allocation.rendezvous is not None
        return JoinTransport(allocation.rendezvous, silence_seconds, environ, needs_terminal)
    return LocalTransport(needs_terminal=needs_terminal)
