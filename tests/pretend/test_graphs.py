"""Graphs: what the device forbids while one is captured, and trainings that replay them."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.planner import planner
from lowtide.engine.step.graphs import GraphRunner
from lowtide.kernels.optimizer_step import UpdateLaunches
from tests.kit import models
from tests.kit.features import TwoBlocks
from tests.kit.grids import pairs
from tests.kit.ranks import on_device
from tests.kit.training import refusal
from tests.pretend import device
from tests.pretend.kernels import optimizer_kernel
from tests.pretend.test_host_waits import PRECISIONS, make_engine, waits_of
from tests.pretend.test_memory import Peak, allocated, collected as collected_bytes

# -- the device -------------------------------------------------------------------------------------------------------


def captured(run: Callable[[], Any]) -> tuple[Any, Any]:
    """(graph, what `run` has returned)"""
    pretend: Any = torch.get_device_module("pretend")
    graph, stream = pretend.CUDAGraph(), torch.accelerator.current_stream()
    try:
        with pretend.graph(graph):
            return graph, run()
    finally:
        torch.accelerator.set_stream(stream)


@on_device()
def test_a_replay_has_the_bits_of_the_eager_run() -> None:
    """Random numbers, views, writes in place and a recomputed backward too."""
    pretend: Any = torch.get_device_module("pretend")
    weight = torch.randn(8, 8).to("pretend").requires_grad_()
    x, calls = torch.randn(4, 8).to("pretend"), torch.zeros(2, device="pretend")

    def run() -> tuple[Tensor, ...]:
        calls[1:].add_(1)
        hidden = torch.utils.checkpoint.checkpoint(
            lambda: nn.functional.dropout(x @ weight, 0.5) * torch.rand(8, device="pretend"), use_reentrant=False
        )
        loss = hidden.square().mean()
        return loss.detach(), *torch.autograd.grad(loss, weight), calls * 2

    pretend.manual_seed(3)
    eager = [[value.cpu() for value in run()] for _ in range(3)]
    calls.zero_()
    pretend.manual_seed(3)
    graph, found = captured(run)
    assert all(value.isnan().all() for value in (one.cpu() for one in found)) and not calls.cpu().any()
    for values in eager:
        graph.replay()
        assert all(torch.equal(one.cpu(), other) for one, other in zip(found, values, strict=True))


@on_device()
def test_numbers_in_new_memory_are_no_wild_indices() -> None:
    """A kernel that checks its indices runs on what a capture has not computed."""
    table, ids = torch.randn(8, 4).to("pretend"), torch.arange(8).to("pretend")

    def run() -> Tensor:
        table.add(1)  # NaN while it is captured
        own = torch.empty(8, dtype=torch.int64, device="pretend").copy_(ids)
        return nn.functional.embedding(own, table)

    graph, found = captured(run)
    graph.replay()
    assert torch.equal(found.cpu(), table.cpu())


def on_another_stream(x: Tensor) -> None:
    stream = torch.Stream("pretend")
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        x.add_(1)


FORBIDDEN: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), "a value is read by the host"),
    "mask": (lambda x: x[x > 0], "the host must know what"),
    "to the host": (lambda x: x.cpu(), "bytes are copied between host and device"),
    "from the host": (lambda x: torch.ones(4).to("pretend"), "bytes are copied between host and device"),
    "wait": (lambda x: torch.accelerator.synchronize(), "the device is synchronized"),
    "stream": (on_another_stream, "has not waited for stream"),
    "resize": (lambda x: x.untyped_storage().resize_(4096), "bytes would have to move"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
@on_device()
def test_a_capture_refuses_what_a_graph_cannot_repeat(what: str) -> None:
    x = torch.ones(4, device="pretend")
    run, text = FORBIDDEN[what]
    with device.host_waits() as waits, pytest.raises(RuntimeError, match=text):
        captured(partial(run, x))
    told = [wait for wait in waits if wait.why.startswith("while a graph")]
    assert len(told) == (what not in ("stream", "resize"))
    assert all(any(frame.name == "<lambda>" for frame in wait.stack) for wait in told)
    torch.accelerator.synchronize()
    assert x.cpu().tolist() == [1.0] * 4


@on_device()
def test_a_graph_keeps_no_memory_of_others() -> None:
    x = torch.ones(4, device="pretend")
    graph, found = captured(partial(torch.add, x, 1))
    graph.replay()
    assert found.cpu().tolist() == [2.0] * 4
    del x
    with pytest.raises(RuntimeError, match="uses memory that was freed since it was captured"):
        graph.replay()


# -- trainings --------------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """A block with a batch norm and dropout behind it: a replay changes buffers, and draws numbers.

    It keeps the graph of its forward, as blocks do that keep an auxiliary loss.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.norm = nn.BatchNorm1d(models.LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.norm(self.block(x))
        return nn.functional.dropout(self.kept, 0.2)


def dropping() -> nn.Module:
    model = models.TinyGPT(width=16, layers=2)
    model.blocks = nn.ModuleList(map(Dropping, model.blocks))
    return model


@dataclass(frozen=True)
class Case:
    """A training. rows: of a microbatch, by step; graphs: that it captures; between: what is done before step 4."""

    stage: int
    precision: str
    accumulation: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = (2,)
    graphs: int = 1
    between: str = ""


RECOMPUTED = {"activation_checkpointing": {"every": 1}}
NARROW = {"type": "adamw", "params": {"lr": 1e-2, "state_dtype": "int8"}}
WEIGHTS: list[dict[str, Any]] = [  # what the kernel of the update reads and writes beside them
    {"bf16": {"enabled": True, "masters": False}},
    {"bf16": {"enabled": True, "masters": "kahan"}, "optimizer": NARROW},
    {"bf16": {"enabled": True, "masters": "int8"}, "optimizer": NARROW},
]


def grid(num_ranks: int) -> list[Case]:
    """Of each two among ranks, stages and precisions one case. Stage n has 1 to 3 microbatches, each a graph."""
    rows = pairs((1, 2), range(4), list(PRECISIONS))
    return [Case(stage, precision, 1 + stage % 3) for ranks, stage, precision in rows if ranks == num_ranks]


CASES = [
    *(Case(stage, "bf16", 1, more) for stage, more in zip((1, 2, 3), WEIGHTS, strict=True)),
    Case(
        2, "bf16", 1, {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 6, "warmup_num_steps": 3}}}
    ),
    *grid(1),
    Case(3, "fp16", 2, RECOMPUTED),
    Case(0, "fp32", 5, {"optimizer": {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}}}),
    Case(2, "fp32", 2, {"prescale_gradients": True}),
    Case(1, "fp32", 1, rows=(2, 3)),
    Case(1, "fp32", 1, {"compile": {"graphs": True, "max_graphs": 1}}, rows=(2, 3)),
    *(Case(2, "bf16", 1, between=what) for what in ("evaluation", "by hand", "modes", "rates", "buffers")),
]


