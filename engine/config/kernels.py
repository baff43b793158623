"""The section `kernels`: which form of each kernel runs, and which of a model's modules are replaced by fused ones."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ...configs.section import Natural
from .errors import ConfigSection, shown

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


class KernelsConfig(ConfigSection):
    """Fused kernels: see docs/kernels.md."""

    path = "kernels"

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

    def notes(self, config: Any) -> list[str]:
        wanted = self.fuse_modules
        if wanted is True or wanted == "auto":
            return []
        names = wanted if isinstance(wanted, tuple) else ()
        return [
            f"kernels.{name}: {shown(getattr(self, name))} has no effect here: kernels.fuse_modules is "
            f"{shown(list(names) if names else wanted)}"
            for name in FUSION_NAMES
            if name not in names and getattr(self, name) is not None
        ]


TileSize = Literal["auto"] | Natural


def _size(value: object) -> object:
    """As it is, if it may be the tokens of a tile."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise PydanticCustomError("value_error", 'expected "auto", or the tokens of a tile, 0 for no tiles')


def _modules(value: object) -> object:
    if value == "auto":
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) and item for item in value):
        return tuple(value)
    raise PydanticCustomError("value_error", 'expected "auto" or a list of patterns of module names')


class TilesConfig(ConfigSection):
    """What is computed a tile of tokens at a time, with the same gradients: see docs/long-sequences.md. `"auto"`, or a
    number, in place of the section stands for both of its sizes."""

    path = "tiles"

    mlp: Annotated[TileSize, BeforeValidator(_size)] = 0
    """Tokens of a tile of the MLPs, whose inner activations are made again in the backward. "auto": as many as its
    input is wide, at least 256. 0: MLPs are computed as a whole."""

    loss: Annotated[TileSize, BeforeValidator(_size)] = 0
    """Tokens of a tile of the head and its cross-entropy: logits of all tokens are never there. "auto": as many as the
    head's input is wide, at least 256. 0: logits are computed as a whole."""

    modules: Annotated[Literal["auto"] | tuple[str, ...], BeforeValidator(_modules)] = "auto"
    """The MLPs: "auto" finds modules that are named as such and hold linear layers, activations, norms and dropout
    alone. Or a list of patterns (`*`, `?`) of names of modules that act on each token alone."""

    head: str = Field(default="auto", min_length=1)
    """The linear layer that gives the logits: "auto" finds it, or its name."""

    @model_validator(mode="before")
    @classmethod
    def _one_for_both(cls, value: Any) -> Any:
        if isinstance(value, Mapping | cls):
            return value
        size = _size(value)
        return {"mlp": size, "loss": size}

    def notes(self, config: Any) -> list[str]:
        found = [] if self.mlp else self.idle("tiles.mlp is 0", only=("modules",))
        return found + ([] if self.loss else self.idle("tiles.loss is 0", only=("head",)))
