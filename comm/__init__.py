"""How ranks talk: the only folder that names `torch.distributed`.

`World` is this process among all of them, an `Arrangement` gives the ranks places on named axes, a `Mesh` has these by
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
from .arrangement import Arrangement
from .axis import Axis, Numels, Pending, Terms, regions_of
from .errors import BODY, CollectiveError, Raised
from .exchange import EXCHANGE_SLOTS, Arriving, Exchange, exchange_slot_bytes
from .mesh import Mesh, route_for
from .peers import P2P
from .world import World

__all__ = [
    "BODY",
    "EXCHANGE_SLOTS",
    "P2P",
    "Activity",
    "Arrangement",
    "Arriving",
    "Axis",
    "CollectiveError",
    "Exchange",
    "Mesh",
    "Numels",
    "Pending",
    "Progress",
    "Raised",
    "Terms",
    "World",
    "exchange_slot_bytes",
    "regions_of",
    "route_for",
]