def come_between(engine: lowtide.Engine, what: str, batch: tuple[Tensor, ...]) -> None:
    if what == "evaluation":
        engine.eval_step(batch)
    elif what == "by hand":
        engine.backward(engine(*batch))
        engine.step()
    elif what == "join":
        with engine.join():
            engine.train_step(batch)
    elif what == "offload":
        engine.offload_states(["gradients"])
        engine.reload_states()
    elif what == "modes":
        engine.module.blocks[0].eval()  # type: ignore[index, union-attr]
    elif what == "rates":
        engine.optimizer.param_groups[0]["lr"] = 0.5
    elif what == "buffers":
        norm: Any = engine.module.blocks[0].norm  # type: ignore[index]
        norm.running_mean = norm.running_mean + 1


def trained(case: Case, graphs: bool) -> tuple[list[Any], dict[str, Tensor], int, int]:
    """(loss, norm and skip of each step, weights, numbers of graphs: of microbatches, of updates)"""
    torch.manual_seed(0)
    config: dict[str, Any] = {"zero_optimization": {"stage": case.stage}}
    config["gradient_accumulation_steps"] = case.accumulation
    config |= {**PRECISIONS[case.precision], "gradient_clipping": 0.5, "compile": {"graphs": True}, **case.more}
    if "fp16" in config:
        config["fp16"] = {**config["fp16"], "loss_scale_window": 3}
    config["compile"] = {**config["compile"], "graphs": graphs}
    found: list[Any] = []
    with make_engine(dropping(), config) as engine:
        torch.manual_seed(7)
        for step in range(7 if case.between or len(case.rows) > 1 else 6):  # two replays at least
            rows = case.rows[step % len(case.rows)]
            batch = models.token_batch(step, rows * case.accumulation * engine.data_size)
            own = tuple(one.chunk(engine.data_size)[engine.data_rank] for one in batch)
            if step == 4:
                come_between(engine, case.between, own)
            result = engine.train_step(own)
            found.append((float(result.loss), float(result.grad_norm), result.skipped, result.loss_scale))
        runner: Any = engine._runner
        numbers = (len(runner.graphs), len(runner.updates.graphs)) if graphs else (0, 0)
        return found, {name: value.cpu() for name, value in engine.state_dict().items()}, *numbers


