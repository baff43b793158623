"""Attention over sequences of which each rank has a part: each rank attends with some heads over all of it (Ulysses).

    (rows, heads, part, size) -> all-to-all -> (rows, heads / ranks, whole, size) -> attention -> all-to-all -> back

Source: DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1. Keys and values of fewer heads than ranks, or of a number that
ranks do not divide, are repeated before they are sent, as often as makes them divide.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..comm import Exchange
from ..model.compiled import untraced
from ..model.ledger import Ledger
from .sequence_data import SequenceError
from .sequence_forwards import Forwards

_INNER = ("sdpa", "eager")
_LAYERS = {"full_attention", "sliding_attention"}
_ROPES = {"dynamic", "longrope"}


class SequenceAttention:
    """Attends over whole sequences, as `forwards` has them.

    is_alone: each token sees itself alone, and nothing is exchanged. num_calls: how often there was attention.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.forwards = Forwards()
        self.is_alone = False
        self.num_calls = 0
        self._exchange = exchange
        self._has_callers = False

    def around_copy(self) -> AbstractContextManager[object]:
        """Around the forward of a copy that was made before `put_on`."""
        return _Mode(self) if self._has_callers else nullcontext()

    def put_on(self, model: nn.Module, ledger: Ledger) -> None:
        """On all of the model that attends; see `check_attention`."""
        configs = _configs(model)
        registry = _registry() if configs else None
        for number, config in enumerate(configs):
            name = f"lowtide_sequence_{id(self)}_{number}"
            before = config._attn_implementation
            registry[name] = untraced(partial(self._of_hugging_face, registry, before))  # type: ignore[index]
            ledger.callback(partial(registry.__delitem__, name))  # type: ignore[union-attr]
            config._attn_implementation = name
            ledger.callback(partial(setattr, config, "_attn_implementation", before))
        self._has_callers = not configs
        for module in () if configs else _callers(model):
            ledger.override(module, "forward", untraced(partial(self._in_mode, module.forward)))

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
        attend = registry.get_interface(name, eager)
        if attention_mask is not None:
            raise SequenceError(
                f"{type(module).__name__}: expected no mask of its own (the engine makes it from attention_mask, "
                f"position_ids and sliding_window), found one of {tuple(attention_mask.shape)}"
            )
        if options.get("s_aux") is not None:
            raise SequenceError(f"{type(module).__name__}: expected attention without sinks, which are not shared")
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options.pop("position_ids", None)
        self.num_calls += 1
        if self.is_alone:
            return _of_itself(query, value).transpose(1, 2), None
        query, key, value = self._all(query, key, value)
        mask = self.forwards.whole.mask(query, is_causal, options.get("sliding_window"), always=name == "eager")
        if mask is not None and name == "eager":
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
        with _grouped(module, query.shape[1] // key.shape[1]):
            mixed, _ = attend(module, query, key, value, mask, **options)  # (rows, whole, heads, size)
        return self._back(mixed), None

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
        """`functional.scaled_dot_product_attention` of (..., heads, part, size), over the whole."""
        if attn_mask is not None or query.dim() != 4 or query.shape[-2] != key.shape[-2]:
            found = f"a mask of {tuple(attn_mask.shape)}" if attn_mask is not None else f"queries {tuple(query.shape)}"
            raise SequenceError(
                "scaled_dot_product_attention: expected (rows, heads, tokens, size), as many keys as queries, and no "
                f"mask but is_causal, found {found}"
            )
        self.num_calls += 1
        if self.is_alone:
            return _of_itself(query, value)
        query, key, value = self._all(query, key, value)
        mask = self.forwards.whole.mask(query, is_causal, None)
        enable_gqa = enable_gqa and query.shape[1] != key.shape[1]
        mixed = functional.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal and mask is None, scale=scale, enable_gqa=enable_gqa
        )
        return self._back(mixed.transpose(1, 2)).transpose(1, 2)

    def _in_mode(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Mode(self):
            return forward(*args, **kwargs)

    def _all(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens, of this rank's heads."""
        size, heads, of_keys = self._exchange.size, query.shape[1], key.shape[1]
        if fault := heads_fault(size, heads):
            raise SequenceError(fault)
        wanted = sent_heads(size, heads, of_keys)
        if wanted != of_keys:
            key, value = (one.repeat_interleave(wanted // of_keys, dim=1) for one in (key, value))
        return self._to_heads(query), self._to_heads(key), self._to_heads(value)

    def _to_heads(self, x: Tensor) -> Tensor:
        rows, heads, part, width = x.shape
        size = self._exchange.size
        sent = x.reshape(rows, size, heads // size, part, width).transpose(0, 1)
        got = swapped(sent.contiguous(), self._exchange, "attention over a sequence")  # by part of the sequence
        return got.permute(1, 2, 0, 3, 4).reshape(rows, heads // size, size * part, width)

    def _back(self, mixed: Tensor) -> Tensor:
        """(rows, whole, heads / ranks, size) -> (rows, part, heads, size)."""
        rows, length, heads, width = mixed.shape
        size = self._exchange.size
        sent = mixed.reshape(rows, size, length // size, heads, width).transpose(0, 1)
        got = swapped(sent.contiguous(), self._exchange, "the output of attention over a sequence")  # by heads
        return got.permute(1, 2, 0, 3, 4).reshape(rows, length // size, size * heads, width)


def heads_fault(size: int, heads: int) -> str | None:
    """The equation that does not hold, or None."""
    if heads % size == 0:
        return None
    return (
        f"sequence({size}) x heads of a rank(?) = attention heads({heads}) does not hold; ranks share a sequence by "
        f"its heads, so set parallel.sequence to a divisor of {heads}"
    )


def sent_heads(size: int, heads: int, of_keys: int) -> int:
    """How many heads of keys are sent: the fewest copies of them that the ranks divide."""
    common = math.lcm(size, of_keys)
    return common if heads % common == 0 else heads


def check_attention(model: nn.Module, size: int) -> None:
    """Raises SequenceError where the model's attention cannot be shared by so many ranks, or is not found."""
    for module in model.modules():
        if hasattr(module, "_supports_attention_backend") and type(module).__module__.startswith("transformers."):
            _check_hugging_face(module)
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            raise SequenceError(
                f"found nn.{type(module).__name__}, which is not shared; use scaled_dot_product_attention"
            )
    for config in _configs(model):
        name = config._attn_implementation
        if name not in _INNER:
            raise SequenceError(f'attn_implementation: expected "sdpa" or "eager", found "{name}"')
        heads = getattr(config, "num_attention_heads", None)
        if isinstance(heads, int) and (fault := heads_fault(size, heads)):
            raise SequenceError(fault)
    if not _configs(model) and not _callers(model):
        raise SequenceError(
            f"found no attention in {type(model).__name__}: expected a Hugging Face model, or modules whose methods "
            "call scaled_dot_product_attention"
        )


def _check_hugging_face(model: Any) -> None:
    """Raises SequenceError where its tokens meet in other ways than attention that can be exchanged, or by chance."""
    name, config = type(model).__name__, model.config
    if not model._supports_attention_backend:
        raise SequenceError(f"expected a model whose attention can be exchanged (AttentionInterface), found {name}")
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if kinds:
        raise SequenceError(
            f"config.layer_types: expected full_attention and sliding_attention, found {', '.join(sorted(kinds))}, "
            "whose tokens meet in other ways"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, Mapping)}
    if found := ropes & _ROPES:
        raise SequenceError(
            "config.rope_parameters: expected angles that do not depend on the length, found "
            f"{', '.join(map(str, found))}: a rank knows the positions of its part alone"
        )
    if getattr(config, "layerdrop", 0):
        raise SequenceError(
            "config.layerdrop: ranks draw random numbers of their own, and would leave out other layers; set it to 0"
        )


def _of_itself(query: Tensor, value: Tensor) -> Tensor:
    """What attention gives to tokens that see themselves alone."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def swapped(x: Tensor, exchange: Exchange, what: str) -> Tensor:
    """x: (ranks, ...), contiguous; what each rank has for this one, in their order. Its gradient goes the way back."""
    return _Swapped.apply(x, exchange, what)  # type: ignore[no-any-return, no-untyped-call]


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, what: str) -> Tensor:
        ctx.exchange, ctx.what = exchange, what
        return exchange.swap(x, what)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return ctx.exchange.swap(dy[0].contiguous(), f"the gradient of {ctx.what}"), None, None


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
    """Hugging Face's attention repeats keys as often as the module says."""
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
    """Of Hugging Face's parts of the model, each once."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None and type(module).__module__.startswith(
            "transformers."
        ):
            found[id(config)] = config
    return list(found.values())


def _registry() -> Any:
    return sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS


def _callers(model: nn.Module) -> list[nn.Module]:
    """Modules with a method that calls torch's attention."""
    name = functional.scaled_dot_product_attention.__name__
    found = []
    for module in model.modules():
        codes = [getattr(value, "__code__", None) for cls in type(module).__mro__ for value in vars(cls).values()]
        if any(code is not None and name in code.co_names for code in codes):
            found.append(module)
    return found
