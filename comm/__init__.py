"""How ranks talk: the only folder that names `torch.distributed`.

`World` is this process among all of them, an `ParallelDims` gives the ranks places on named axes, a `Mesh` has these by
name, and an `Axis` moves bytes between its ranks by the fastest route that the machine offers:

| route         | who                         | gather                        | reduce                                 |
|---------------|-----------------------------|-------------------------------|----------------------------------------|
| solo          | an axis of one rank         | nothing to do                 | nothing to do                          |
| shared memory | CPU ranks of one host       | one copy, read in place       | each rank sums its part of all slots   |
| sockets       | CPU ranks, any host (gloo)  | point-to-point, missing parts | point-to-point, summed in rank order   |
| native        | CUDA (nccl), other backends | the backend's own collective  | the backend's own collective           |

Every route but the native one sums in rank order, so that the result does not depend on how a tensor is split.
"""

from ..watch.progress import Activity, Progress
from .axis import Axis, Numels, Pending, Terms, regions_of
from .collectives import EXCHANGE_SLOTS, Arriving, Collectives, exchange_slot_bytes
from .errors import BODY, CollectiveError, ErrorBroadcast
from .mesh import Mesh, route_for
from .p2p import P2P
from .parallel_dims import ParallelDims
from .world import World

__all__ = [
    "BODY",
    "EXCHANGE_SLOTS",
    "P2P",
    "Activity",
    "Arriving",
    "Axis",
    "CollectiveError",
    "Collectives",
    "ErrorBroadcast",
    "Mesh",
    "Numels",
    "ParallelDims",
    "Pending",
    "Progress",
    "Terms",
    "World",
    "exchange_slot_bytes",
    "regions_of",
    "route_for",
]
