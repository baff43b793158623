"""What goes between ranks in fewer bytes than it has: which settings that goes with."""

from ...optimizers import OPTIMIZERS
from .errors import Fault, shown
from .optimizer import OptimizerConfig
from .parallel import ParallelConfig
from .sections import BF16Config, CommunicationConfig, ZeroConfig


def compression_faults(
    optimizer: OptimizerConfig | None,
    communication: CommunicationConfig,
    zero: ZeroConfig,
    parallel: ParallelConfig,
    bf16: BF16Config,
) -> list[Fault]:
    """What an optimizer that sends signs, or PowerSGD, cannot be beside."""
    rank, bits = communication.power_sgd.rank, communication.gradient_bits
    sends_signs = optimizer is not None and OPTIMIZERS[optimizer.type].sends_signs
    found = _power_sgd_faults(zero, parallel) if rank else []
    if bits is not None and (rank or sends_signs):
        beside = "communication.power_sgd" if rank else f'optimizer.type "{optimizer.type}"' if optimizer else ""
        message = f"needs null beside {beside}, found {bits}: that sends gradients in a form of its own"
        found.append(Fault("communication.gradient_bits", "conflict", message))
    if optimizer is None or not sends_signs:
        return found
    if rank:
        message = f'needs 0 beside optimizer.type "{optimizer.type}", found {rank}: that sends no gradients'
        found.append(Fault("communication.power_sgd.rank", "conflict", message))
    return found + _sign_faults(optimizer.type, zero, parallel, bf16)


def _sign_faults(name: str, zero: ZeroConfig, parallel: ParallelConfig, bf16: BF16Config) -> list[Fault]:
    alone = "ranks whose data differ have all states, and nothing else is divided over them"
    masters = "what is rounded at random has no parameter that all ranks agree on"
    wrong: dict[str, tuple[bool, str, object, str]] = {
        "zero_optimization.stage": (zero.stage > 0, "0", zero.stage, alone),
        "parallel.tensor": (parallel.tensor > 1, "1", parallel.tensor, alone),
        "parallel.sequence": (parallel.sequence > 1, "1", parallel.sequence, alone),
        "parallel.expert": (parallel.expert > 1, "1", parallel.expert, alone),
        "zero_optimization.offload_optimizer.device": (
            zero.offload_optimizer.is_used,
            '"none"',
            zero.offload_optimizer.device,
            "an update sends what it computes with, and is made where the model is",
        ),
        "zero_optimization.update_in_backward": (
            zero.update_in_backward,
            "false",
            True,
            "an update sends momenta, in an order that all ranks have alike",
        ),
        "bf16.masters": (
            bf16.enabled and bf16.masters is not True,
            "true",
            bf16.masters,
            masters,
        ),
    }
    return [
        Fault(path, "conflict", f'optimizer.type "{name}" needs {expected}, found {shown(value)}: {why}')
        for path, (is_wrong, expected, value, why) in wrong.items()
        if is_wrong
    ]


def _power_sgd_faults(zero: ZeroConfig, parallel: ParallelConfig) -> list[Fault]:
    each = "it is made of the gradient of a whole step, which a rank has at stages 0 and 1 alone"
    parts = "ranks have parts of a matrix there"
    wrong: dict[str, tuple[bool, str, object, str]] = {
        "zero_optimization.stage": (zero.stage > 1, "0 or 1", zero.stage, each),
        "zero_optimization.shard_size": (
            bool(zero.stage) and zero.shard_size is not None,
            "null",
            zero.shard_size,
            "a gradient is summed over one line of ranks",
        ),
        "parallel.tensor": (parallel.tensor > 1, "1", parallel.tensor, parts),
        "parallel.sequence": (parallel.sequence > 1, "1", parallel.sequence, parts),
        "parallel.expert": (parallel.expert > 1, "1", parallel.expert, parts),
        "zero_optimization.update_in_backward": (
            zero.update_in_backward,
            "false",
            True,
            "what was not sent is remembered of steps that count",
        ),
        "zero_optimization.offload_optimizer.overlap": (
            zero.offload_optimizer.is_used and zero.offload_optimizer.overlap != "none",
            '"none"',
            zero.offload_optimizer.overlap,
            "what was not sent is remembered of steps that count",
        ),
    }
    return [
        Fault(path, "conflict", f"communication.power_sgd needs {expected}, found {shown(value)}: {why}")
        for path, (is_wrong, expected, value, why) in wrong.items()
        if is_wrong
    ]
