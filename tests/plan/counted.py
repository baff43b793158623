"""What a plan says that a rank takes and sends in a step, and what is there: bytes added up at each operation."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.comm.p2p import P2P
from lowtide.comm.shared_memory import SharedMemoryTransport
from lowtide.comm.sockets import SocketTransport
from lowtide.engine.blueprint.axes import EXPERT, SEQUENCE, TENSOR
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.blueprint.footprint import Footprint, MemoryPhase
from lowtide.engine.config.config import Config
from lowtide.engine.model.prepared_model import tiles_of
from lowtide.engine.plan.estimate import MachineWork, Resting, estimate, writes_gradients
from lowtide.engine.plan.layered import LayeredParts
from lowtide.engine.plan.llama import Llama, Shape
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.pipelined import PipelineParts, ScheduleRun, fast_simulation_of
from lowtide.engine.plan.profile import Profile
from lowtide.engine.plan.splits import PlannedSplits
from lowtide.engine.plan.stages import Stages
from tests.engine.test_blueprint import frozen_gpt, staging_bytes
from tests.engine.test_memory import _has_memory
from tests.kit import models
from tests.kit.training import rank_and_world, settings

ROWS = 8  # of a microbatch
TOLERANCE = 0.03  # of a peak; bytes that are sent are exact
AXES = EXPERT, SEQUENCE, TENSOR  # of ranks that share a sample
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
SHARED: dict[str, Any] = {"communication": {"transport": "shared_memory"}}
SHAPE = Shape(layers=2, hidden=64, heads=4, vocabulary=301, sequence=48, kv_heads=2, mlp=160)


class FusedBlock(nn.Module):
    """Attention in one kernel, and a linear layer large enough for its gradient to be written where it is staged."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(x)))


