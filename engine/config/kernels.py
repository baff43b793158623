"""The section `kernels`: which form of each kernel runs, and which of a model's modules are replaced by fused ones."""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from ...configs.section import Section
from .errors import shown

BackendName = Literal["auto", "triton", "reference"]
FusionName = Literal["rms_norm", "layer_norm", "gated_mlp", "rotary_embedding", "cross_entropy", "linear_cross_entropy"]
FUSION_NAMES: tuple[str, ...] = get_args(FusionName)
KERNEL_NAMES = (*FUSION_NAMES, "optimizer_step")


def _fuse_modules(value: object) -> object:
    if value == "auto" or isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and all(isinstance(name, str) and name in FUSION_NAMES for name in value):
        return tuple(dict.fromkeys(value))
    names = ", ".join(f'"{name}"' for name in FUSION_NAMES)
    raise PydanticCustomError("value_error", f'expected "auto", true, false or a list of {names}')


class KernelsConfig(Section):
    """Fused kernels: see docs/kernels.md."""

    backend: BackendName = "auto"
    """The form of every kernel here that has no key of its own. "auto": Triton on a GPU where it is installed, else
    eager torch (for the optimizer on the CPU a C++ kernel); "triton": Triton, or an error; "reference": eager torch."""

    fuse_modules: Annotated[
        Literal["auto"] | bool | tuple[FusionName, ...],
        BeforeValidator(_fuse_modules),
    ] = "auto"
    """Replace modules of the model by fused ones. true: all that are known; "auto": true where Triton runs; or a list
    of fusions, the names of the keys below up to linear_cross_entropy."""

    rms_norm: BackendName | None = None
    """nn.RMSNorm and those of Llama, Mistral, Qwen and Gemma. null: as backend says."""

    layer_norm: BackendName | None = None
    """nn.LayerNorm. null: as backend says."""

    gated_mlp: BackendName | None = None
    """SwiGLU and GeGLU in the MLPs of Llama, Mistral, Qwen and Gemma. null: as backend says."""

    rotary_embedding: BackendName | None = None
    """The rotation of queries and keys. null: as backend says."""

    cross_entropy: BackendName | None = None
    """nn.CrossEntropyLoss, and the loss of causal language models. null: as backend says."""

    linear_cross_entropy: BackendName | None = None
    """Head and loss of causal language models in one, without logits. null: as backend says."""

    optimizer_step: BackendName | None = None
    """The update of the optimizer. null: as backend says."""

    def backend_of(self, kernel: str) -> BackendName:
        """The form of the kernel of that name, one of KERNEL_NAMES."""
        own: BackendName | None = getattr(self, kernel)
        return self.backend if own is None else own


def idle_kernel_settings(kernels: KernelsConfig) -> list[str]:
    """One sentence for each backend of a fusion that the list of fusions leaves out."""
    wanted = kernels.fuse_modules
    if wanted is True or wanted == "auto":
        return []
    names = wanted if isinstance(wanted, tuple) else ()
    return [
        f"kernels.{name}: {shown(getattr(kernels, name))} has no effect here: kernels.fuse_modules is "
        f"{shown(list(names) if names else wanted)}"
        for name in FUSION_NAMES
        if name not in names and getattr(kernels, name) is not None
    ]
