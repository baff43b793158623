"""Record each operation of a step with the bytes held at its end: by kind, by moment of the step, by owner.

[Note: what is recorded] Model states are those of `engine.memory()`, read at each operation that makes memory. Any
other storage counts from the operation that makes it until it is freed. Its owner is the module whose forward made it,
or in a backward the unit that is differentiated. Temporary memory of kernels, and unused memory of an allocator, do
not count. On an accelerator the allocator's peak is reported too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...comm import Activity, Progress
from ...zero.reduced_gradient import ReducedGradient
from ...zero.unit import Unit
from .memory import ModelStateBytes

OTHER = "activation_bytes"  # also the loss, and tensors between operations


@dataclass(frozen=True)
class Sample:
    """The peak of a moment. moment: "forward of blocks.3". bytes: by kind."""

    moment: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Recorded:
    """A recorded step. samples: in time order. owners: (owner, bytes) at the peak, largest first, without states."""

    samples: tuple[Sample, ...]
    owners: tuple[tuple[str, int], ...]

    @property
    def peak(self) -> Sample:
        return max(self.samples, key=lambda sample: sample.total)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records from its entry to its exit, both between two steps. See [Note: what is recorded]."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        states: Callable[[], ModelStateBytes],
        staging_bytes: int,
        progress: Progress,
    ) -> None:
        """states: returns the present bytes. staging_bytes: of slots that are kept."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(part): name for name, part in module.named_modules()}
        self._units, self._states, self._staging, self._progress = units, states, staging_bytes, progress
        self._inside: list[str] = []  # modules in their forward
        self._alive: dict[int, tuple[Any, int, int]] = {}  # (reference, address, bytes)
        self._events: list[tuple[int, int, str]] = []  # storage, bytes made (freed: negative), owner
        self._samples: list[Sample] = []
        self._most = self._num_events_at_peak = 0
        self._not_ours: set[int] = set()  # addresses at the peak that model states count
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        self._handles = [
            # Global hooks: hooks on each module would have to be undone in the order of `ModelPatches`.
            all_modules.register_module_forward_pre_hook(self._enter_module),
            # always_call: a forward that raises must leave the stack too.
            all_modules.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def recorded(self) -> Recorded:
        """Return the record. Raise ValueError if no operation was recorded."""
        if not self._samples:
            raise ValueError("memory: expected a step during the recording, found none; call engine.train_step in it")
        held: dict[int, tuple[int, str]] = {}
        # Owners at the peak are found by a second run through the events: a copy at each new peak would cost more.
        for key, nbytes, owner in self._events[: self._num_events_at_peak]:
            if nbytes < 0:
                held.pop(key, None)
            else:
                held[key] = nbytes, owner
        owners: Counter[str] = Counter()
        for key, (nbytes, owner) in held.items():
            if key not in self._not_ours:
                owners[owner] += nbytes
        return Recorded(tuple(self._samples), tuple(owners.most_common()))

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        # Global hooks also see modules of other models in the process, for example a teacher.
        if id(module) in self._names:
            self._inside.append(self._names[id(module)])

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self._names and self._inside:
            self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A storage that is first seen as an input is older than the recording, and counts as nothing until it is freed.
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, Tensor):
                self._see(one, "")
        result = func(*args, **(kwargs or {}))
        moment, owner = self._now()
        made = [self._see(one, owner) for one in tree_leaves(result) if isinstance(one, Tensor)]
        # Only new memory can make a peak.
        if any(made):
            self._take(moment)
        return result

    def _now(self) -> tuple[str, str]:
        """Return (moment, owner of memory that is made now)."""
        activity, microbatch, unit = self._progress.doing
        # In a backward a checkpoint runs forwards again. Their memory belongs to the unit that is differentiated.
        name = self._inside[-1] if self._inside and activity is not Activity.BACKWARD else ""
        place = f", microbatch {microbatch}" if microbatch >= 0 else ""
        # Code between modules and updates have no owner but the activity.
        moment, owner = (
            f"{activity.value} of {one}" if one else activity.value for one in (unit or name, name or unit)
        )
        return f"{moment}{place}", owner

    def _see(self, tensor: Tensor, owner: str) -> bool:
        """Return True for a new storage. owner: "" for storages made before the recording, which do not count."""
        storage = tensor.untyped_storage()
        # torch keeps a single Python object for a storage while anything refers to it, so its id identifies the memory.
        key = id(storage)
        if key in self._alive:
            return False
        nbytes = storage.nbytes() if owner else 0
        # `_alive` must hold the reference: a weak reference that is dropped calls nothing back.
        self._alive[key] = weakref.ref(storage, partial(self._forget, key, nbytes)), storage.data_ptr(), nbytes
        if nbytes:
            self._events.append((key, nbytes, owner))
        return True

    def _forget(self, key: int, nbytes: int, _: Any) -> None:
        self._alive.pop(key, None)
        if nbytes:
            self._events.append((key, -nbytes, ""))

    def _take(self, moment: str) -> None:
        """Keep the held bytes if they are the peak of this moment."""
        gradients = [tensor for unit in self._units for one in unit.gradients for tensor in one.held()]
        # `measure` counts gradients already. Placeholders have no storage to ask.
        counted = {one.untyped_storage().data_ptr() for one in gradients if not isinstance(one, ReducedGradient)}
        made = sum(nbytes for _, address, nbytes in self._alive.values() if address not in counted)
        states = self._states()
        sample = Sample(
            moment,
            {
                "parameter_bytes": states.parameter_bytes,
                "gradient_bytes": states.gradient_bytes,
                "optimizer_bytes": states.optimizer_bytes,
                "buffer_bytes": self._staging,
                OTHER: made,
            },
        )
        if not self._samples or self._samples[-1].moment != moment:
            self._samples.append(sample)
        elif sample.total > self._samples[-1].total:
            self._samples[-1] = sample
        if sample.total > self._most:
            self._most, self._num_events_at_peak = sample.total, len(self._events)
            self._not_ours = {key for key, (_, address, _) in self._alive.items() if address in counted}
