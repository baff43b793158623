"""Collectives between ranks. This is the only folder that names `torch.distributed`.

`World` is this process and the default process group. A `ParallelDims` gives each rank coordinates on named axes, a
`Mesh` holds the axes by name. An `Axis` moves bytes between its ranks over the fastest transport of the machine; the
README has the table of transports. All transports except native sum in rank order, so the result does not depend on how
a tensor is sharded.
"""

from ..watch.progress import Activity, Progress
from .axis import Axis, Numels, Pending, Terms, regions_of
from .collectives import EXCHANGE_SLOTS, Arriving, Collectives, exchange_slot_bytes
from .errors import BODY, CollectiveError, ErrorBroadcast
from .mesh import Mesh, transport_for
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
    "transport_for",
]
