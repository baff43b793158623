"""What scripts ask `deepspeed.ops` for before they use an operation: whether it is there.

Nothing is built: kernels are those of the engine.
"""

from __future__ import annotations

from typing import NoReturn

_HERE = ("fused_adam", "cpu_adam", "fused_lion", "cpu_lion", "cpu_adagrad")
_NOT_HERE = (
    "async_io",
    "cutlass_ops",
    "evoformer_attn",
    "fp_quantizer",
    "fused_lamb",
    "gds",
    "inference_core_ops",
    "quantizer",
    "ragged_device_ops",
    "ragged_ops",
    "random_ltd",
    "spatial_inference",
    "stochastic_transformer",
    "transformer",
    "transformer_inference",
    "utils",
)
__compatible_ops__ = {name: name in _HERE for name in (*_HERE, *_NOT_HERE)}
__installed_ops__ = installed_ops = compatible_ops = __compatible_ops__


class OpBuilder:
    """Of one operation, by its NAME."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return __compatible_ops__[self.NAME]

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.NAME}"

    def load(self, verbose: bool = True) -> NoReturn:
        """Raises NotImplementedError: there is no library of DeepSpeed's."""
        raise NotImplementedError(
            f"deepspeed.ops.op_builder: expected no load() of {self.NAME}, found one; its classes in deepspeed.ops are "
            "used without, and the engine has its own kernels"
        )


class FusedAdamBuilder(OpBuilder):
    NAME = "fused_adam"


class CPUAdamBuilder(OpBuilder):
    NAME = "cpu_adam"


class FusedLionBuilder(OpBuilder):
    NAME = "fused_lion"


class CPULionBuilder(OpBuilder):
    NAME = "cpu_lion"


class CPUAdagradBuilder(OpBuilder):
    NAME = "cpu_adagrad"


class FusedLambBuilder(OpBuilder):
    NAME = "fused_lamb"


class AsyncIOBuilder(OpBuilder):
    NAME = "async_io"


class GDSBuilder(OpBuilder):
    NAME = "gds"


class QuantizerBuilder(OpBuilder):
    NAME = "quantizer"


class FPQuantizerBuilder(OpBuilder):
    NAME = "fp_quantizer"


class TransformerBuilder(OpBuilder):
    NAME = "transformer"


class InferenceBuilder(OpBuilder):
    NAME = "transformer_inference"


class RandomLTDBuilder(OpBuilder):
    NAME = "random_ltd"


class UtilsBuilder(OpBuilder):
    NAME = "utils"
