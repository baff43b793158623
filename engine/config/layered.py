"""What `layered_gradient_accumulation` does not go together with."""

from .errors import Fault
from .parallel import ParallelConfig
from .sections import TorchAutocastConfig, ZeroConfig

KEY = "zero_optimization.layered_gradient_accumulation"


def layered_faults(zero: ZeroConfig, parallel: ParallelConfig, autocast: TorchAutocastConfig) -> list[Fault]:
    """What needs the microbatches one after the other, or has an order of its own."""
    if not zero.layered_gradient_accumulation:
        return []
    reasons = []
    if parallel.pipeline > 1:
        why = "a pipeline has schedules of its own, in which several microbatches pass a stage while it is gathered"
        reasons.append(f"needs parallel.pipeline 1, found {parallel.pipeline}: {why}")
    for name in ("sequence", "expert"):
        degree = getattr(parallel, name)
        if degree > 1:
            why = "what its ranks exchange belongs to one microbatch at a time"
            reasons.append(f"needs parallel.{name} 1, found {degree}: {why}")
    if autocast.enabled:
        why = "blocks are called for one microbatch after the other, outside of one forward; set bf16.enabled instead"
        reasons.append(f"needs torch_autocast.enabled false, found true: {why}")
    return [Fault(KEY, "conflict", reason) for reason in reasons]
