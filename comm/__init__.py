"""Collectives between ranks. This is the only folder that names `torch.distributed`.

`World` is this process and the default process group. A `ParallelDims` gives each rank coordinates on named axes, a
`Mesh` holds the axes by name. An `Axis` moves bytes between its ranks over the fastest transport of the machine; the
README has the table of transports. All transports except native sum in rank order, so the result does not depend on how
a tensor is sharded.
"""

from ..watch.progress import Activity as Activity, Progress as Progress
from .axis import Axis as Axis, Numels as Numels, Pending as Pending, Terms as Terms, regions_of as regions_of
from .collectives import (
    EXCHANGE_SLOTS as EXCHANGE_SLOTS,
    Collectives as Collectives,
    exchange_slot_bytes as exchange_slot_bytes,
)
from .errors import BODY as BODY, CollectiveError as CollectiveError, ErrorBroadcast as ErrorBroadcast
from .mesh import Mesh as Mesh, transport_for as transport_for
from .p2p import P2P as P2P
from .parallel_dims import ParallelDims as ParallelDims
from .world import World as World
