"""Profile a microbatch of a model on the meta device: memory, operations and traffic by part.

[Note: what is counted]
Operations run on meta tensors under a dispatch mode that sees each of them. A storage counts from the operation that
makes it until nothing references it. So tensors that autograd saves, and frees in the backward, count as in a
training; each storage counts once, however many tensors view it. Parameters and buffers do not count. The gradient
of a parameter does not count after it exists, because the engine stages and frees it. Workspace inside a kernel is
invisible.

[Note: conditions]
A model may ask for the truth of a tensor: whether a mask is all true, a sequence is not packed, or values are finite.
The answer is always yes, which takes the common path. Numbers cannot be answered.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ...kernels.linear_layers import transposes
from ...model.blocks import find_blocks
from ...model.patches import ModelPatches
from ...parallel.sequence_data import SequenceError, SequenceShard
from ...parallel.tiles import Tiles
from ...zero.hooks import make_gradients_in_place
from ...zero.plan import Dtypes, UnitPlan
from ...zero.sequence import UnitSequence
from ..step.batch import call, loss_of
from .profile import Profile, ProfilePart
from .splits import PlannedSplits, SplitModel
from .step_order import END, START
from .tracker import OperationCounts, Results, Tracker, tensors_of

NO_TILES, NO_SPLITS = Tiles(), PlannedSplits()
_aten = torch.ops.aten


class MetaRun:
    """Profiles microbatches of a copy of the model.

    model: on any device, unchanged. device: where the training runs, "cpu" or "cuda"; it determines the attention
    kernel.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitPlan],
        dtypes: Dtypes,
        device: str,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        casts_inputs: bool = True,
        tiles: Tiles = NO_TILES,
        splits: PlannedSplits = NO_SPLITS,
    ) -> None:
        """Copy the model to the meta device. Raises ValueError if layers cannot be split like this."""
        self._model = _meta_copy(model, dtypes)
        self._results: Results = {}
        self._splits, self._plans = splits, splits.shrink(self._model)
        # By name: the units of the plan hold modules of the user's model, not of its copy.
        self._units = [(unit.name, self._model.get_submodule(unit.name)) for unit in units if not unit.is_root]
        names = [unit.name for unit in units if not (unit.is_root or unit.is_end)]
        self._blocks = [self._model.get_submodule(name) for name in names]  # `checkpoint_activations` recomputes them
        self._of_units = {id(param) for _, module in self._units for param in module.parameters()}
        self._after = _after_blocks(self._model)
        self._dtype = dtypes.compute if casts_inputs else None
        self._itemsize = (dtypes.compute or torch.float32).itemsize
        self._device, self._loss_fn, self._tiles = device, loss_fn, tiles

    def profile(self, batch: Any, rows: int, every: int, is_direct: bool = False) -> Profile:
        """Profile a microbatch of `rows` rows like those of `batch`. every: `activation_checkpointing.every`.

        is_direct: gradients of large weights are written where they are staged, without tensors of their own. Raises
        ValueError if the model does not run without values.
        """
        patches = ModelPatches()
        tracker = Tracker([*self._model.parameters(), *self._model.buffers()], self._results)
        counter = _PartCounter(tracker, self._of_units)
        tiled = frozenset(id(module) for _, module in self._tiles.apply(self._model, patches, lambda text: None)[0])
        try:
            split = SplitModel(self._splits, self._plans, self._model, self._device, tiled, tracker, patches)
            part = split.part(batch, rows, self._loss_fn is None)
            made = _on_meta(part, rows, self._dtype)
            # The batch is not an activation: `cast_bytes` and `input_bytes` count it.
            for tensor in tensors_of(made):
                tracker.leave_out(tensor)
            for module in self._blocks[::every] if every else ():
                patches.override(module, "forward", self._recomputed(module))
            self._observe(counter, patches)
            if is_direct:
                self._stage_gradients(counter, tracker, patches)
            with torch.enable_grad(), _Attention(self._device), tracker:
                self._run(made, counter, split)
        # Its text is for the user as it is.
        except SequenceError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            degrees = "".join(f", with parallel.{name} {size}," for name, size in self._splits.sizes)
            raise ValueError(
                f"plan: the model{degrees} does not run on the meta device, because its tensors have no values "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). Pass a batch of the "
                "model as sample_batch; forwards that read values (.item(), a condition on a tensor) cannot be planned"
            ) from error
        finally:
            patches.close()
            for param in self._model.parameters():
                param.grad = None
        # A rank's part of a sequence is a new tensor in any dtype.
        converted = sum(
            tensor.nbytes for tensor in tensors_of(made) if part is not batch or tensor.dtype == self._dtype
        )
        return Profile(
            rows=rows,
            tokens=_num_tokens(batch, rows),
            parts=counter.parts(),
            itemsize=self._itemsize,
            cast_bytes=converted,
            sizes=self._splits.sizes,
            slot_bytes=split.slot_bytes,
            input_bytes=sum(tensor.nbytes for tensor in tensors_of(made)),
        )

    def _recomputed(self, module: nn.Module) -> Callable[..., Any]:
        def contexts() -> tuple[AbstractContextManager[None], TorchFunctionMode]:
            return nullcontext(), _Attention(self._device)  # torch disables the outer mode in a backward

        return partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)

    def _run(self, batch: Any, counter: _PartCounter, split: SplitModel) -> None:
        counter.enter(START)
        output = split.run(batch, lambda: call(self._model, batch))
        loss = loss_of(output, batch, self._loss_fn)
        if isinstance(batch, SequenceShard) and batch.factor is not None:
            loss = loss * batch.factor
        # As the engine does: without this reference the backward frees the logits when their gradient exists.
        del output
        counter.end_forward()
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        counter.end()

    def _observe(self, counter: _PartCounter, patches: ModelPatches) -> None:
        for name, module in self._units:
            patches.hook(module.register_forward_pre_hook(counter.before(name), with_kwargs=True))
        if self._after is not None:
            patches.hook(self._after.register_forward_hook(counter.after_blocks))
        for module in self._model.modules():
            if transposes(module) is not None and any(param.requires_grad for param in module.parameters()):
                patches.hook(module.register_forward_hook(counter.see_linear))
        for param in self._model.parameters():
            if param.requires_grad:
                patches.hook(
                    param.register_post_accumulate_grad_hook(partial(_free_gradient, counter))  # type: ignore[no-untyped-call]
                )

    def _stage_gradients(self, counter: _PartCounter, tracker: Tracker, patches: ModelPatches) -> None:
        """Write gradients of large weights into memory that does not count here: the step order counts staging."""
        memory = {id(param): torch.empty_like(param, requires_grad=False) for param in self._model.parameters()}
        for tensor in memory.values():
            tracker.leave_out(tensor)

        def place_for_gradient(param: nn.Parameter) -> Tensor:
            counter.begin_gradient(param)
            return memory[id(param)]

        sequence = cast(UnitSequence, SimpleNamespace(place_for_gradient=place_for_gradient))
        make_gradients_in_place(sequence, self._model.modules(), patches)


