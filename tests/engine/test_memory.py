"""Bytes of model states: the formula of the ZeRO paper, written-out arithmetic, and the report of a step."""

import re
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, TypeGuard

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engine.report.memory import predict
from lowtide.zero.reduced_gradient import ReducedGradient
from tests.kit import models
from tests.kit.ranks import on_ranks
from tests.kit.training import settings

EVEN_NUMEL = 4 * 64 * 64  # which 1, 2 and 4 ranks divide into whole blocks


class Even(models.Chain):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def config_of(stage: int, transport: str, is_mixed: bool) -> dict[str, Any]:
    mixed: dict[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    more = {"gradient_accumulation_steps": 2, "communication": {"transport": transport}}
    return settings(stage, **more, **(mixed if is_mixed else {}))


def measured(engine: lowtide.Engine) -> dict[str, int]:
    """Bytes by kind, from the storages themselves; each storage counts once."""
    passes = engine._runner.passes
    groups = [group for unit in passes.units for group in unit.groups]
    gradients = [gradient for unit in passes.units for gradient in unit.gradients]
    kept = [group._memory.own if group.frees_memory else group.full for group in groups]
    optional = [tensor for g in gradients for tensor in (g._local.flat, g.shard, *(p.grad for p in g.group.params))]
    common = [g._memory._common for g in gradients if g._memory._common is not None]
    states = [tensor for shard in engine.optimizer.shards for tensor in shard.memory.states.values()]
    masters = [shard.master for shard in engine.optimizer.shards if shard.master.dtype != shard.group.plan.dtype]
    sharers = groups[0].axes.states.size if groups[0].axes.copies_are_shared else 1
    return {
        "parameter_bytes": sum(tensor.nbytes for tensor in kept) // sharers,
        "gradient_bytes": storage_bytes([tensor for tensor in optional if _has_memory(tensor)])
        + sum(tensor.nbytes for tensor in common) // groups[0].axes.replicas.size,
        "optimizer_bytes": storage_bytes(states + masters),
    }


def _has_memory(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and not isinstance(tensor, ReducedGradient)


def storage_bytes(tensors: list[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@on_ranks(4)
def test_bytes_per_parameter_are_those_of_the_paper() -> None:
    """With all states there and gradients half done."""
    n = 4
    for stage, per_param in enumerate((16.0, 4 + 12 / n, 2 + 14 / n, 16 / n)):
        with lowtide.initialize(Even(), config_of(stage, "sockets", is_mixed=True)) as engine:
            for _ in range(3):
                engine.backward(engine(torch.randn(2, 64)))
                engine.step()
            said = asdict(engine.memory())
            assert sum(said.values()) == sum(measured(engine).values()) == per_param * EVEN_NUMEL
            assert said == asdict(predict(EVEN_NUMEL, stage, n))


PAPER_GB: dict[float, list[tuple[float, ...]]] = {
    7.5e9: [
        (120, 120, 120), (52.5, 41.3, 30), (35.6, 21.6, 7.5), (31.4, 16.6, 1.88), (30.4, 15.4, 0.47), (30.1, 15.1, 0.12)
    ],
    128e9: [
        (2048, 2048, 2048), (896, 704, 512), (608, 368, 128), (536, 284, 32), (518, 263, 8), (513, 257, 2)
    ],
    1e12: [
        (16000, 16000, 16000), (7000, 5500, 4000), (4750, 2875, 1000), (4187, 2218, 250), (4046, 2054, 62.5),
        (4011, 2013, 15.6),
    ],
}  # fmt: skip


def test_the_table_is_that_of_the_paper() -> None:
    """Table 1 of arXiv 1910.02054: GB per rank; printed to three figures there, some of them cut off, not rounded."""
    for size, lines in PAPER_GB.items():
        for count, line in zip((1, 4, 16, 64, 256, 1024), lines, strict=True):
            for stage, expected in enumerate(line, start=1):
                found = predict(int(size), stage, count).total_bytes / 1e9  # the paper counts in powers of ten
                assert found == pytest.approx(expected, rel=0.003 if expected > 1 else 0.03), (count, stage)


def test_a_report_without_a_recording_is_of_now() -> None:
    with lowtide.initialize(models.tiny_gpt(), settings()) as engine:
        engine.train_step(models.token_batch(0, 2))
        report = engine.memory_report()
        assert report.now == vars(engine.memory()) and report.peak_bytes is None
        assert report.predicted["optimizer_bytes"] == engine.memory().optimizer_bytes
        assert "no step was recorded: engine.record_memory()" in report.why_not
        total = {kind: sum(one[kind] for one in report.by_module.values()) for kind in report.now}
        assert total == report.now


def test_a_step_is_recorded_by_hand_and_says_who_held_what() -> None:
    losses = []
    batches = [models.token_batch(step, 16) for step in range(2)]  # activations are more than gradients
    for records in (False, True):
        torch.manual_seed(0)
        with lowtide.initialize(models.tiny_gpt(), settings(train_micro_batch_size_per_gpu=16)) as engine:
            engine.train_step(batches[0])
            with engine.record_memory() if records else nullcontext():
                losses.append(float(engine.train_step(batches[1]).loss))
            report = engine.memory_report()
    assert losses[0] == losses[1]
    assert report.owners and any(name.startswith("forward of blocks.0") for name, _ in report.owners)
    assert re.match(r"(forward|backward)", report.moment)
    moments = [moment for moment, _ in report.samples]
    assert moments.index("forward of blocks.0, microbatch 0") < moments.index("backward of blocks.0, microbatch 0")


def test_an_update_is_of_no_unit() -> None:
    model = torch.nn.Linear(512, 512)
    with lowtide.initialize(model, settings(), loss_fn=lambda output, batch: output.mean()) as engine:
        with engine.record_memory():
            engine.train_step((torch.ones(2, 512),))
        report = engine.memory_report()
    assert report.moment == "update" and "update" in dict(report.owners)
    assert list(report.by_module) == ["(root)"]


def test_a_recording_without_a_step_is_refused() -> None:
    with lowtide.initialize(models.tiny_gpt(), settings()) as engine:
        with (
            pytest.raises(ValueError, match="expected a step during the recording, found none"),
            engine.record_memory(),
        ):
            pass
        with engine.record_memory():
            engine.train_step(models.token_batch(0, 2))
            with pytest.raises(ValueError, match="expected no recording in progress"), engine.record_memory():
                pass
        engine.train_step(models.token_batch(0, 2))
