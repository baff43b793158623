"""What is planned of ranks that share layers and sequences is what they take and send, on each of them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.comm.shared_memory import SharedMemoryTransport
from lowtide.engine.blueprint.axes import EXPERT, SEQUENCE, TENSOR
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.blueprint.footprint import shared_bytes
from lowtide.engine.config.config import Config
from lowtide.engine.plan.estimate import estimate, writes_gradients
from lowtide.engine.plan.llama import Llama, Shape
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.meta_run import MetaRun
from lowtide.engine.plan.pipelined import memory_by_place
from lowtide.engine.plan.profile import Profile
from lowtide.engine.plan.splits import PlannedSplits
from tests.engine.test_blueprint import shared_memory_counted
from tests.kit.ranks import RankPool
from tests.kit.training import rank_and_world
from tests.plan.test_planned_peak import BF16, ROWS, TOLERANCE, LiveBytes, config_of, is_watched

SHAPE = Shape(layers=2, hidden=64, heads=4, vocabulary=301, sequence=48, kv_heads=2, mlp=160)


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(SHAPE.vocabulary, (rows, SHAPE.sequence), generator=generator) for _ in range(2))
    return {"input_ids": ids, "position_ids": torch.arange(SHAPE.sequence).repeat(rows, 1), "shift_labels": labels}


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
        weights = (is_chosen * top_k_weights).sum(2, keepdim=True)
        return (made * weights).sum(0)


class ExpertBlock(nn.Module):
    """Chooses each pair of experts as often, as a plan has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.router, self.experts = nn.Linear(width, 2), Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        flat = (x + self.mlp(x)).flatten(0, 1)
        pairs = torch.tensor([[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]], device=x.device)
        index = pairs[torch.arange(len(flat), device=x.device) % len(pairs)]
        made: Tensor = self.experts(flat, index, self.router(flat).softmax(-1))
        return x + made.view(x.shape)


class ExpertGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SHAPE.vocabulary, SHAPE.hidden)
        self.blocks = nn.ModuleList(ExpertBlock(SHAPE.hidden) for _ in range(SHAPE.layers))
        self.head = nn.Linear(SHAPE.hidden, SHAPE.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), shift_labels.flatten())


def model_of(config: dict[str, Any]) -> nn.Module:
    return ExpertGPT() if "expert" in config["parallel"] else Llama(SHAPE)


def planned(config: dict[str, Any]) -> tuple[Blueprint, Profile, int]:
    """(blueprint, profile of this rank's microbatch, this rank's place)."""
    rank, num_ranks = rank_and_world()
    with torch.device("meta"):
        module = model_of(config)
    blueprint = Blueprint.of(Config.load(config).resolve(num_ranks), module, num_ranks)
    splits = PlannedSplits.of(blueprint, blueprint.parallel_dims.place(rank, (TENSOR,)))
    run = MetaRun(module, blueprint.units, blueprint.dtypes, "cpu", splits=splits)
    every, is_direct = config["activation_checkpointing"]["every"], writes_gradients(blueprint)
    return blueprint, run.profile(batch(1), ROWS, every, is_direct), blueprint.place_of(rank)


def planned_peak(blueprint: Blueprint, profile: Profile, place: int) -> int:
    machine = Machine(devices_per_host=rank_and_world()[1], device="cpu")
    if blueprint.pipeline is not None:
        return memory_by_place(blueprint, machine, profile)[place][1]
    return estimate(blueprint, machine, profile, place).peak_bytes


