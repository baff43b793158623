"""The section `tiles`: what is computed a tile of tokens at a time."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ...configs.section import Natural, Section
from .idle import idle

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


class TilesConfig(Section):
    """What is computed a tile of tokens at a time, with the same gradients: see docs/long-sequences.md. `"auto"`, or a
    number, in place of the section stands for both of its sizes."""

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


def idle_tiles(tiles: TilesConfig) -> list[str]:
    """One sentence for each key that has no effect with the rest of the section."""
    notes = [] if tiles.mlp else idle("tiles", tiles, "tiles.mlp is 0", only=("modules",))
    return notes + ([] if tiles.loss else idle("tiles", tiles, "tiles.loss is 0", only=("head",)))
