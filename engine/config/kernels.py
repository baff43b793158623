"""The sections `kernels` and `tiles`: implementations of kernels, fused modules, and tiles of tokens."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ...configs.section import Bool, Natural, Patterns, worded
from .errors import ConfigSection, quoted

BackendName = Literal["auto", "triton", "reference"]
FusionName = Literal["rms_norm", "gated_mlp", "rotary_embedding", "cross_entropy", "linear_cross_entropy"]
FUSION_NAMES: tuple[str, ...] = get_args(FusionName)
KERNEL_NAMES = (*FUSION_NAMES, "optimizer_step")


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


class KernelsConfig(ConfigSection):
    """Fused kernels: see docs/kernels.md."""

    backend: BackendName = "auto"
    """Backend of all kernels below. "auto": Triton on a GPU if installed, else eager torch (on the CPU a C++ kernel for
    the optimizer). "triton": Triton, or an error. "reference": eager torch."""

    fuse_modules: Annotated[
        Literal["auto"] | Bool | Annotated[tuple[FusionName, ...], AfterValidator(_each_once)],
        worded('expected "auto", true, false or a list of ' + ", ".join(f'"{name}"' for name in FUSION_NAMES)),
    ] = "auto"
    """Replace modules by fused modules. true: all that are known. "auto": true if Triton runs, but leave the layers of
    compiled blocks to torch.compile. Or a list of the keys below up to linear_cross_entropy."""

    rms_norm: BackendName | None = None
    """Backend of nn.RMSNorm, and of the norms of Llama, Mistral, Qwen and Gemma. null: backend."""

    gated_mlp: BackendName | None = None
    """Backend of SwiGLU and GeGLU in Llama, Mistral, Qwen and Gemma. null: backend."""

    rotary_embedding: BackendName | None = None
    """Backend of the rotation of queries and keys. null: backend."""

    cross_entropy: BackendName | None = None
    """Backend of nn.CrossEntropyLoss, and of the loss of causal language models. null: backend."""

    linear_cross_entropy: BackendName | None = None
    """Backend of the fused head and loss of causal language models, without logits. null: backend."""

    optimizer_step: BackendName | None = None
    """Backend of the optimizer's update. null: backend."""

    def backend_of(self, kernel: str) -> BackendName:
        """Return the backend of a kernel of KERNEL_NAMES."""
        own: BackendName | None = getattr(self, kernel)
        return self.backend if own is None else own

    def notes(self, config: Any) -> list[str]:
        wanted = self.fuse_modules
        # Both may use every kernel: "auto" depends on the device, and a config does not know the device.
        if wanted is True or wanted == "auto":
            return []
        names = wanted if isinstance(wanted, tuple) else ()
        return [
            f"kernels.{name}: {quoted(getattr(self, name))} has no effect here: kernels.fuse_modules is "
            f"{quoted(list(names) if names else wanted)}"
            for name in FUSION_NAMES
            if name not in names and getattr(self, name) is not None
        ]


TileSize = Literal["auto"] | Natural


def _size(value: object) -> object:
    """Return the value if it can be the tokens of a tile."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise PydanticCustomError("value_error", 'expected "auto" or the tokens of a tile (0: no tiles)')


class TilesConfig(ConfigSection):
    """Compute in tiles of tokens, with the same gradients: see docs/long-sequences.md. `"auto"` or a number in place of
    the section sets both sizes.
    """

    mlp: Annotated[TileSize, BeforeValidator(_size)] = 0
    """Tokens of an MLP tile; its activations are recomputed in backward. "auto": the width of its input, at least 256.
    0: off."""

    loss: Annotated[TileSize, BeforeValidator(_size)] = 0
    """Tokens of a tile of head and cross-entropy, without logits of all tokens. "auto": the width of the head's input,
    at least 256. 0: off."""

    modules: Patterns = "auto"
    """The MLPs. "auto": modules with the name of an MLP that hold only linear layers, activations, norms and dropout.
    Or a list of name patterns (`*`, `?`) of modules that act on each token alone."""

    head: str = Field(default="auto", min_length=1)
    """Name of the linear layer that computes the logits; "auto" finds it."""

    @model_validator(mode="before")
    @classmethod
    def _one_for_both(cls, value: Any) -> Any:
        # An instance was checked when it was made.
        if isinstance(value, Mapping | cls):
            return value
        size = _size(value)
        return {"mlp": size, "loss": size}

    def notes(self, config: Any) -> list[str]:
        found = [] if self.mlp else self.idle("tiles.mlp is 0", only=("modules",))
        return found + ([] if self.loss else self.idle("tiles.loss is 0", only=("head",)))