def _free_gradient(counter: _PartCounter, param: Tensor) -> None:
    param.grad = None
    counter.begin_gradient(param)
    counter.add_gradient(param)


class _PartCounter:
    """Splits the tracker's counts by part: a part starts at the entry of each unit, and after the last block."""

    def __init__(self, tracker: Tracker, of_units: Set[int]) -> None:
        """of_units: ids of the units' parameters."""
        self._tracker, self._of_units = tracker, of_units
        self._names: list[str] = []
        # Live before, live after, peak.
        self._forward: dict[str, tuple[int, int, int, OperationCounts]] = {}
        # Peak until the first gradient, peak after it, peak while gradients are kept, live after.
        self._backward: dict[str, tuple[int, int, int, int, OperationCounts]] = {}
        self._starts: dict[str, int] = {}  # peaks until the first gradient
        self._outputs: dict[str, int] = {}
        self._gradients: dict[str, int] = {}
        self._rest: dict[str, int] = {}
        self._linear: dict[str, int] = {}
        self._inputs: dict[int, weakref.ref[Any]] = {}  # of linear layers, by id of the storage
        self._begun = 0
        self._now: str | None = None

    def before(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._now is None or name in self._names or torch._C._current_graph_task_id() >= 0:
                return  # recomputation in the backward
            if self._now != END:
                self._end_part(self._now, (args, kwargs))
            self.enter(name)

        return hook

    def after_blocks(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook of the last block: the rest of the forward is the head or the end."""
        if self._now is not None and END not in self._names and torch._C._current_graph_task_id() < 0:
            self._end_part(self._now, output)
            self.enter(END)

    def enter(self, name: str) -> None:
        """Begin a part of the forward."""
        if self._now == END:  # a head that is a unit becomes the part after the blocks
            self._names[-1] = self._now = name
            return
        self._close_forward()
        self._names.append(name)
        self._now = name
        self._begun = self._tracker.begin()

    def end_forward(self) -> None:
        """End the forward after the loss, and begin the backward of the last part."""
        self._close_forward()
        last = self._names[-1]
        if last != END:
            self._names.append(END)
            self._forward[END] = (self._tracker.live, self._tracker.live, self._tracker.live, OperationCounts())
        self._begin_backward(last)

    def end(self) -> None:
        self._close_backward()

    def begin_gradient(self, param: Tensor) -> None:
        """Note that memory for gradients is allocated: with the first gradient of a unit, or of the root unit in START.

        Memory that is live now counts in the phase before: gradients fill the new memory as live memory is freed.
        """
        is_of_part = id(param) in self._of_units or self._now == START
        if self._now is not None and self._now not in self._starts and is_of_part:
            self._starts[self._now] = self._tracker.begin_peak()

    def add_gradient(self, param: Tensor) -> None:
        """Count a gradient that was made and freed."""
        if self._now is not None:
            self._tracker.held += param.nbytes
            self._gradients[self._now] = self._gradients.get(self._now, 0) + param.nbytes
            self._rest[self._now] = self._rest.get(self._now, 0) + param.nbytes * (id(param) not in self._of_units)

    def see_linear(self, module: nn.Module, args: Any, output: Any) -> None:
        # A recomputation in the backward calls the hooks again. Tiles record no graph, and put no gradient off.
        if self._now is None or torch._C._current_graph_task_id() >= 0 or not torch.is_grad_enabled():
            return
        total = sum(tensor.nbytes for tensor in tensors_of(output))
        for tensor in tensors_of(args):  # several layers may share an input
            storage = tensor.untyped_storage()
            # An id may be reused after its storage is freed, so a weak reference tells whether it is the same storage.
            known = self._inputs.get(id(storage))
            total += tensor.nbytes if known is None or known() is None else 0
            self._inputs[id(storage)] = weakref.ref(storage)
        self._linear[self._now] = self._linear.get(self._now, 0) + total

    def parts(self) -> Mapping[str, ProfilePart]:
        found = {}
        for name in sorted(self._names, key=lambda name: (name != START, name == END)):
            before, after, peak, forward = self._forward[name]
            nothing = (before, before, before, before, OperationCounts())
            start, rest, holding_peak, end, backward = self._backward.get(name, nothing)
            found[name] = ProfilePart(
                kept_bytes=after - before,
                forward_peak_bytes=peak - before,
                backward_start_bytes=max(start - before, 0),
                backward_rest_bytes=max(rest - before, 0),
                backward_end_bytes=max(end - before, 0),
                output_bytes=self._outputs.get(name, 0),
                rest_gradient_bytes=self._rest.get(name, 0),
                gradient_bytes=self._gradients.get(name, 0),
                holding_peak_bytes=max(holding_peak - before, 0),
                linear_bytes=self._linear.get(name, 0),
                forward_flops=forward.flops,
                backward_flops=backward.flops,
                forward_traffic=forward.traffic,
                backward_traffic=backward.traffic,
                forward_operations=forward.operations,
                backward_operations=backward.operations,
                forward_exchanges=tuple(forward.exchanges),
                backward_exchanges=tuple(backward.exchanges),
            )
        return found

    def _close_forward(self) -> None:
        if self._now is not None:
            tracker = self._tracker
            self._forward[self._now] = (self._begun, tracker.live, tracker.peak, tracker.counts)
        self._now = None

    def _end_part(self, name: str, output: Any) -> None:
        """Count a part's output. The backward of the part begins when the output's gradient exists."""
        tensors = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
        self._outputs[name] = sum(tensor.nbytes for tensor in tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        # The first gradient of an output begins the part. An output with several tensors gets several gradients.
        if self._now != name and name not in self._backward:
            self._close_backward()
            self._begin_backward(name)

    def _begin_backward(self, name: str) -> None:
        self._now = name
        self._tracker.begin()

    def _close_backward(self) -> None:
        if self._now is not None:
            tracker = self._tracker
            start, rest = self._starts.get(self._now, tracker.peak), max(tracker.peak, tracker.live)
            self._backward[self._now] = (start, rest, tracker.holding_peak, tracker.live, tracker.counts)
        self._now = None


class _Attention(TorchFunctionMode):
    """Calls the device's fused attention kernel, which torch decomposes on the meta device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if self._device == "cpu":
            # torch's CPU kernel refuses dropout, and the dropout of its fallback is not planned.
            return _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        # As torch chooses on CUDA: the flash kernel takes 16-bit numbers without a mask.
        if attn_mask is None and query.dtype.itemsize == 2:
            return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]


def _meta_copy(model: nn.Module, dtypes: Dtypes) -> nn.Module:
    """Copy the model to the meta device, with parameters in their compute dtypes."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        empty = torch.empty(param.shape, dtype=dtypes.of(param), device="meta")
        memo[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    # The memo holds the meta tensors already, so the copy allocates no values and tied parameters stay tied.
    copied = copy.deepcopy(model, memo)
    copied.train(model.training)
    return copied


def _after_blocks(model: nn.Module) -> nn.Module | None:
    blocks = find_blocks(model)
    return blocks[-1][1] if blocks else None


def _on_meta(batch: Any, rows: int, dtype: torch.dtype | None) -> Any:
    """Make a meta batch of `rows` rows like those of `batch`."""
    if isinstance(batch, SequenceShard):
        return batch.changed(lambda inputs: cast(dict[str, Any], _on_meta(inputs, rows, dtype)))

    def make(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = (rows, *value.shape[1:]) if value.dim() else ()
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return torch.empty(shape, dtype=wanted, device="meta")

    return tree_map(make, batch)


def _num_tokens(batch: Any, rows: int) -> int:
    """Return the number of tokens in `rows` whole rows like those of `batch`."""
    whole = [tensor for tensor in tensors_of(batch) if not tensor.is_floating_point() and tensor.dim() > 1]
    return rows * whole[0][0].numel() if whole else rows
