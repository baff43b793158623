"""The planned peak is what is there: tensors of the model and bytes of the engine, added up at each operation."""

import weakref
from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.model.prepared_model import tiles_of
from lowtide.engine.plan.estimate import Activations, estimate, writes_gradients
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.profile import ComputePhase, Profile, ProfilePart
from lowtide.zero.policy import ZeroPolicy
from tests.engine.test_blueprint import staging_bytes
from tests.engine.test_memory import _has_memory
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, rank_and_world
from tests.zero.test_direct_gradients import direct

ROWS = 8
TOLERANCE = 0.03
Case = tuple[str, dict[str, Any]]  # model, config


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


def gpt() -> nn.Module:
    return models.TinyGPT(width=64, layers=3)


def fused() -> nn.Module:
    return models.Chain(*(FusedBlock(128) for _ in range(2)))


class TiledBlock(nn.Module):
    """An MLP in a module of its own, beside which the rest keeps little."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class LongGPT(nn.Module):
    """Most of what it keeps without tiles are logits and what lies inside of its MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCAB, 32)
        self.blocks = nn.ModuleList(TiledBlock(32) for _ in range(3))
        self.head = nn.Linear(32, models.VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch_of(model: str, seed: int) -> tuple[Tensor, ...]:
    if model == "long":
        ids = torch.randint(models.VOCAB, (ROWS, 97), generator=torch.Generator().manual_seed(seed))
        return ids, ids
    return models.token_batch(seed, ROWS) if model == "gpt" else (torch.randn(ROWS, 24, 128),)


MODELS = {"gpt": gpt, "fused": fused, "long": LongGPT}


def tensors_of(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    many = values if isinstance(values, (tuple, list)) else ()
    return [one for value in many for one in ([value] if isinstance(value, Tensor) else tensors_of(value))]


class LiveBytes(TorchDispatchMode):
    """The most of the engine's bytes together with storages that operations have made since the beginning."""

    def __init__(self, engine: lowtide.Engine) -> None:
        super().__init__()
        self._engine = engine
        self._gradients = [gradient for unit in engine._runner.passes.units for gradient in unit.gradients]
        self._staging = staging_bytes(engine)
        self._alive: dict[int, tuple[Any, int, int]] = {}  # (reference, address, bytes)
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
        nbytes = storage.nbytes() if counts else 0
        self._alive[id(storage)] = (weakref.ref(storage, forget), storage.data_ptr(), nbytes)
        return True

    def _forget(self, key: int, _: object) -> None:
        self._alive.pop(key, None)

    def _now(self) -> int:
        own = [tensor for one in self._gradients for tensor in (one.shard, one._local._flat)]
        own += [param.grad for one in self._gradients for param in one.group.params]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in own if _has_memory(tensor)}
        made = sum(nbytes for _, address, nbytes in self._alive.values() if address not in addresses)
        copies = self._engine.optimizer.speculation.nbytes  # operations have made them
        buffers = self._engine.optimizer._placements.offloaded._pool.bytes_held  # of states that rest in files
        return made + self._engine.memory().total_bytes - copies + buffers + self._staging


def config_of(stage: int, every: int, accumulation: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 0,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": {"every": every},
        "communication": {"transport": "sockets"},
        **more,
    }


def planned_peak(model: str, config: dict[str, Any], num_ranks: int) -> int:
    with torch.device("meta"):
        module = MODELS[model]()
    blueprint = Blueprint.of(Config.load(config).resolve(num_ranks), module, num_ranks)
    run = MetaRun(module, blueprint.units, blueprint.dtypes, "cpu", tiles=tiles_of(blueprint.config))
    profile = run.profile(
        batch_of(model, 0), ROWS, config["activation_checkpointing"]["every"], writes_gradients(blueprint)
    )
    return estimate(blueprint, Machine(devices_per_host=num_ranks, device="cpu"), profile).peak_bytes


def measured_peak(model: str, config: dict[str, Any], before: int) -> int:
    """Of a step that `before` others came before."""
    torch.manual_seed(0)
    engine = lowtide.initialize(MODELS[model](), config)
    microbatches = engine.config.gradient_accumulation_steps or 1

    def step(number: int) -> None:
        for _ in range(microbatches):
            engine.backward(engine(*batch_of(model, number)))
            engine.step()

    for number in range(before):
        step(number)
    live = LiveBytes(engine)
    with live if is_watched() else nullcontext():
        step(before)
    engine.close()
    return live.peak


def is_watched() -> bool:
    """Of ranks on two axes, the first and the last: between them they are at both places of each."""
    rank, num_ranks = rank_and_world()
    return rank in (0, num_ranks - 1)


def measured_all(cases: dict[str, Case], before: int = 1) -> list[int]:
    return [measured_peak(*case, before) for case in cases.values()]


def check(cases: dict[str, Case], by_rank: list[list[int]]) -> None:
    """The plan is the same for all ranks."""
    said = [planned_peak(*case, len(by_rank)) for case in cases.values()]
    assert_planned(cases, dict.fromkeys(range(len(by_rank)), said), by_rank)


def assert_planned(names: Collection[str], said: dict[int, list[int]], found: list[list[int]]) -> None:
    """By rank, and of each name; 0 where nobody has looked."""
    wrong = [
        f"{name}, rank {rank}: planned {planned:,}, measured {there:,} ({planned / there - 1:+.1%})"
        for rank, there_are in enumerate(found)
        for name, planned, there in zip(names, said[rank], there_are, strict=True)
        if there and abs(planned / there - 1) > TOLERANCE
    ]
    assert not wrong and all(found[0]) and all(found[-1]), "\n".join(wrong)


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
UPDATES: dict[str, dict[str, Any]] = {
    "in backward": {"update_in_backward": True},
    "speculative": {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}},
}