class Experts(nn.Module):
    """All experts of a layer, each of which computes all tokens: the shapes do not depend on who is chosen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, width, 2 * width) / 8)
        self.down = nn.Parameter(torch.randn(4, 2 * width, width) / 8)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        made = torch.tanh(hidden_states @ self.up) @ self.down  # (experts, tokens, width)
        is_chosen = top_k_index == torch.arange(self.num_experts, device=top_k_index.device)[:, None, None]
        return (made * (is_chosen * top_k_weights).sum(2, keepdim=True)).sum(0)


class MlpBlock(nn.Module):
    """An MLP in a module of its own, beside which the rest keeps little. experts: each pair is chosen as often."""

    def __init__(self, width: int, num_inner: int, has_experts: bool) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, num_inner), nn.GELU(), nn.Linear(num_inner, width))
        if has_experts:
            self.router, self.experts = nn.Linear(width, 2), Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(x)
        if not hasattr(self, "experts"):
            return x
        flat = x.flatten(0, 1)
        pairs = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]], device=x.device)
        index = pairs[torch.arange(len(flat), device=x.device) % len(pairs)]
        made: Tensor = self.experts(flat, index, self.router(flat).softmax(-1))
        return x + made.view(x.shape)


class MlpGPT(nn.Module):
    """Most of what it keeps without tiles are logits and what lies inside of its MLPs."""

    def __init__(self, width: int, inner: int, layers: int, has_experts: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SHAPE.vocabulary, width)
        self.blocks = nn.ModuleList(MlpBlock(width, inner, has_experts) for _ in range(layers))
        self.head = nn.Linear(width, SHAPE.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, shift_labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), shift_labels.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": partial(models.TinyGPT, width=64, layers=3),
    "deep gpt": partial(models.TinyGPT, width=64, layers=4),
    "tied gpt": partial(models.TinyGPT, tied=True),
    "frozen gpt": partial(frozen_gpt, 4),
    "long gpt": partial(MlpGPT, 32, 256, 3, False),
    "expert gpt": partial(MlpGPT, SHAPE.hidden, 2 * SHAPE.hidden, SHAPE.layers, True),
    "llama": partial(Llama, SHAPE),
    "fused": lambda: models.Chain(*(FusedBlock(128) for _ in range(2))),
    "deep fused": lambda: models.Chain(*(FusedBlock(128) for _ in range(4))),
}


def batch_of(model: str, rows: int = ROWS) -> Any:
    generator = torch.Generator().manual_seed(0)
    if "fused" in model:
        return (torch.randn(rows, 8, 128, generator=generator),)
    if model in ("llama", "expert gpt"):
        ids, labels = (torch.randint(SHAPE.vocabulary, (rows, SHAPE.sequence), generator=generator) for _ in range(2))
        return {"input_ids": ids, "position_ids": torch.arange(SHAPE.sequence).repeat(rows, 1), "shift_labels": labels}
    if model == "long gpt":
        return (torch.randint(SHAPE.vocabulary, (rows, 97), generator=generator),) * 2
    return models.token_batch(0, rows)


def config_of(stage: int, every: int = 0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """zero: keys of zero_optimization."""
    values: dict[str, Any] = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": accumulation}
    values |= {"activation_checkpointing": {"every": every}, "communication": {"transport": "sockets"}}
    return settings(stage, zero_optimization=more.pop("zero", {}), **{**values, **more})


@dataclass(frozen=True)
class Case:
    """A step of a model. before: the steps before it, until buffers that take turns are as large as they become.

    messages: bytes of messages of which a plan counts as many as may be on their way, and not all are.
    """

    model: str
    config: dict[str, Any]
    before: int = 1
    messages: int = 0
    has_peak: bool = True  # of small models what is not counted is more than the tolerance

    @property
    def accumulation(self) -> int:
        found: int = self.config["gradient_accumulation_steps"]
        return found

    @property
    def whole_batch(self) -> Any:
        return batch_of(self.model, ROWS * self.accumulation)


@dataclass(frozen=True)
class Numbers:
    """Of a rank. sent: by gathers and reductions ("groups"), between stages ("stages"), and over each of AXES.

    on_their_way: bytes of the peak that are there only as long as messages and files are.
    """

    peak: int
    sent: dict[str, int]
    on_their_way: int = 0


def blueprint_of(case: Case, num_ranks: int) -> tuple[nn.Module, Blueprint]:
    """Of a model on the meta device."""
    with torch.device("meta"):
        module = MODELS[case.model]()
    return module, Blueprint.of(Config.load(case.config).resolve(num_ranks), module, num_ranks)


def profile_of(case: Case, rank: int, num_ranks: int) -> tuple[Blueprint, Profile]:
    """Of a microbatch."""
    module, blueprint = blueprint_of(case, num_ranks)
    splits = PlannedSplits.of(blueprint, blueprint.parallel_dims.place(rank, (TENSOR,)))
    tiles, every = tiles_of(blueprint.config), case.config["activation_checkpointing"]["every"]
    run = MetaRun(module, blueprint.units, blueprint.dtypes, "cpu", tiles=tiles, splits=splits)
    return blueprint, run.profile(batch_of(case.model), ROWS, every, writes_gradients(blueprint))


def planned(case: Case, rank: int, num_ranks: int, blueprint: Blueprint, profile: Profile) -> Numbers:
    machine, place = Machine(devices_per_host=num_ranks, device="cpu"), blueprint.place_of(rank)
    calls = [call for part in profile.parts.values() for call in part.exchanges]
    sent = {axis: case.accumulation * sum(call.sent for call in calls if call.axis == axis) for axis in AXES}
    if blueprint.pipeline is None:
        found = estimate(blueprint, machine, profile, place)
        peak, of_links = found.peak_bytes, found.sent
    elif blueprint.is_layered:
        layers = LayeredParts(blueprint, machine, place)
        found = layers.estimate(blueprint.config, Stages(layers.split, profile, MachineWork(profile, machine)))
        peak, of_links = found.peak_bytes, found.sent
    else:
        schedule = blueprint.pipeline.schedule
        stages = Stages(blueprint.pipeline.split, profile, MachineWork(profile, machine))
        run = ScheduleRun.of(fast_simulation_of(schedule), stages.costs(0.0), schedule.num_microbatches)
        parts = PipelineParts(blueprint, machine)
        peak, of_links = parts.memory(stages, run)[place][1], parts.sent(stages, run)[place]
    of_groups = sum(of_links.get(link, 0) for link in ("intra", "inter")) - sum(sent.values())
    footprint = Footprint(blueprint, rank)
    rests = Resting.of(blueprint, footprint, place)
    moving = rests.kinds["buffer_bytes"] - footprint.at(MemoryPhase.REDUCED, gathers=False).staging
    return Numbers(peak, {**sent, "groups": of_groups, "stages": of_links.get("pipe", 0)}, moving)


def measured(case: Case) -> Numbers:
    torch.manual_seed(0)
    counted = {"groups": 0, "stages": 0}
    send, send_on = SocketTransport._send, P2P.send

    def count(self: SocketTransport, tensors: dict[int, Tensor], tag: int, what: str) -> Any:
        is_of_group = " of unit" in what and not what.startswith("norms")  # of optimizers that look at whole parameters
        is_counted = is_of_group or "tied" in what or what.startswith("matrices back")
        counted["groups"] += sum(one.nbytes for one in tensors.values()) if is_counted else 0
        return send(self, tensors, tag, what)

    def count_on(self: P2P, tensor: Tensor, place: int, tag: int, what: str) -> Any:
        counted["stages"] += tensor.nbytes
        return send_on(self, tensor, place, tag, what)

    with lowtide.initialize(MODELS[case.model](), case.config) as engine:
        for _ in range(case.before):
            engine.train_step(case.whole_batch)
        exchanges = {axis: engine._mesh.exchange((axis,)) for axis in AXES}
        before = {axis: exchange.bytes_sent for axis, exchange in exchanges.items()}
        live, batch = LiveBytes(engine), case.whole_batch
        with ExitStack() as stack:
            stack.enter_context(patch.object(SocketTransport, "_send", count))
            stack.enter_context(patch.object(P2P, "send", count_on))
            if case.has_peak and is_watched(case, *rank_and_world()):
                stack.enter_context(live)
            engine.train_step(batch)
        sent = {axis: exchange.bytes_sent - before[axis] for axis, exchange in exchanges.items()}
        apart = exchanges[EXPERT]._axis.transport  # data-parallel ranks have another transport for gradients
        slots = sum(slot[apart.rank].nbytes for slot in apart._slots) if isinstance(apart, SharedMemoryTransport) else 0
    return Numbers(live.peak + slots, {**sent, **counted})


def is_first(case: Case, rank: int, num_ranks: int) -> bool:
    """Of the ranks of a stage. What others sum of a shard may be a little more or less."""
    return rank % (num_ranks // case.config.get("parallel", {}).get("pipeline", 1)) == 0


def is_watched(case: Case, rank: int, num_ranks: int) -> bool:
    """Of ranks on two axes the first and the last: between them they are at both places of each."""
    return is_first(case, rank, num_ranks) or rank == num_ranks - 1


def measured_of_all(cases: Mapping[str, Case]) -> dict[str, Numbers]:
    return {name: measured(case) for name, case in cases.items()}


def compare(case: Case, measured_by_rank: list[Numbers]) -> list[str]:
    """Where plan and step differ. Ranks with the same part of the layers have the same profile."""
    num_ranks, wrong = len(measured_by_rank), list[str]()
    profiles: dict[int, tuple[Blueprint, Profile]] = {}
    dims = blueprint_of(case, num_ranks)[1].parallel_dims
    for rank, found in enumerate(measured_by_rank):
        if is_watched(case, rank, num_ranks):
            place = dims.place(rank, (TENSOR,))
            if place not in profiles:
                profiles[place] = profile_of(case, rank, num_ranks)
            said = planned(case, rank, num_ranks, *profiles[place])
            wrong += [f"rank {rank}: {text}" for text in _compared(case, rank, num_ranks, said, found)]
    return wrong


def _compared(case: Case, rank: int, num_ranks: int, said: Numbers, found: Numbers) -> list[str]:
    wrong = []
    beyond = said.peak - found.peak
    numbers_bytes = 4 * 4 + 4 + 1  # that no plan counts: of four losses, the gradient of one, and the flag of a batch
    is_close = (
        -numbers_bytes <= beyond <= case.messages
        if case.messages
        else (-TOLERANCE * found.peak <= beyond <= TOLERANCE * found.peak + said.on_their_way)
    )
    if case.has_peak and not is_close:
        wrong.append(f"peak planned {said.peak:,}, measured {found.peak:,} ({beyond / found.peak:+.1%})")
    parallel = case.config.get("parallel", {})
    kinds = [] if "pipeline" in parallel else [*AXES]
    over_sockets = case.config["communication"]["transport"] == "sockets"
    if is_first(case, rank, num_ranks) and over_sockets:
        kinds += ["groups", "stages"] if {"tensor", "sequence"}.isdisjoint(parallel) else []
    wrong += [
        f"planned to send {said.sent[kind]:,} bytes ({kind}), sent {found.sent[kind]:,}"
        for kind in kinds
        if said.sent[kind] != found.sent[kind]
    ]
    if kinds and num_ranks > 1 and over_sockets and not sum(found.sent.values()):
        wrong.append("nothing was sent")
    return wrong


class LiveBytes(TorchDispatchMode):
    """The most of the engine's bytes together with storages that operations have made since the beginning."""

    def __init__(self, engine: lowtide.Engine) -> None:
        super().__init__()
        self._engine = engine
        self._gradients = [gradient for unit in engine._runner.passes.units for gradient in unit.gradients]
        self._staging = staging_bytes(engine)
        self._alive: dict[int, tuple[Any, int, int]] = {}  # (reference, address, bytes)
        self._made: dict[int, int] = {}  # address -> bytes of what is alive and counts
        self._made_bytes = 0  # their sum
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tensors_of((args, tuple((kwargs or {}).values()))):
            self._see(one, counts=False)
        result = func(*args, **(kwargs or {}))
        made = [self._see(one, counts=True) for one in tensors_of(result)]
        if any(made):
            self.peak = max(self.peak, self._now())
        return result

    def _see(self, tensor: Tensor, counts: bool) -> bool:
        """Whether it was not there before."""
        storage = tensor.untyped_storage()
        if id(storage) in self._alive:
            return False
        forget = partial(self._forget, id(storage))
        nbytes, address = storage.nbytes() if counts else 0, storage.data_ptr()
        self._alive[id(storage)] = (weakref.ref(storage, forget), address, nbytes)
        self._add(address, nbytes)
        return True

    def _forget(self, key: int, _: object) -> None:
        if key in self._alive:
            _, address, nbytes = self._alive.pop(key)
            self._add(address, -nbytes)

    def _add(self, address: int, nbytes: int) -> None:
        if nbytes:
            self._made[address] = self._made.get(address, 0) + nbytes
            self._made_bytes += nbytes
            if not self._made[address]:
                del self._made[address]

    def _now(self) -> int:
        own = [tensor for one in self._gradients for tensor in one.held()]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in own if _has_memory(tensor)}
        made = self._made_bytes - sum(self._made.get(address, 0) for address in addresses)
        copies = self._engine.optimizer.speculation.nbytes  # operations have made them
        pool = self._engine.optimizer._placements.offloaded._pool
        buffers = pool.bytes_in_use + pool._kept_bytes  # of states that rest in files
        return made + self._engine.memory().total_bytes - copies + buffers + self._staging


def tensors_of(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [one for value in values for one in tensors_of(value)] if isinstance(values, (tuple, list)) else []
