"""Attention over sequences that are split over ranks: each rank attends with some heads over all tokens (Ulysses).

    (rows, heads, part, size) -> all-to-all -> (rows, heads / ranks, whole, size) -> attention -> all-to-all -> back

Source: DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1. If the ranks do not divide the key heads, keys and values are
repeated before they are sent, as few times as possible.

If the ranks do not divide the query heads, a group of neighbours that divides them exchanges heads and holds the tokens
of the group. Keys and values of the groups go round a ring (`ring_attention.py`):

    sequence(4), heads(6)    ranks 0 1: 3 heads each of tokens 0 1    ranks 2 3: 3 heads each of tokens 2 3
                             rings: 0 and 2, 1 and 3
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..comm import Collectives
from ..model.compiled import untraced
from ..model.patches import ModelPatches
from .block_attention import Scores, Seen
from .collectives import with_backward
from .ring_attention import Ring, ring_attention
from .sequence_data import Forwards, SequenceError

_INNER = ("sdpa", "eager")
_LAYERS = {"full_attention", "sliding_attention"}
_ROPES = {"dynamic", "longrope"}


class SequenceAttention:
    """Attention over whole sequences, in the context of `forwards`.

    is_alone: each token sees itself alone and nothing is exchanged. num_calls: calls of attention so far. fault: the
    first error in such a run. has_eager_ring: a ring replaces attention that a model writes out.
    """

    def __init__(
        self,
        exchange: Collectives,
        way: str = "auto",
        say: Callable[[str], None] | None = None,
        device: str | None = None,
    ) -> None:
        """way: "auto", "ulysses" or "ring". say: takes a log line on the choice, once for each number of heads.

        device: the type whose kernels are used for tensors on the meta device.
        """
        self.forwards = Forwards()
        self.is_alone = False
        self.num_calls = 0
        self.fault: str | None = None
        self.has_eager_ring = False
        self._exchange = exchange
        self._way = way
        self._say = say
        self._device = device
        self._widths: dict[int, int] = {}  # number of heads -> number of ranks that share them
        self._tried: set[tuple[int, float]] = set()  # (module, scale) that `_check_scores` has accepted
        self._has_callers = False

    def around_copy(self) -> AbstractContextManager[object]:
        """Return the context for the forward of a copy that was made before `put_on`."""
        return _Mode(self) if self._has_callers else nullcontext()

    def put_on(self, model: nn.Module, patches: ModelPatches) -> None:
        """Install on all attention of the model. `check_attention` must have accepted it."""
        configs = _configs(model)
        registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS if configs else None
        for number, config in enumerate(configs):
            # The registry belongs to the process, and engines may share it.
            name = f"lowtide_sequence_{id(self)}_{number}"
            before = config._attn_implementation
            registry[name] = untraced(partial(self._of_hugging_face, registry, before))  # type: ignore[index]
            patches.callback(partial(registry.__delitem__, name))  # type: ignore[union-attr]
            config._attn_implementation = name
            patches.callback(partial(setattr, config, "_attn_implementation", before))
        # Hugging Face's "sdpa" calls torch's attention too: with a mode around it, heads would be exchanged twice.
        self._has_callers = not configs
        for module in () if configs else _callers(model):
            patches.override(module, "forward", untraced(partial(self._in_mode, module.forward)))

    def _of_hugging_face(
        self,
        registry: Any,
        name: str,
        module: nn.Module,
        query: Tensor,  # (rows, heads, part, size); key and value may have fewer heads
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        # "eager" is not in the registry: each model's file has a function of that name.
        attend = registry.get_interface(name, eager)
        if attention_mask is not None:
            raise SequenceError(
                f"{type(module).__name__}: expected no mask (the engine builds it from attention_mask, position_ids "
                f"and sliding_window), found a mask of {tuple(attention_mask.shape)}"
            )
        if options.get("s_aux") is not None:
            raise SequenceError(f"{type(module).__name__}: attention with sinks cannot be split over ranks")
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # Positions of this rank's part. `AttentionContext.packed` has the packed sequences of the whole.
        options.pop("position_ids", None)
        self.num_calls += 1
        scale = options.get("scaling")
        scale = query.shape[3] ** -0.5 if scale is None else scale
        groups = query.shape[1] // key.shape[1]
        if self.is_alone:
            self._look(query.shape[1], partial(self._check_scores, module, attend, name, scale, groups, options))
            return _of_itself(query, value).transpose(1, 2), None
        window = options.get("sliding_window")
        width = self._width(query.shape[1])
        query, key, value = self._all(query, key, value, width)
        if width < self._exchange.size:
            if not query.is_meta:
                self._check_scores(module, attend, name, scale, groups, options)
            mixed = self._round(
                query,
                key,
                value,
                width,
                Seen(self.forwards.whole, is_causal, window),
                scale,
                options.get("dropout", 0.0),
            )
            return self._back(mixed.transpose(1, 2), width), None
        # "eager" ignores is_causal, so it always needs a mask.
        mask = self.forwards.whole.whole_mask(query, is_causal, window, always=name == "eager")
        if mask is not None and name == "eager":
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
            # A row of equal minima is an even softmax over all keys: exclude the padding from it.
            mask[..., self.forwards.whole.length or mask.shape[3] :] = -math.inf
        # The exchange may have repeated keys, so there may be fewer queries for each key than the model says.
        with _grouped(module, query.shape[1] // key.shape[1]):
            mixed, _ = attend(module, query, key, value, mask, **options)  # (rows, whole, heads, size)
        return self._back(mixed, width), None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute `functional.scaled_dot_product_attention` of (..., heads, part, size) over the whole sequence."""
        if attn_mask is not None or query.dim() != 4 or query.shape[-2] != key.shape[-2]:
            found = f"a mask of {tuple(attn_mask.shape)}" if attn_mask is not None else f"queries {tuple(query.shape)}"
            raise SequenceError(
                "scaled_dot_product_attention: expected (rows, heads, tokens, size), as many keys as queries, and no "
                f"mask but is_causal, found {found}"
            )
        self.num_calls += 1
        if self.is_alone:
            self._look(query.shape[1])
            return _of_itself(query, value)
        width = self._width(query.shape[1])
        query, key, value = self._all(query, key, value, width)
        whole = replace(self.forwards.whole, packed=None)  # a call without a mask ignores packed sequences
        if width < self._exchange.size:
            scale = query.shape[3] ** -0.5 if scale is None else scale
            mixed = self._round(query, key, value, width, Seen(whole, is_causal, None), scale, dropout_p)
            return self._back(mixed.transpose(1, 2), width).transpose(1, 2)
        mask = whole.whole_mask(query, is_causal, None)
        enable_gqa = enable_gqa and query.shape[1] != key.shape[1]
        # torch takes a mask or is_causal, not both. The mask has the causal part.
        mixed = functional.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal and mask is None, scale=scale, enable_gqa=enable_gqa
        )
        return self._back(mixed.transpose(1, 2), width).transpose(1, 2)

    def _in_mode(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Mode(self):
            return forward(*args, **kwargs)

    def _width(self, heads: int) -> int:
        """Return how many ranks share this many heads; size / width ranks form a ring. Raises SequenceError."""
        if heads not in self._widths:
            size = self._exchange.size
            if self._way == "ulysses" and (fault := heads_fault(size, heads)):
                raise SequenceError(fault)
            self._widths[heads] = width = 1 if self._way == "ring" else math.gcd(size, heads)
            if self._say is not None:
                self._say(way_line(size, heads, width, self._way))
        return self._widths[heads]

    def _look(self, heads: int, check: Callable[[], None] | None = None) -> None:
        """Check that attention can be split, and keep a fault: later pipeline stages wait for this stage's output."""
        try:
            if self._width(heads) < self._exchange.size and check is not None:
                check()
        except SequenceError as error:
            self.fault = self.fault or error.message

    def _all(self, query: Tensor, key: Tensor, value: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange to all tokens of `width` neighbours and this rank's heads."""
        if width == 1:
            return query, key, value
        of_keys = key.shape[1]
        wanted = sent_heads(width, query.shape[1], of_keys)
        if wanted != of_keys:
            key, value = (one.repeat_interleave(wanted // of_keys, dim=1) for one in (key, value))
        return self._to_heads(query, width), self._to_heads(key, width), self._to_heads(value, width)

    def _to_heads(self, x: Tensor, size: int) -> Tensor:
        rows, heads, part, width = x.shape
        sent = x.reshape(rows, size, heads // size, part, width).transpose(0, 1)
        got = swapped(sent.contiguous(), self._exchange, "attention over a sequence")  # dim 0: part of the sequence
        return got.permute(1, 2, 0, 3, 4).reshape(rows, heads // size, size * part, width)

    def _back(self, mixed: Tensor, size: int) -> Tensor:
        """(rows, tokens of all, heads / ranks, size) -> (rows, part, heads, size)."""
        if size == 1:
            return mixed
        rows, length, heads, width = mixed.shape
        sent = mixed.reshape(rows, size, length // size, heads, width).transpose(0, 1)
        got = swapped(sent.contiguous(), self._exchange, "the output of attention over a sequence")  # dim 0: heads
        return got.permute(1, 2, 0, 3, 4).reshape(rows, length // size, size * heads, width)

    def _round(
        self, query: Tensor, key: Tensor, value: Tensor, width: int, seen: Seen, scale: float, dropout: float
    ) -> Tensor:
        ring = Ring(self._exchange, width, query.shape[2], seen)
        # A ring keeps no mask of dropout: its backward draws the same numbers again from this seed.
        seed = int(torch.empty((), dtype=torch.int64).random_()) if dropout else 0
        return ring_attention(query, key, value, ring, Scores(seen, scale, dropout, seed, self._device))

    def _check_scores(
        self,
        module: nn.Module,
        attend: Callable[..., Any],
        name: str,
        scale: float,
        groups: int,
        options: Mapping[str, Any],
    ) -> None:
        """Raise SequenceError if the model's attention does more with its scores than to scale them.

        A ring computes the scores itself. So three random tokens go through both when a module attends first.
        """
        if (id(module), scale) in self._tried:
            return
        self.has_eager_ring |= name == "eager"
        # A separate generator: the check must not change the numbers of the training.
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(1, heads, 3, 8, generator=generator) for heads in (groups, 1, 1))
        query *= 8  # large scores, so that a cap shows
        right = (query @ key.transpose(-1, -2) * scale).softmax(-1) @ value
        mask = torch.zeros(1, 1, 3, 3) if name == "eager" else None
        given = {**options, "dropout": 0.0, "is_causal": False}
        with torch.no_grad(), torch.autocast("cpu", enabled=False), _grouped(module, groups):
            found, _ = attend(module, query, key, value, mask, **given)
        if not torch.allclose(found.transpose(1, 2), right, rtol=1e-4, atol=1e-4):
            raise SequenceError(
                f'{type(module).__name__}: ring attention computes scaled scores only, but the model\'s "{name}" '
                "attention also changes them (a cap or a bias); set parallel.sequence to a divisor of the heads"
            )
        self._tried.add((id(module), scale))


def heads_fault(size: int, heads: int, tensor: int = 1) -> str | None:
    """Return the equation that does not hold, or None. heads: the heads of all `tensor` ranks that share a layer."""
    if heads % (size * tensor) == 0:
        return None
    factors = f"sequence({size}) x " + (f"tensor({tensor}) x " if tensor > 1 else "")
    return (
        f"{factors}heads of a rank(?) = attention heads({heads}) does not hold; set parallel.sequence to a divisor of "
        f'{heads // tensor}, or sequence_parallel.attention to "auto" for a ring'
    )


def way_line(size: int, heads: int, width: int, way: str) -> str:
    """Say what was chosen and why, for the log."""
    found = f"sequence: attention of {heads} heads over {size} ranks"
    if width == size:
        return f"{found}: each has {heads // size} heads of all tokens (all-to-all)"
    why = f"since sequence({size}) does not divide heads({heads})" if way == "auto" else "as the config asks"
    if width == 1:
        return f"{found}: keys and values go round a ring, {why}"
    return f"{found}: by heads over {width} neighbours (all-to-all), and a ring of {size // width}, {why}"


def sent_heads(size: int, heads: int, of_keys: int) -> int:
    """Return how many key heads are sent: the fewest copies that the ranks divide."""
    common = math.lcm(size, of_keys)
    return common if heads % common == 0 else heads


def check_attention(model: nn.Module, size: int, way: str = "auto", tensor: int = 1) -> None:
    """Raise SequenceError if the model has no attention, or attention that cannot be split over `size` ranks.

    way: as in `SequenceAttention`. tensor: number of ranks that share each layer.
    """
    for module in model.modules():
        if hasattr(module, "_supports_attention_backend") and type(module).__module__.startswith("transformers."):
            _check_hugging_face(module)
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            raise SequenceError(
                f"nn.{type(module).__name__} cannot be split over ranks; use scaled_dot_product_attention"
            )
    for config in _configs(model):
        name = config._attn_implementation
        if name not in _INNER:
            raise SequenceError(f'attn_implementation: expected "sdpa" or "eager", found "{name}"')
        heads = getattr(config, "num_attention_heads", None)
        if way == "ulysses" and isinstance(heads, int) and (fault := heads_fault(size, heads, tensor)):
            raise SequenceError(fault)
    if not _configs(model) and not _callers(model):
        raise SequenceError(
            f"{type(model).__name__}: expected a Hugging Face model, or modules with methods that call "
            "scaled_dot_product_attention, found no attention"
        )


def _check_hugging_face(model: Any) -> None:
    """Raise SequenceError if tokens mix outside attention that can be replaced, or at random."""
    name, config = type(model).__name__, model.config
    if not model._supports_attention_backend:
        raise SequenceError(f"expected a model whose attention can be exchanged (AttentionInterface), found {name}")
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if kinds:
        raise SequenceError(
            f"config.layer_types: expected full_attention and sliding_attention only, found {', '.join(sorted(kinds))}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, Mapping)}
    if found := ropes & _ROPES:
        raise SequenceError(
            "config.rope_parameters: expected angles that do not depend on the length, found "
            f"{', '.join(map(str, found))}: a rank sees only the positions of its part"
        )
    if getattr(config, "layerdrop", 0):
        raise SequenceError(
            "config.layerdrop: ranks draw different random numbers and would skip different layers; set it to 0"
        )


def _of_itself(query: Tensor, value: Tensor) -> Tensor:
    """Return the attention output of tokens that see only themselves."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def swapped(x: Tensor, exchange: Collectives, what: str) -> Tensor:
    """Send x[r] to rank r and return the received parts, in rank order. The gradient goes the way back.

    x: (ranks, ...), contiguous.
    """
    return with_backward(
        x, lambda x: exchange.swap(x, what), lambda dy: exchange.swap(dy.contiguous(), f"the gradient of {what}")
    )


class _Mode(TorchFunctionMode):
    def __init__(self, attention: SequenceAttention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attention.attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def _grouped(module: Any, groups: int) -> Iterator[None]:
    """Set `num_key_value_groups`, from which Hugging Face's attention repeats keys."""
    before = getattr(module, "num_key_value_groups", None)
    if before is None or before == groups:
        yield
        return
    module.num_key_value_groups = groups
    try:
        yield
    finally:
        module.num_key_value_groups = before


def _configs(model: nn.Module) -> list[Any]:
    """Return the configs of the model's transformers modules, each once."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None and type(module).__module__.startswith(
            "transformers."
        ):
            found[id(config)] = config
    return list(found.values())


def _callers(model: nn.Module) -> list[nn.Module]:
    """Return the modules with a method that calls torch's attention."""
    name = functional.scaled_dot_product_attention.__name__
    found = []
    for module in model.modules():
        members = [value for cls in type(module).__mro__ for value in vars(cls).values() if callable(value)]
        # Behind decorators: only the bytecode of the function itself names the call.
        codes = [getattr(inspect.unwrap(member), "__code__", None) for member in members]
        if any(code is not None and name in code.co_names for code in codes):
            found.append(module)
    return found
