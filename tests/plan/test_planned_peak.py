"""The planned peak of a rank, and what it sends, are what is there in a step, whatever ranks divide among them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.comm.shared_memory import SharedMemoryTransport
from lowtide.engine.blueprint.footprint import Footprint, MemoryPhase, shared_bytes
from lowtide.engine.blueprint.offload import Placement
from lowtide.engine.config.config import Config
from lowtide.engine.plan.estimate import Activations, writes_gradients
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.pipelined import memory_by_place
from lowtide.engine.plan.profile import ComputePhase, Profile, ProfilePart
from lowtide.engine.report.memory_report import MemoryReport
from lowtide.zero.policy import ZeroPolicy
from tests.engine.test_blueprint import in_few_bits, shared_memory_counted
from tests.kit import models
from tests.kit.features import OF_FOUR_RANKS, OTHER_PEAKS, feature_sets, joined, num_ranks, start_in
from tests.kit.ranks import RankPool
from tests.kit.training import rank_and_world, settings
from tests.plan.counted import (
    BF16,
    MODELS,
    ROWS,
    SHAPE,
    SHARED,
    TOLERANCE,
    Case,
    Numbers,
    batch_of,
    blueprint_of,
    compare,
    config_of,
    measured_of_all,
    profile_of,
)
from tests.zero.test_direct_gradients import direct

HOST: dict[str, Any] = {"device": "cpu"}
FILES: dict[str, Any] = {"device": "nvme", "nvme_path": "FOLDER"}
OFFLOADS = "offload_optimizer", "offload_param"
DELAYED = {"overlap": "delayed", "delay_after_steps": 1}
SPECULATIVE = {"offload_optimizer": {**HOST, "overlap": "speculative"}}
IN_BACKWARD, HPZ = {"update_in_backward": True}, {"zero_hpz_partition_size": 2}
MESSAGE = ROWS * SHAPE.sequence // 2 * SHAPE.hidden * 4


def stages(schedule: str, stage: int, every: int = 0, **more: Any) -> dict[str, Any]:
    pipeline = {"schedule": schedule, **({"chunks": 2} if schedule == "interleaved" else {})}
    return config_of(stage, every, 4, parallel={"pipeline": 2}, pipeline=pipeline, **more)


def layers(stage: int, every: int, accumulation: int, zero: Any = None, **more: Any) -> dict[str, Any]:
    zero = {"layered_gradient_accumulation": True, **(zero or {})}
    return config_of(stage, every, accumulation, zero=zero, **more)


def split(stage: int, every: int, accumulation: int, parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    return config_of(stage, every, accumulation, parallel=parallel, **more)


def whole(kind: str, stage: int, **more: Any) -> dict[str, Any]:
    """An optimizer whose update takes whole parameters, which are then the most of a step."""
    return config_of(stage, 0, 1, optimizer={"type": kind}, **more)


def thin(stage: int, accumulation: int, **more: Any) -> dict[str, Any]:
    low_rank = {"rank": 2, "start_step": 2, "min_compression_rate": 2}
    return config_of(stage, 0, accumulation, communication={"transport": "sockets", "power_sgd": low_rank}, **more)


def small(config: dict[str, Any], model: str = "frozen gpt") -> Case:
    return Case(model, config, has_peak=False)


def in_bits(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**config, "communication": in_few_bits(**more)}


PARTS = {"tensor": 2, "tensor_sequence": True}
COLUMNS = {"tensor_parallel": {"plan": {"blocks.*.mlp.0": "column", "blocks.*.mlp.2": "row"}}}
RING: dict[str, Any] = {"sequence_parallel": {"attention": "ring"}}
# Steps of so many ranks: what the sets of features below lack. They have stages, places, axes and precisions together.
TABLE: dict[tuple[str, int], dict[str, Case]] = {
    ("alone", 1): {
        "stage 0": Case("gpt", config_of(0, 0, 1, **BF16)),
        "stage 1": Case("fused", config_of(1, 0, 1)),
        "stage 3": Case("fused", config_of(3, 0, 2, **BF16)),
        # Of two ranks the plan has what may be: it depends on when messages come.
        "speculative, stage 3": Case("fused", config_of(3, 1, 1, zero=SPECULATIVE)),
        "updated in backward": Case("fused", config_of(0, 0, 1, zero=IN_BACKWARD)),
        "tiles of MLPs": Case("long gpt", config_of(0, 0, 1, tiles={"mlp": 50})),
        "muon": Case("fused", whole("muon", 1, **BF16)),
    },
    ("data", 2): {
        "speculative": Case("gpt", config_of(0, 1, 1, zero=SPECULATIVE, **BF16)),
        "tiles of the loss": Case("long gpt", config_of(3, 1, 1, tiles=50)),
        "power sgd, stage 0": Case("fused", thin(0, 2), 4),
        "power sgd, stage 1": Case("fused", thin(1, 1), 4),
        "frozen": small(config_of(2, 0, 1, **BF16)),
        "five microbatches": small(config_of(3, 0, 5)),
    },
    ("offload", 2): {
        "delayed": Case("gpt", config_of(1, zero={"offload_optimizer": {**HOST, **DELAYED}}), 2),
        "delayed, in files": Case("fused", config_of(1, zero={"offload_optimizer": {**FILES, **DELAYED}}), 2),
    },
    ("several axes", 4): {
        "hybrid 1": Case("fused", config_of(1, 0, 2, zero={"shard_size": 2}, **BF16), 2),
        "hpZ": Case("gpt", config_of(3, 0, 2, zero=HPZ, **BF16), 2),
        "quantized 2, exact in a host": small(in_bits(config_of(2), gradient_bits_in_host=None)),
        "quantized 3": small(in_bits(config_of(3, 0, 2, **BF16), weight_bits=4, frozen_weight_bits=8)),
        "quantized hpZ": small(in_bits(config_of(3, zero=HPZ), weight_bits=4)),
    },
    ("layer by layer", 2): {
        "files": Case("deep gpt", layers(3, 1, 3, dict.fromkeys(OFFLOADS, FILES))),
    },
    ("stages", 2): {
        "stage 2": Case("deep fused", stages("zb-h1", 2, 1)),
        "stage 3": Case("deep gpt", stages("zb-v", 3, 1, **BF16)),
        "interleaved": Case("deep fused", stages("interleaved", 0, 1, **BF16)),
        "tiles": Case("long gpt", stages("zb-h1", 0, tiles={"mlp": 50})),
    },
    ("stages x data", 4): {
        "stage 2": Case("deep gpt", stages("zb-v", 2)),
        "stage 3": Case("deep fused", stages("1f1b", 3, 1, **BF16)),
        "tied": small(stages("1f1b", 2, **BF16), "tied gpt"),
        "halves": small(stages("zb-h1", 2, **BF16), "tied gpt"),
    },
    ("layers and sequences", 2): {
        "tensor, stage 1": Case("llama", split(1, 1, 1, {"tensor": 2}, **SHARED), 3),
        "sequence, stage 3": Case("llama", split(3, 1, 1, {"sequence": 2})),
        # What a rank has between split layers, and attention of heads (4) that the ranks need not divide.
        "parts": Case("llama", split(2, 1, 2, PARTS, **BF16)),
        "ring": Case("llama", split(3, 1, 2, {"sequence": 2}, **RING, **BF16)),
    },
    ("layers and sequences", 4): {
        "tensor x sequence": Case("llama", split(1, 1, 1, {"tensor": 2, "sequence": 2}, **BF16)),
        "parts x stages": Case("llama", split(1, 0, 4, {"pipeline": 2, **PARTS}, **BF16), 2),
        "sequence x stages": Case("llama", split(0, 0, 4, {"sequence": 2, "pipeline": 2}), 2, messages=5 * MESSAGE),
    },
    ("experts", 2): {
        "stage 1": Case("expert gpt", split(1, 1, 2, {"expert": 2}, **SHARED), 3),
        "stage 3": Case("expert gpt", split(3, 1, 1, {"expert": 2}, **BF16), 3),
    },
    # Gradients of experts are summed over the two ranks that have the same ones, all others over four.
    ("experts", 4): {
        "x data, stage 1": small(split(1, 0, 2, {"expert": 2}), "expert gpt"),
        "x data, stage 3": small(split(3, 0, 1, {"expert": 2}), "expert gpt"),
        "an expert each": Case("expert gpt", split(0, 0, 1, {"expert": 4}), 3),
        # Nine groups are exchanged, of which each of three slots comes to three.
        "x tensor": Case("expert gpt", split(1, 1, 1, {"expert": 2, "tensor": 2}, **COLUMNS, **BF16), 3),
    },
    ("matrices to owners", 2): {
        **{f"muon, stage {stage}": small(whole("muon", stage)) for stage in (0, 1, 3)},
        "adafactor, stage 0": small(whole("adafactor", 0)),
        "muon, bf16": small(whole("muon", 2, **BF16)),
        "layer by layer": small(layers(1, 0, 2, optimizer={"type": "muon"})),
    },
    ("matrices to owners", 4): {
        "muon, stage 0": small(whole("muon", 0)),
        "hybrid": small(whole("muon", 1, zero={"shard_size": 2})),
        "stages": small(stages("1f1b", 2, optimizer={"type": "adafactor"}), "deep gpt"),
        "stages, stage 0": small(stages("1f1b", 0, optimizer={"type": "muon"}), "deep gpt"),
    },
}


def in_folder(case: Case, folder: Path) -> Case:
    """With the files of what is offloaded there."""
    return replace(case, config=json.loads(json.dumps(case.config).replace("FOLDER", str(folder))))


@pytest.mark.parametrize(("what", "num_ranks"), TABLE)
def test_peak_and_bytes_sent_are_those_of_a_step(ranks: RankPool, tmp_path: Path, what: str, num_ranks: int) -> None:
    cases = {name: in_folder(case, tmp_path) for name, case in TABLE[what, num_ranks].items()}
    found = ranks(num_ranks, measured_of_all, cases, timeout=120)
    for name, case in cases.items():
        assert compare(case, [numbers[name] for numbers in found]) == [], name


SETS = {  # the first ones have each feature, and three of four pairs
    2: feature_sets(*OTHER_PEAKS, *OF_FOUR_RANKS)[:9],
    4: [names for names in feature_sets(*OTHER_PEAKS) if num_ranks(names) == 4][:4],
}


def case_with(names: Sequence[str]) -> Case:
    """A step with these features, after so many that each buffer that takes turns is as large as it becomes."""
    config = joined(names) or {}
    zero = config.pop("zero_optimization", {})
    accumulation = config.pop("gradient_accumulation_steps", 2 if "pipeline" in names else 1)
    saved = {"every": 0, **config.pop("activation_checkpointing", {})}
    sent = {"transport": "sockets", **config.pop("communication", {})}
    more = {**config, "activation_checkpointing": saved, "communication": sent}
    return Case("gpt", config_of(zero.pop("stage", 0), 0, accumulation, zero=zero, **more), 3)


def measured_in(folder: Path, cases: Mapping[str, Case]) -> dict[str, Numbers]:
    start_in(folder)
    return measured_of_all(cases)


@pytest.mark.parametrize("size", SETS)
def test_peak_and_bytes_sent_are_those_of_a_step_with_all_features(ranks: RankPool, tmp_path: Path, size: int) -> None:
    cases = {", ".join(names): case_with(names) for names in SETS[size]}
    found = ranks(size, measured_in, tmp_path, cases, timeout=240)
    wrong = {name: compare(case, [numbers[name] for numbers in found]) for name, case in cases.items()}
    assert {name: texts for name, texts in wrong.items() if texts} == {}


# -- what a memory report says of it ----------------------------------------------------------------------------------


REPORTED: dict[str, Case] = {
    "native": Case("gpt", config_of(3, communication={"transport": "native"})),
    "stages": Case("gpt", {**config_of(1, 0, 2), "parallel": {"pipeline": 2}}),
    "layer by layer": Case("deep gpt", layers(3, 1, 3, **BF16)),
    "sequence": Case("llama", split(1, 0, 2, {"sequence": 2})),
}


def reported(case: Case, folder: Path) -> MemoryReport:
    """Of the second step."""
    config = {**case.config, "memory_report": {"folder": str(folder), "step": 2}}
    with lowtide.initialize(MODELS[case.model](), config) as engine:
        for _ in range(2):
            engine.train_step(case.whole_batch)
        return MemoryReport.load(folder / f"memory-rank{engine.rank}.json")


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_has_what_was_predicted_and_what_was_held(ranks: RankPool, tmp_path: Path, name: str) -> None:
    case = REPORTED[name]
    for found in ranks(2, reported, case, tmp_path):
        assert not found.why_not and found.predicted_peak_bytes == pytest.approx(found.peak_bytes, rel=TOLERANCE)
        assert found.measured["optimizer_bytes"] == found.predicted["optimizer_bytes"]
        if "parallel" in case.config or "layer" in name:
            continue
        assert found.measured["buffer_bytes"] == found.predicted["buffer_bytes"]
        for kind in ("parameter_bytes", "activation_bytes"):
            assert found.measured[kind] == pytest.approx(found.predicted[kind], rel=TOLERANCE), kind
        assert sum(found.at_peak.values()) == found.peak_bytes
        others = sum(nbytes for _, nbytes in found.owners)
        assert others == pytest.approx(found.at_peak["activation_bytes"], rel=TOLERANCE)


def test_a_prediction_that_there_is_not_has_a_reason(tmp_path: Path) -> None:
    config = settings(memory_report={"folder": str(tmp_path), "step": 2}, tiles={"loss": 8})
    with lowtide.initialize(models.tiny_gpt(), config) as engine:
        for step in range(2):
            engine.train_step(models.token_batch(step, 2))
        assert "the model already has tiles; only `lowtide plan` predicts them" in engine.memory_report().why_not


# -- where a step does not show it ------------------------------------------------------------------------------------


def test_gradients_of_the_rest_wait_until_the_backward_has_ended() -> None:
    """Where they are not added to those of the microbatches before."""
    of_rest = {"first": 1, "second": 2, "third": 4}
    parts = {
        name: ProfilePart(kept_bytes=100, backward_start_bytes=20, backward_rest_bytes=30, rest_gradient_bytes=nbytes)
        for name, nbytes in of_rest.items()
    }

    def at(stage: int, accumulation: int, phase: ComputePhase) -> list[int]:
        config = Config.load({"gradient_accumulation_steps": accumulation})
        activations = Activations(Profile(1, 1, parts), config, ZeroPolicy.from_stage(stage), Placement.MODEL)
        return [activations.at(name, phase) for name in parts]

    for stage, accumulation in ((0, 1), (3, 1), (2, 2)):
        assert at(stage, accumulation, ComputePhase.FORWARD) == [0, 100, 200]
        assert at(stage, accumulation, ComputePhase.BACKWARD_START) == [0 + 20 + 2 + 4, 100 + 20 + 4, 200 + 20]
        assert at(stage, accumulation, ComputePhase.BACKWARD_REST) == [0 + 30 + 2 + 4, 100 + 30 + 4, 200 + 30]
    assert at(1, 2, ComputePhase.BACKWARD_REST) == [0 + 30, 100 + 30, 200 + 30]


def written_ones(configs: list[dict[str, Any]]) -> list[tuple[bool, bool]]:
    """Whether gradients of weights are made where they are staged: as it is planned, and as it is."""
    found = []
    for config in configs:
        case = Case("gpt", config)
        said = writes_gradients(blueprint_of(case, rank_and_world()[1])[1])
        with direct(True) as written, lowtide.initialize(MODELS["gpt"](), config) as engine:
            engine.train_step(case.whole_batch)
        found.append((said, any(written)))
    return found


def test_which_gradients_are_written_where_they_are_staged(ranks: RankPool) -> None:
    sent_in_bf16 = {**BF16, "communication_data_type": "bf16"}
    written = [config_of(2, 0, 2), config_of(3, 0, 1, **sent_in_bf16)]
    others = [config_of(1, 0, 2), config_of(0, 0, 1, **BF16)]
    assert ranks(2, written_ones, written + others) == [[(True, True)] * 2 + [(False, False)] * 2] * 2
    alone = [config_of(3, 0, 1), config_of(0, 0, 1, **sent_in_bf16)]
    assert ranks(1, written_ones, alone) == [[(True, True), (False, False)]]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("1f1b", [100 * (1 + 1 + 0), 100 * (1 + 1 + 1)]), ("interleaved", [100 * (3 + 2 + 1), 100 * (3 + 2 + 1)])],
)
def test_messages_lie_at_the_ends_of_stages_and_one_ahead_for_each(schedule: str, expected: list[int]) -> None:
    """Of a model that keeps nothing, with 100 bytes between stages; and what the stage that computes has received."""
    blueprint, profile = profile_of(Case("deep gpt", stages(schedule, 0)), 0, 2)
    sent = replace(profile, parts={name: ProfilePart(output_bytes=100) for name in profile.parts})
    places = memory_by_place(blueprint, Machine(devices_per_host=2, device="cpu"), sent)
    assert [kinds["activation_bytes"] for kinds, _ in places] == expected


def test_gradients_of_a_stage_that_has_ended_are_final_while_another_computes() -> None:
    """Of a first block whose backward takes a gigabyte, the last of which comes when the rank's other one has ended.

    In shared memory, where shards are given back after a step.
    """
    blueprint, profile = profile_of(Case("deep fused", {**stages("interleaved", 1, 1, **BF16), **SHARED}), 0, 4)
    parts = dict.fromkeys(profile.parts, ProfilePart())
    parts["blocks.0"] = ProfilePart(backward_start_bytes=10**9, holding_peak_bytes=10**9)
    _, peak = memory_by_place(blueprint, Machine(devices_per_host=4, device="cpu"), replace(profile, parts=parts))[0]
    footprint, (first, other) = Footprint(blueprint, 0), blueprint.places[0].trained
    added, final = footprint.gradient(first, MemoryPhase.ACCUMULATING), footprint.gradient(other, MemoryPhase.REDUCED)
    rests = footprint.at(MemoryPhase.BETWEEN_STEPS, gathers=False)
    cast = profile.cast_bytes * 4
    assert final > footprint.gradient(other, MemoryPhase.ACCUMULATING)
    assert peak == rests.parameters + rests.optimizer + rests.staging + added + final + cast + 10**9


def shared(parallel: dict[str, int]) -> tuple[int, int, int]:
    """(shared memory as planned before the first batch, as mapped, by rank 0 of each axis, slots after a step)."""
    case = Case("llama", split(1, 0, 1, parallel, **SHARED))
    blueprint, profile = profile_of(case, *rank_and_world())
    mapped = [0]
    with shared_memory_counted(mapped):
        engine = lowtide.initialize(MODELS["llama"](), case.config)
    taken = mapped[0]
    engine.train_step(batch_of("llama"))
    transports = [exchange._axis.transport for exchange in engine._mesh._exchanges.values()]
    shared = [one for one in transports if isinstance(one, SharedMemoryTransport)]
    slots = sum(slot[transport.rank].nbytes for transport in shared for slot in transport._slots)
    engine.close()
    assert slots == profile.slot_bytes
    return shared_bytes(blueprint), taken, slots


def test_slots_in_shared_memory_are_counted(ranks: RankPool) -> None:
    for parallel in ({"tensor": 2}, {"sequence": 2}):
        found = ranks(2, shared, parallel)
        assert found[0][0] == sum(taken for _, taken, _ in found) and found[0][2] > 0
