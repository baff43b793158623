"""The section `tiles` of a config: which modules and losses are computed in tiles of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ..kernels.dispatch import Backend
from ..model.blocks import find_blocks
from ..model.patches import ModelPatches
from .chunked_logits import ChunkedHead
from .tiled_mlp import find_token_modules, mixes_tokens, put_in_tiles

AUTO = "auto"


class TilesError(ValueError):
    """The model has nothing that the config asks to tile. key: within the section `tiles`."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"tiles.{key}: {message}")
        self.key, self.message = key, message


@dataclass(frozen=True)
class Tiles:
    """The section `tiles` of a config. Tokens of a tile, "auto", or 0 for no tiles."""

    mlp: int | str = 0
    loss: int | str = 0
    modules: tuple[str, ...] | str = AUTO  # patterns of module names
    head: str = AUTO
    backend: Backend = "auto"  # kernel of the loss

    def apply(
        self, model: nn.Module, patches: ModelPatches, warn: Callable[[str], None]
    ) -> tuple[list[tuple[str, nn.Module]], list[str]]:
        """Replace the forwards of the chosen modules and the head. Raises TilesError if the model has none.

        Returns the chosen modules with their names, and lines for the log.
        """
        lines = []
        modules = self.token_modules(model) if self.mlp else []
        if modules:
            put_in_tiles(modules, _tokens(self.mlp), patches)
            classes = dict.fromkeys(type(module).__name__ for _, module in modules)
            lines.append(f"tiles: {len(modules)} x {', '.join(classes)} in tiles of {_said(self.mlp)}")
        if self.loss:
            name, head = self.find_head(model)
            ChunkedHead(name, head, _tokens(self.loss), self.backend, patches, warn)
            lines.append(f"tiles: the cross-entropy of '{name}' in tiles of {_said(self.loss)}, without its logits")
        return modules, lines

    def token_modules(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules that act on each token alone, with their names. Raises TilesError."""
        if self.modules == AUTO:
            found = find_token_modules(model)
            if not found:
                raise TilesError(
                    "mlp",
                    "expected a module with the name of an MLP (mlp, feed_forward, ffn) that takes a single tensor and "
                    f"holds only linear layers, activations, norms and dropout, found none in {type(model).__name__}; "
                    "name modules in tiles.modules, or set tiles.mlp to 0",
                )
            return found
        named = {name: module for name, module in model.named_modules() if name}
        chosen: dict[str, nn.Module] = {}
        for pattern in self.modules:
            matched = [name for name in named if fnmatchcase(name, pattern)]
            if not matched:
                raise TilesError("modules", f'"{pattern}" matches no module of {type(model).__name__}')
            chosen |= {name: named[name] for name in matched}
        for name, module in chosen.items():
            if mixing := mixes_tokens(module):
                raise TilesError("modules", f"'{name}' holds a {mixing}, and that mixes tokens; leave it out")
            outer = next((other for other in chosen if name.startswith(other + ".")), None)
            if outer is not None:
                raise TilesError("modules", f"'{name}' lies in '{outer}', and both are named; leave '{name}' out")
        return list(chosen.items())

    def find_head(self, model: nn.Module) -> tuple[str, nn.Linear]:
        """Return the linear layer of the logits, with its name. Raises TilesError."""
        named = dict(model.named_modules())
        if self.head != AUTO:
            found = named.get(self.head)
            # A fused layer is a subclass with the name of its original. A subclass of another name may compute other
            # logits.
            if not isinstance(found, nn.Linear) or type(found).__qualname__ != "Linear":
                kind = "no module" if found is None else type(found).__name__
                raise TilesError("head", f"expected the name of a Linear, found {kind} at '{self.head}'")
            assert isinstance(found, nn.Linear)
            return self.head, found
        heads = _heads(model)
        if len(heads) != 1:
            names = ", ".join(f"'{name}'" for name, _ in heads)
            raise TilesError(
                "loss",
                "expected a single Linear behind the blocks with as many outputs as an Embedding has rows, found "
                f"{f'several: {names}' if heads else 'none'} in {type(model).__name__}; name it in tiles.head, or set "
                "tiles.loss to 0",
            )
        return heads[0]


def _heads(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    get = getattr(model, "get_output_embeddings", None)
    own = get() if callable(get) else None
    # A linear layer in a block may have as many outputs by chance.
    of_blocks = {id(part) for _, block in find_blocks(model) for part in block.modules()}
    rows = {part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)}
    linear = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    # The head that the model names wins, even if its size differs from the embedding's rows.
    if own is not None:
        return [(name, part) for name, part in linear if part is own]
    return [(name, part) for name, part in linear if id(part) not in of_blocks and part.out_features in rows]


def _tokens(value: int | str) -> int | None:
    return value if isinstance(value, int) else None


def _said(value: int | str) -> str:
    return f"{value:,} tokens" if isinstance(value, int) else "about as many tokens as their width"
