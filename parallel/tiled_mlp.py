"""Computes modules that act on each token alone, a tile of tokens at a time.

    x (tokens, n) -> tile 0 | tile 1 | ... -> y (tokens, m)            saved for the backward: x

[Note: gradients of tiles] The backward recomputes each tile and differentiates it at once, so activations between x and
y exist for one tile at a time. Aliases replace the parameters meanwhile. Their gradients are summed here, and autograd
gets a single gradient for each parameter: hooks on parameters run once, and a reduction starts once. Narrow dtypes are
summed in float32, like a product over all tokens.
Source: ALST, arXiv 2506.13996, section 3.3.

[Note: each token alone] No rule sees how a forward uses its tokens. So the first run of a module in tiles computes two
tokens of its input together and each alone, and raises an error if the results differ.

[Note: hooks in tiles] Profilers put hooks on all modules that ask autograd about inputs and outputs. Autograd answers
for tensors inside a graph only: not for one that requires a gradient while no graph is recorded, nor for a leaf or the
root of `torch.autograd.grad`. So the forward detaches, and the backward puts a view at both ends.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.stateless import _reparametrize_module

from ..kernels.linear_layers import is_conv1d
from ..model.compiled import untraced
from ..model.patches import ModelPatches
from ..model.random_states import random_states, set_random_states
from ..model.recomputing import BufferValues, in_eval_mode

MIN_TILE = 256
# "dense(gated)act" are the MLPs of T5.
_NAMES = re.compile(r"mlp|feed_?forward|ffn|^ff$|dense(gated)?act", re.IGNORECASE)
_TOLERANCE = 0.02  # relative to the largest value: products of other shapes sum in another order, also in bfloat16


def put_in_tiles(modules: Iterable[tuple[str, nn.Module]], tokens: int | None, patches: ModelPatches) -> None:
    """Replace the forwards of (name, module) pairs by forwards in tiles. patches: can undo it.

    tokens: of a tile; None: the width of the input, at least MIN_TILE.
    """
    checked = set[int]()
    for name, module in modules:
        patches.override(module, "forward", untraced(partial(_forward, name, module, module.forward, tokens, checked)))


def _forward(
    name: str,
    module: nn.Module,
    inner: Callable[[Tensor], Any],
    tokens: int | None,
    checked: set[int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """checked: identities of modules that passed [Note: each token alone]."""
    given = [value for value in (*args, *kwargs.values()) if value is not None]
    if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dim() < 2:
        raise ValueError(
            f"tiles.mlp: expected that '{name}' ({type(module).__name__}) is called with a single tensor, (..., "
            f"tokens, width); found {len(given)} values. Leave it out of tiles.modules"
        )
    x = given[0]
    tile = tokens or tile_of(x.shape[-1])
    num_tokens = x.numel() // x.shape[-1] if x.numel() else 0
    if num_tokens <= tile:
        return inner(*args, **kwargs)
    if id(module) not in checked:
        _check_each_token(name, module, inner, x)
        checked.add(id(module))
    params = list(module.parameters())
    work = _Work(module, inner, tile, x.device)
    if not torch.is_grad_enabled():
        return work.forward(x)
    return _TiledForward.apply(work, x, *params)  # type: ignore[no-untyped-call]


def tile_of(width: int) -> int:
    """Return the tokens of a tile whose activations are about as large as the weights they are multiplied with."""
    return max(MIN_TILE, width)


def even_tiles(count: int, tile: int) -> Iterator[slice]:
    """Yield slices of about equal size, at most `tile`, over `count` tokens."""
    size = -(-count // max(-(-count // tile), 1))  # without a small last tile, which would cost as many launches
    return (slice(at, min(at + size, count)) for at in range(0, count, size)) if count else iter(())


def find_token_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the outermost modules with the name of an MLP that take one tensor and hold only layers that act on each
    token.
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        if _is_mlp(name, module):
            found.append((name, module))
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return found


def mixes_tokens(module: nn.Module) -> str | None:
    """Return the class name of a part that is known to mix tokens, or None."""
    for part in module.modules():
        if isinstance(part, (_NormBase, nn.MultiheadAttention)):
            return type(part).__name__
    return None


def _is_mlp(name: str, module: nn.Module) -> bool:
    named = _NAMES.search(type(module).__name__) or _NAMES.search(name.rpartition(".")[2])
    if not named or isinstance(module, (nn.Linear, nn.ModuleList, nn.ModuleDict)):
        return False
    inner = [part for part in module.modules() if part is not module]
    return (
        # With a single linear layer there is no tensor between input and output to save.
        sum(1 for part in inner if _is_linear(part)) >= 2
        and all(_acts_on_each_token(part) for part in inner)
        # Nobody knows how a forward uses a parameter of the module itself.
        and not any(True for _ in module.parameters(recurse=False))
        and _takes_one(module)
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def _acts_on_each_token(module: nn.Module) -> bool:
    home, name = type(module).__module__, type(module).__name__
    is_activation = home in ("torch.nn.modules.activation", "transformers.activations")
    plain = (nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.Sequential, nn.ModuleList)
    return _is_linear(module) or isinstance(module, plain) or name.endswith("RMSNorm") or is_activation


def _takes_one(module: nn.Module) -> bool:
    forward = inspect.unwrap(getattr(module.forward, "__func__", module.forward))  # decorators take *args
    code, defaults = getattr(forward, "__code__", None), getattr(forward, "__defaults__", None) or ()
    return code is not None and code.co_argcount - len(defaults) <= 2  # self and x


class _Work:
    """Computes a module on an input in tiles, and keeps the state that the recomputation must repeat."""

    def __init__(self, module: nn.Module, inner: Callable[[Tensor], Any], tile: int, device: torch.device) -> None:
        self.module, self.inner, self.tile = module, inner, tile
        self._device = device
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", device.type))
            if kind != "meta"
        ]
        self._random: list[Tensor] = []
        self._buffers = BufferValues(module)

    def forward(self, x: Tensor) -> Tensor:
        self._random = random_states(x.device)
        y: Tensor | None = None
        rows = _as_tokens(x.detach())  # see [Note: hooks in tiles]
        for part in even_tiles(rows.shape[-2], self.tile):
            made = self._made(rows[..., part, :])
            if y is None:
                # The width of the output is known from the first tile.
                y = made.new_empty((*rows.shape[:-1], made.shape[-1]))
            y[..., part, :] = made
        assert y is not None
        return y.view(*x.shape[:-1], y.shape[-1])

    def backward(self, x: Tensor, dy: Tensor, needs_x: bool, params: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return dx and the gradient of each parameter."""
        aliases = [param.detach().requires_grad_(param.requires_grad) for param in params]
        trained = [index for index, alias in enumerate(aliases) if alias.requires_grad]
        sums: list[Tensor | None] = [None] * len(params)
        rows, dys = _as_tokens(x), _as_tokens(dy)
        dx = torch.empty_like(rows, memory_format=torch.contiguous_format) if needs_x else None
        # Neither hooks nor `.grad` of the parameters are touched.
        named = {name: alias for (name, _), alias in zip(self.module.named_parameters(), aliases, strict=True)}
        replaced = _reparametrize_module(self.module, named, tie_weights=True)
        with replaced, self._as_before(), self._buffers, torch.enable_grad():
            for part in even_tiles(rows.shape[-2], self.tile):
                piece = rows[..., part, :].detach().requires_grad_(needs_x)
                made = self._made(piece.view_as(piece))  # see [Note: hooks in tiles]
                wanted = [*([piece] if needs_x else []), *(aliases[index] for index in trained)]
                root = made.view_as(made)
                found = list(torch.autograd.grad(root, wanted, dys[..., part, :], allow_unused=True))
                del made, root
                if dx is not None:
                    of_piece = found.pop(0)
                    dx[..., part, :] = 0 if of_piece is None else of_piece
                # From the end, so that each gradient is freed when it is added up.
                for index in reversed(trained):
                    _add(sums, index, found.pop())
        for index, total in enumerate(sums):
            sums[index] = None if total is None else total.to(params[index].dtype)
        return [None if dx is None else dx.view(x.shape), *sums]

    def _made(self, piece: Tensor) -> Tensor:
        made = self.inner(piece)
        if not isinstance(made, Tensor) or made.shape[:-1] != piece.shape[:-1]:
            found = f"a tensor {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(
                f"tiles.mlp: expected that {type(self.module).__name__} returns a tensor of {tuple(piece.shape[:-1])} "
                f"tokens for {tuple(piece.shape)}, found {found}. Leave it out of tiles.modules"
            )
        return made

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Set random generators and autocast as in the forward."""
        now = random_states(self._device)
        with ExitStack() as stack:
            for kind, dtype, is_enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=False))
            set_random_states(self._device, self._random)
            try:
                yield
            finally:
                set_random_states(self._device, now)


class _TiledForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, x: Tensor, *params: nn.Parameter) -> Tensor:
        ctx.work, ctx.params = work, params
        ctx.save_for_backward(x)
        return work.forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return None, *ctx.work.backward(x, dy, ctx.needs_input_grad[1], ctx.params)


def _as_tokens(x: Tensor) -> Tensor:
    """Return x with all tokens in one dimension, behind a dimension of size 1 if x has more than two."""
    return x if x.dim() == 2 else x.reshape(1, -1, x.shape[-1])


def _add(sums: list[Tensor | None], index: int, gradient: Tensor | None) -> None:
    """See [Note: gradients of tiles]."""
    if gradient is None:
        return
    total = sums[index]
    if total is None:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sums[index] = gradient.to(wide) if gradient.dtype != wide else gradient
    else:
        total += gradient


def _check_each_token(name: str, module: nn.Module, inner: Callable[[Tensor], Any], x: Tensor) -> None:
    """See [Note: each token alone]. Raises ValueError."""
    if x.is_meta:
        return
    rows = _as_tokens(x.detach())
    two = rows[..., [0, rows.shape[-2] // 2], :]
    before = random_states(x.device)
    try:
        made = []
        for tokens in (two, two[..., :1, :], two[..., 1:, :]):
            with in_eval_mode(module):  # for each call, so that it starts from the same buffers
                made.append(inner(tokens))
        together, *alone = made
    finally:
        set_random_states(x.device, before)
    if isinstance(together, Tensor) and together.dim() == two.dim():
        apart = torch.cat(alone, dim=-2)
        same = apart.shape == together.shape
        if same and bool((apart - together).abs().max() <= _TOLERANCE * together.abs().max() + 1e-6):
            return
        if same and not bool(together.isfinite().all()):
            return  # the step reports values that are not finite
    raise ValueError(
        f"tiles.mlp: expected that '{name}' ({type(module).__name__}) acts on each token alone, found different "
        "results for two tokens together and each alone. Leave it out of tiles.modules, or set tiles.mlp to 0"
    )