def compare(case: Case) -> None:
    with optimizer_kernel():
        eager, weights, *_ = trained(case, graphs=False)
        with device.host_waits() as waits:
            found, others, num_graphs, num_updates = trained(case, graphs=True)
    assert found == eager, (case, found, eager)
    assert all(torch.equal(weights[name], others[name]) for name in weights), case
    wanted = min(case.accumulation, 3) * len(case.rows) + (case.between == "modes")
    assert num_graphs == case.more.get("compile", {}).get("max_graphs", wanted), (case, num_graphs)
    assert num_updates == min(num_graphs, len(case.rows) + (case.between == "modes")), (case, num_updates)
    assert not [str(wait) for wait in waits if wait.why.startswith("while a graph")], case


@pytest.mark.parametrize("part", range(4))
@on_device()
def test_graphs_compute_the_same(part: int) -> None:
    for case in CASES[part::4]:
        compare(case)


OVER_RANKS = [
    *grid(2),
    Case(3, "bf16", 2, RECOMPUTED),
    Case(3, "bf16", 3, {"zero_optimization": {"stage": 3, "shard_size": 1}}),
    Case(3, "bf16", 1, between="join"),
    Case(1, "bf16", 2, between="offload"),
]


@pytest.mark.parametrize("part", range(3))
@on_device(2, timeout=200)
def test_graphs_over_ranks_compute_the_same(part: int) -> None:
    for case in OVER_RANKS[part::3]:
        compare(case)


EAGER_UPDATES: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "updates run eagerly: lamb waits for the norm on the host": (models.short_gpt, "lamb", True),
    "an update runs eagerly: a parameter has no gradient": (TwoBlocks, "adamw", True),
    "updates run eagerly: Triton has no kernel for some of the shards": (models.short_gpt, "adamw", False),
}


@pytest.mark.parametrize("text", EAGER_UPDATES)
@on_device()
def test_an_update_that_no_graph_has_runs_eagerly(text: str) -> None:
    build, optimizer, has_kernel = EAGER_UPDATES[text]
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        config = {"optimizer": {"type": optimizer}, "compile": {"graphs": graphs}, "gradient_clipping": 0.5}
        with optimizer_kernel() if has_kernel else nullcontext(), make_engine(build(), config) as engine:
            found.append([engine.train_step(models.token_batch(step, 2)).loss.item() for step in range(5)])
            runner: Any = engine._runner
            assert not graphs or ((text in runner._said) and runner.graphs and not runner.updates.graphs)
    assert found[0] == found[1]


@on_device()
def test_a_graph_takes_the_masks_of_each_step() -> None:
    """transformers asks torch.cuda whether it may read masks and positions on the host."""
    transformers: Any = pytest.importorskip("transformers")
    pretend: Any = torch.get_device_module("pretend")
    shape = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(shape)
        with make_engine(model, {"compile": {"graphs": graphs}}) as engine:
            losses = []
            for step in range(5):
                ids = torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(step))
                inputs = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(7).repeat(2, 1)}
                padding = (torch.arange(7) < step).long()  # all of it is a token in step 0
                batch = {**inputs, "attention_mask": torch.stack([1 - padding, torch.ones_like(padding)])}
                with patch.object(torch.cuda, "is_current_stream_capturing", pretend.is_current_stream_capturing):
                    losses.append(engine.train_step(batch).loss.item())
            found.append(losses)
            assert not graphs or len(engine._runner.graphs) == 1  # type: ignore[attr-defined]
    assert found[0] == found[1]


def move_states(engine: lowtide.Engine) -> None:
    engine.offload_states()
    engine.reload_states()


def drop_updates(engine: lowtide.Engine) -> None:
    """As after a step in which a parameter has no gradient."""
    if isinstance(runner := engine._runner, GraphRunner):
        runner.updates.forget()


@pytest.mark.parametrize("act", [move_states, drop_updates])
@on_device()
def test_graphs_may_be_dropped_between_replays(act: Callable[[lowtide.Engine], None]) -> None:
    """A replay must not write to the memory that states have left, or use what was freed with another graph."""
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        with optimizer_kernel(), make_engine(models.TinyGPT(width=16), {"compile": {"graphs": graphs}}) as engine:
            for step in range(9):
                if step == 4:
                    act(engine)
                loss = engine.train_step(models.token_batch(step, 2)).loss.item()
            assert not graphs or len(engine._runner.updates.graphs) == 1  # type: ignore[attr-defined]
            found.append(loss)
    assert found[0] == found[1]


@on_device()
def test_an_update_that_cannot_be_captured_leaves_the_stream_as_it_was() -> None:
    real, stream = UpdateLaunches.run, torch.accelerator.current_stream()

    def run(self: UpdateLaunches, factor: Tensor, *given: Any) -> None:
        real(self, factor, *given)
        factor.item()

    with optimizer_kernel(), make_engine(models.TinyGPT(width=16), {"compile": {"graphs": True}}) as engine:
        with patch.object(UpdateLaunches, "run", run), pytest.raises(RuntimeError, match="value is read by the host"):
            for step in range(4):
                engine.train_step(models.token_batch(step, 2))
        assert torch.accelerator.current_stream() == stream