def measured(config: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """(peak of a step, what this rank's exchanges have sent in it): of one in which slots are as large as they become.

    Three slots of shared memory, or of experts, take turns: each has had the largest group after three steps.
    """
    torch.manual_seed(0)
    engine = lowtide.initialize(model_of(config), config)
    microbatches = config["gradient_accumulation_steps"]
    whole = batch(ROWS * microbatches)
    parallel, transport = config["parallel"], config["communication"]["transport"]
    for _ in range(3 if "expert" in parallel or transport == "shared_memory" else 2 if "pipeline" in parallel else 1):
        engine.train_step(whole)
    exchanges = {name: engine._mesh.exchange((name,)) for name in (EXPERT, SEQUENCE, TENSOR)}
    if not is_watched():
        engine.train_step(whole)
        engine.close()
        return 0, {}
    before = {name: exchange.bytes_sent for name, exchange in exchanges.items()}
    with LiveBytes(engine) as live:
        engine.train_step(whole)
    sent = {name: exchange.bytes_sent - before[name] for name, exchange in exchanges.items()}
    apart = exchanges[EXPERT]._axis.transport  # data-parallel ranks have another transport for gradients
    slots = sum(slot[apart.rank].nbytes for slot in apart._slots) if isinstance(apart, SharedMemoryTransport) else 0
    engine.close()
    return live.peak + slots, sent


def compare(cases: dict[str, dict[str, Any]]) -> list[str]:
    wrong = []
    for name, config in cases.items():
        found, sent = measured(config)
        if not is_watched():
            continue
        blueprint, profile, place = planned(config)
        said = planned_peak(blueprint, profile, place)
        calls = [call for part in profile.parts.values() for call in part.exchanges]
        counted = {axis: sum(call.sent for call in calls if call.axis == axis) for axis in sent}
        told = {axis: nbytes * config["gradient_accumulation_steps"] for axis, nbytes in counted.items()}
        if abs(said / found - 1) > TOLERANCE:
            wrong.append(f"{name}: planned {said:,}, measured {found:,} ({said / found - 1:+.1%})")
        if blueprint.pipeline is None and told != sent:
            wrong.append(f"{name}: planned to send {told}, sent {sent}")
    return wrong


def split(stage: int, every: int, accumulation: int, parallel: dict[str, int], **more: Any) -> dict[str, Any]:
    return config_of(stage, every, accumulation, parallel=parallel, **more)


def test_two_ranks(ranks: RankPool) -> None:
    cases = {
        "sequence, stage 0": split(0, 0, 2, {"sequence": 2}),
        "tensor, stage 1": split(1, 1, 1, {"tensor": 2}, communication={"transport": "shared_memory"}),
        "tensor, stage 2": split(2, 0, 2, {"tensor": 2}, **BF16),
        "sequence, stage 3": split(3, 1, 1, {"sequence": 2}),
    }
    assert ranks(2, compare, cases) == [[], []]


def beside_others() -> dict[str, dict[str, Any]]:
    """Beside data-parallel ranks, stages of a pipeline, and each other."""
    return {
        "tensor x data": split(3, 0, 1, {"tensor": 2}),
        "tensor x sequence": split(1, 1, 1, {"tensor": 2, "sequence": 2}, **BF16),
        "parts x stages": split(1, 0, 4, {"tensor": 2, "pipeline": 2, "tensor_sequence": True}, **BF16),
    }


def test_four_ranks(ranks: RankPool) -> None:
    assert ranks(4, compare, beside_others()) == [[]] * 4


NUMBERS_BYTES = 4 * 4 + 4 + 1  # of four losses, the gradient of one, and the flag


def beyond_measured(configs: list[dict[str, Any]]) -> list[int]:
    """Planned peaks, less measured ones, on ranks that are watched."""
    peaks = [measured(config)[0] for config in configs]
    return [planned_peak(*planned(config)) - peak for config, peak in zip(configs, peaks, strict=True) if is_watched()]


def test_sequences_over_stages(ranks: RankPool) -> None:
    """Of messages between stages as many are counted as may be on their way at most, of which not all are.

    Where all are, numbers are left that no plan counts: losses, and a flag of the batch.
    """
    configs = [split(0, 0, 4, {"sequence": 2, "pipeline": 2})]
    message = ROWS * SHAPE.sequence // 2 * SHAPE.hidden * 4
    for found in ranks(4, beyond_measured, configs):
        assert all(-NUMBERS_BYTES <= nbytes <= 5 * message for nbytes in found), (found, message)


def with_experts() -> dict[str, dict[str, Any]]:
    return {
        "stage 1, shared memory": split(1, 1, 2, {"expert": 2}, communication={"transport": "shared_memory"}),
        "stage 3, recomputed": split(3, 1, 1, {"expert": 2}, **BF16),
    }


def test_experts(ranks: RankPool) -> None:
    assert ranks(2, compare, with_experts()) == [[], []]


def test_experts_and_layers(ranks: RankPool) -> None:
    plan = {"plan": {"blocks.*.mlp.0": "column", "blocks.*.mlp.2": "row"}}
    # Nine groups are exchanged, of which each of three slots comes to three.
    cases = {"stage 1": split(1, 1, 1, {"expert": 2, "tensor": 2}, tensor_parallel=plan, **BF16)}
    assert ranks(4, compare, cases) == [[]] * 4


def parts_and_rings() -> dict[str, dict[str, Any]]:
    """What a rank has between split layers, and attention of heads (4) that the ranks do not divide or need not."""
    ring: dict[str, Any] = {"sequence_parallel": {"attention": "ring"}}
    return {
        "parts, recomputed": split(2, 1, 2, {"tensor": 2, "tensor_sequence": True}, **BF16),
        "ring, recomputed": split(3, 1, 2, {"sequence": 2}, **ring, **BF16),
    }


def test_parts_of_tokens_and_rings(ranks: RankPool) -> None:
    assert ranks(2, compare, parts_and_rings()) == [[], []]


def reported(cases: dict[str, dict[str, Any]], folder: str) -> list[str]:
    """What `engine.memory_report()` says of a batch that it has seen a rank's part of."""
    wrong = []
    for name, config in cases.items():
        with lowtide.initialize(model_of(config), {**config, "memory_report": {"folder": folder, "step": 2}}) as engine:
            for _ in range(2):
                engine.train_step(batch(ROWS * config["gradient_accumulation_steps"]))
            found = engine.memory_report()
        said, there = found.predicted_peak_bytes, found.peak_bytes
        if found.why_not or said is None or there is None or abs(said / there - 1) > TOLERANCE:
            wrong.append(f"{name}: {found.why_not}, said {said}, measured {there}")
    return wrong


def test_reports_of_sequences_and_experts(ranks: RankPool, tmp_path: Path) -> None:
    cases = {"sequence": split(1, 0, 2, {"sequence": 2}), "expert": split(3, 0, 2, {"expert": 2})}
    assert ranks(2, reported, cases, str(tmp_path)) == [[], []]


def test_reports_of_layers_over_stages(ranks: RankPool, tmp_path: Path) -> None:
    cases = {"whole tokens": split(0, 0, 4, {"tensor": 2, "pipeline": 2})}
    assert ranks(4, reported, cases, str(tmp_path)) == [[]] * 4


def shared(parallel: dict[str, int]) -> tuple[int, int, int]:
    """(shared memory as planned before the first batch, as mapped, by rank 0 of each axis, slots after a step)."""
    config = split(1, 0, 1, parallel, communication={"transport": "shared_memory"})
    blueprint, profile, _ = planned(config)
    mapped = [0]
    with shared_memory_counted(mapped):
        engine = lowtide.initialize(Llama(SHAPE), config)
    taken = mapped[0]
    engine.train_step(batch(ROWS))
    slots = sum(
        sum(slot[exchange._axis.transport.rank].nbytes for slot in exchange._axis.transport._slots)
        for exchange in engine._mesh._exchanges.values()
        if isinstance(exchange._axis.transport, SharedMemoryTransport)
    )
    engine.close()
    assert slots == profile.slot_bytes
    return shared_bytes(blueprint), taken, slots


def test_slots_in_shared_memory_are_counted(ranks: RankPool) -> None:
    for parallel in ({"tensor": 2}, {"sequence": 2}):
        found = ranks(2, shared, parallel)
        assert found[0][0] == sum(taken for _, taken, _ in found) and found[0][2] > 0