def cases() -> dict[str, Case]:
    """Each stage with and without checkpointing; of models, accumulation and dtypes each two meet."""
    found = {}
    for stage, every in product(range(4), (0, 1)):
        model, accumulation = ("gpt", "fused")[(stage + every) % 2], 1 + (stage // 2 + every) % 2
        more = BF16 if stage % 3 == 0 else {}
        name = f"{model}, stage {stage}, every {every}, {accumulation} microbatches{', bf16' if more else ''}"
        found[name] = (model, config_of(stage, every, accumulation, **more))
    # Every second one is of two ranks.
    for update, model, stage, every, more in (
        ("speculative", "fused", 3, 1, {}),  # of two ranks, the plan has what may be: it depends on when messages come
        ("in backward", "fused", 1, 1, BF16),
        ("in backward", "fused", 0, 0, {}),
        ("speculative", "gpt", 0, 1, BF16),
        ("speculative", "fused", 1, 0, BF16),
        ("in backward", "gpt", 3, 0, {}),
    ):
        config = config_of(stage, every, 1, **more)
        config["zero_optimization"] |= UPDATES[update]
        found[f"{model}, stage {stage}, every {every}, updated {update}"] = (model, config)
    for stage, tiles in ((0, {"mlp": 50}), (3, 50)):
        found[f"long, stage {stage}, tiles {tiles}"] = ("long", config_of(stage, stage % 2, 1, tiles=tiles))
    return found


def test_one_rank() -> None:
    some = dict(list(cases().items())[::2])
    check(some, [measured_all(some)])


def test_two_ranks(ranks: RankPool) -> None:
    some = dict(list(cases().items())[1::2])
    check(some, ranks(2, measured_all, some))


def axes() -> dict[str, Case]:
    hybrid, secondary = {"shard_size": 2}, {"zero_hpz_partition_size": 2}
    return {
        "hybrid 1": ("fused", sharded(1, 0, 2, hybrid, **BF16)),
        "hybrid 3": ("gpt", sharded(3, 1, 1, hybrid)),
        "hpZ": ("gpt", sharded(3, 0, 2, secondary, **BF16)),
    }


def sharded(stage: int, every: int, accumulation: int, zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    return config_of(stage, every, accumulation, zero_optimization={"stage": stage, **zero}, **more)


def offloads(folder: str) -> dict[str, Case]:
    host, file = {"device": "cpu"}, {"device": "nvme", "nvme_path": folder}
    delayed = {"overlap": "delayed", "delay_after_steps": 1}
    return {
        "states": ("fused", sharded(2, 0, 2, {"offload_optimizer": host}, **BF16)),
        "states and parameters": ("gpt", sharded(3, 1, 1, {"offload_optimizer": host, "offload_param": host})),
        "in files": ("fused", sharded(3, 0, 2, {"offload_optimizer": file, "offload_param": file}, **BF16)),
        "delayed": ("gpt", sharded(1, 0, 1, {"offload_optimizer": {**host, **delayed}})),
        "delayed, in files": ("fused", sharded(1, 0, 1, {"offload_optimizer": {**file, **delayed}})),
    }


def test_offload(ranks: RankPool, tmp_path: Path) -> None:
    some = offloads(str(tmp_path))
    check(some, ranks(2, measured_all, some, 2))


def test_several_axes(ranks: RankPool) -> None:
    check(axes(), ranks(4, measured_all, axes(), 2))  # until buffers that take turns are as large as they become


def test_gradients_of_the_rest_wait_until_the_backward_has_ended() -> None:
    """Where they are not added to those of the microbatches before."""
    of_rest = {"first": 1, "second": 2, "third": 4}
    parts = {
        name: ProfilePart(kept_bytes=100, backward_start_bytes=20, backward_rest_bytes=30, rest_gradient_bytes=nbytes)
        for name, nbytes in of_rest.items()
    }

    def at(stage: int, accumulation: int, stretch: ComputePhase) -> list[int]:
        config = Config.load({"gradient_accumulation_steps": accumulation})
        activations = Activations(Profile(1, 1, parts), config, ZeroPolicy.from_stage(stage))
        return [activations.at(name, stretch) for name in parts]

    for stage, accumulation in ((0, 1), (3, 1), (2, 2)):
        assert at(stage, accumulation, ComputePhase.FORWARD) == [0, 100, 200]
        assert at(stage, accumulation, ComputePhase.BACKWARD_START) == [0 + 20 + 2 + 4, 100 + 20 + 4, 200 + 20]
        assert at(stage, accumulation, ComputePhase.BACKWARD_REST) == [0 + 30 + 2 + 4, 100 + 30 + 4, 200 + 30]
    assert at(1, 2, ComputePhase.BACKWARD_REST) == [0 + 30, 100 + 30, 200 + 30]


def written_ones(configs: list[dict[str, Any]]) -> list[tuple[bool, bool]]:
    """Whether gradients of weights are made where they are staged: as it is planned, and as it is."""
    _, num_ranks = rank_and_world()
    found = []
    for config in configs:
        with torch.device("meta"):
            module = gpt()
        said = writes_gradients(Blueprint.of(Config.load(config).resolve(num_ranks), module, num_ranks))
        with direct(True) as written, lowtide.initialize(gpt(), config) as engine:
            for _ in range(engine.config.gradient_accumulation_steps or 1):
                engine.backward(engine(*batch_of("gpt", 0)))
                engine.step()
        found.append((said, any(written)))
    return found


def test_which_gradients_are_written_where_they_are_staged(ranks: RankPool) -> None:
    sent_in_bf16 = {**BF16, "communication_data_type": "bf16"}
    written = [config_of(2, 0, 2), config_of(3, 0, 1, **sent_in_bf16)]
    others = [config_of(1, 0, 2), config_of(0, 0, 1, **BF16)]
    assert ranks(2, written_ones, written + others) == [[(True, True)] * 2 + [(False, False)] * 2] * 2
    alone = [config_of(3, 0, 1), config_of(0, 0, 1, **sent_in_bf16)]
    assert ranks(1, written_ones, alone) == [[(True, True), (False, False)]]