wide = partial(models.TinyGPT, width=64, layers=3)
MEASURED = [
    *((0, "fp32", 2, "adamw"), (1, "bf16", 1, "adamw"), (3, "fp32", 1, "adamw")),
    (0, "fp32", 1, "lamb"),  # its update takes directions beside the pool, and norms in float64
]


@pytest.mark.parametrize(("stage", "precision", "accumulation", "optimizer"), MEASURED)
@on_device()
def test_a_plan_knows_what_graphs_keep(stage: int, precision: str, accumulation: int, optimizer: str) -> None:
    """What a pool keeps, and what an update takes beside it, is what the plan says."""
    found: list[tuple[int, int, int]] = []  # of each capture: bytes before it, the most, bytes after it
    pretend: Any = torch.get_device_module("pretend")

    class Watched(pretend.graph):  # type: ignore[misc]
        def __enter__(self) -> None:
            self._before = allocated()
            torch.accelerator.reset_peak_memory_stats()
            super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            found.append((self._before, torch.accelerator.max_memory_allocated(), allocated()))

    config: dict[str, Any] = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": accumulation}
    config |= {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": optimizer}, **PRECISIONS[precision]}
    config["compile"] = {"graphs": True}
    blueprint = Blueprint.of(Config.load(config).resolve(1), wide(), 1, device="cuda")
    _, said = planner().memory_prediction(blueprint, wide(), None, 0)(models.token_batch(0, 8))
    peak_of = Peak(collected_bytes())  # without this, an earlier engine is freed at any time
    with optimizer_kernel(), patch.object(pretend, "graph", Watched), make_engine(wide(), config) as engine:
        for step in range(4):
            with peak_of.without_kernels():
                engine.train_step(models.token_batch(step, 8 * accumulation))
        most, kept, pool = peak_of.read(), 0, 0
        for start, peak, end in found:
            pool, kept = max(pool, peak - start + kept), kept + end - start
    assert most - kept + pool == pytest.approx(said, rel=0.1 if optimizer == "lamb" else 0.03)


class Reading(models.TinyGPT):
    """Its forward is another one for a large input."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(ids, targets)
        return loss if loss < 100 else loss * 2


@on_device()
def test_a_forward_that_the_host_reads_is_refused() -> None:
    with make_engine(Reading(width=16), {"compile": {"graphs": True}}) as engine:
        for step in range(2):
            engine.train_step(models.token_batch(step, 2))
        stream = torch.accelerator.current_stream()
        for _ in range(2):  # the engine is as before
            text = refusal(engine.train_step, models.token_batch(2, 2), kind=RuntimeError)
            assert "compile.graphs: expected a forward" in text and "value is read by the host" in text
            assert torch.accelerator.current_stream() == stream


@on_device()
def test_a_replayed_step_waits_once() -> None:
    with make_engine(models.TinyGPT(width=16), {"compile": {"graphs": True}, "gradient_clipping": 0.1}) as engine:
        counts = [len(waits_of(partial(engine.train_step, models.token_batch(step, 2)))) for step in range(6)]
    assert max(counts[3:]) <= 1, counts  # the third step captures


@on_device()
def test_no_garbage_is_collected_during_a_capture() -> None:
    """CUDA ends the capture if a collection frees a graph of another engine."""
    pretend: Any = torch.get_device_module("pretend")
    collected, threshold = list[bool](), gc.get_threshold()

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(pretend.is_current_stream_capturing())

    torch.accelerator.synchronize()
    collected_bytes()  # without this, an earlier engine is freed at any time
    gc.callbacks.append(note)
    gc.set_threshold(50)
    try:
        config = {"compile": {"graphs": True}}
        with optimizer_kernel(), make_engine(models.TinyGPT(width=16, layers=1), config) as engine:
            for step in range(3):
                engine.train_step(models.token_batch(step, 2))
            assert len(engine._runner.updates.graphs) == 1  # type: ignore[attr-defined]
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
    assert collected and not any(collected)
    assert gc.isenabled()


@on_device()
def test_a_loss_scale_divides_no_gradients_of_others() -> None:
    weight = torch.ones((), device="pretend", requires_grad=True)
    config, given = PRECISIONS["fp16"] | {"compile": {"graphs": True}}, {"loss_fn": lambda output, _: output * weight}
    text = "compile.graphs: expected a loss that depends on the engine's parameters alone"
    with pytest.raises(ValueError, match=text), make_engine(models.TinyGPT(width=16), config, **given) as engine:
        for step in range(3):
            engine.train_step(models.token_batch(step, 2))
