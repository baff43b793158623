"""torch.compile by the user and by the section `compile`: as without it, with a graph for each kind."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lowtide
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.model import prepared_model
from lowtide.engine.step import graphs
from lowtide.engine.step.graphs import are_possible
from lowtide.model.caches import is_cache
from tests.engine.adapted import base, tokens
from tests.kit import models
from tests.kit.compiling import with_a_new_compiler
from tests.kit.ranks import on_ranks
from tests.kit.training import Case, differences, refusal, settings, share_of, take_step

LAYERS = 3
KINDS = ["block", "embedding", "norm", "head"]


class Counting:
    """A backend that runs graphs as they are: how many it was given, and how often they have run."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


class Step(nn.Module):
    """Quickly traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class StepsOfTokens(nn.Module):
    """A kind of module beside the blocks in each place."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 9)
        self.blocks = nn.ModuleList(Step() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(9), nn.Linear(9, 11, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids % 11)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten() % 11)


def steps_of_tokens() -> nn.Module:
    return StepsOfTokens().double()


def steps_of_nine(count: int = LAYERS) -> Any:
    return models.Chain(*(Step() for _ in range(count))).double()


def vectors(step: int, rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 9, generator=torch.Generator().manual_seed(step), dtype=torch.float64),)


CASE = Case(steps_of_tokens, models.token_batch, steps=2)
SMALL = Case(steps_of_nine, vectors, steps=2)
HOW = ["model wrapped", "model after", "blocks after", "blocks wrapped"]


def compiled(how: str, model: Any, options: dict[str, Any]) -> Any:
    """In the ways in which users write it."""
    if how == "model wrapped":
        return torch.compile(model, **options)
    if how.startswith("model"):
        model.compile(**options)
    for index, block in enumerate(model.blocks if how.startswith("blocks") else ()):
        if "wrapped" in how:
            model.blocks[index] = torch.compile(block, **options)
        else:
            block.compile(**options)
    return model


def train_compiled(case: Case, how: str) -> tuple[list[float], list[Any], Any]:
    """Losses; after each step, graphs and runs; names and values of the final state."""
    with_a_new_compiler()
    backend = Counting()
    options = {"backend": backend, "fullgraph": True}
    torch.manual_seed(0)

    def build() -> Any:
        return case.build() if "after" in how else compiled(how, case.build(), options)

    losses, counts = [], []
    with lowtide.initialize(build if how == "blocks wrapped" else build(), case.as_config()) as engine:
        if "after" in how:
            compiled(how, engine.module, options)
        for step in range(case.steps):
            losses.append(take_step(engine, case, step).loss.item())
            counts.append((backend.graphs, backend.runs))
        return losses, counts, engine.state_dict()


@on_ranks(2)
def test_compiled_training_is_the_same() -> None:
    """fullgraph=True has raised where a graph breaks."""
    config = {"communication": {"transport": "sockets"}, "activation_checkpointing": {"every": 2}}
    case = CASE.at(3, config=config)
    plain = train_compiled(case, "not at all")
    for how in HOW:
        losses, counts, state = train_compiled(case, how)
        assert losses == plain[0] and differences(state, plain[2]) == [], how
        kinds, calls = (len(KINDS), LAYERS + 3) if "model" in how else (1, LAYERS)  # two blocks are recomputed
        assert counts == [(kinds, (calls + 2) * step) for step in range(1, CASE.steps + 1)], how


@on_ranks(2)
def test_a_graph_is_made_beside_gradients_that_are_reduced() -> None:
    """Of the second microbatch's size, and of an evaluation before the update."""
    found = []
    for compiles in (False, True):
        with_a_new_compiler()
        torch.manual_seed(0)
        model = models.mlp()
        if compiles:
            model.compile(backend="eager", dynamic=False)
        losses = []
        with lowtide.initialize(model, settings(3, gradient_accumulation_steps=2)) as engine:
            for rows in (2, 3):
                loss = engine(*models.vector_batch(0, rows))
                loss.backward()
                losses.append(loss.item())
            engine.eval()
            with torch.no_grad():
                losses.append(engine(*models.vector_batch(1, 4)).item())
            engine.step()
            found.append((losses, engine.state_dict()))
    (losses, state), (compiled_losses, compiled_state) = found
    assert compiled_losses == losses and differences(compiled_state, state) == []


def test_after_close_the_model_is_compiled_as_it_was() -> None:
    with_a_new_compiler()
    model, backend = compiled("blocks wrapped", steps_of_nine(), {"backend": "eager", "fullgraph": True}), Counting()
    model.compile(backend=backend)
    names, wrapped, call = list(model.state_dict()), model.blocks[0], model._compiled_call_impl
    with lowtide.initialize(model, SMALL.as_config()) as engine:
        assert model.blocks[0] is not wrapped and "blocks.0.linear.weight" in engine.state_dict()
        engine.train_step(vectors(0, 2))
        assert not backend.runs  # the blocks have options of their own, and the rest is none
    assert list(model.state_dict()) == names and model.blocks[0] is wrapped and model._compiled_call_impl is call
    assert "compile" not in model.__dict__ and "forward" not in model.blocks[0]._orig_mod.__dict__
    model(*vectors(0, 2)).backward()
    assert backend.runs


def test_the_caller_s_own_wrapper_goes_to_the_engine() -> None:
    with_a_new_compiler()
    backend = Counting()
    model: Any = torch.compile(steps_of_nine(), backend=backend)
    with lowtide.initialize(model, SMALL.at(3).as_config()) as engine:
        engine.backward(model(*vectors(0, 2)))
        engine.step()
        assert backend.runs == LAYERS and engine.global_step == 1


def wrap_engine_s_module(engine: Any) -> None:
    torch.compile(engine.module, backend="eager")(*vectors(0, 2))


def wrap_engine(engine: Any) -> None:
    torch.compile(engine, backend="eager")(*vectors(0, 2))


def wrap_a_block(engine: Any) -> None:
    engine.module.blocks[1] = torch.compile(engine.module.blocks[1], backend="eager")
    engine.train_step(vectors(0, 2))


def assign_module(engine: Any) -> None:
    engine.module = torch.compile(engine.module, backend="eager")


WRAPPED = "that an engine trains: expected its compile(...), found a wrapper"


@pytest.mark.parametrize(
    ("mistake", "stage", "kind", "text"),
    [
        (wrap_engine_s_module, 0, RuntimeError, f"torch.compile of a Chain {WRAPPED}"),
        (wrap_engine, 3, RuntimeError, "torch.compile of an engine: expected its compile(...), found a wrapper"),
        (wrap_a_block, 3, RuntimeError, f"torch.compile of a Step {WRAPPED}"),
        (assign_module, 0, AttributeError, "engine.module: expected the model of lowtide.initialize, found"),
    ],
)
def test_what_would_trace_hooks_is_refused(
    mistake: Callable[[Any], None], stage: int, kind: type[Exception], text: str
) -> None:
    with_a_new_compiler()
    with lowtide.initialize(steps_of_nine(), SMALL.at(stage).as_config()) as engine:
        assert refusal(mistake, engine, kind=kind).startswith(text)
        if mistake is wrap_engine:
            engine.train_step(vectors(0, 2))


def four_steps_of_tokens() -> nn.Module:
    return StepsOfTokens(4).double()


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (2, {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "1f1b"}}),
        (1, {"zero_optimization": {"layered_gradient_accumulation": True}}),
    ],
    ids=["pipeline", "layer by layer"],
)
@on_ranks("size")
def test_blocks_of_stages_are_compiled_and_nothing_else(size: int, config: dict[str, Any]) -> None:
    """The code around them runs on absent tensors. A mode of torch around the blocks would be a second graph."""
    config = config | {"activation_checkpointing": {"every": 1}}
    case = CASE.at(1, build=four_steps_of_tokens, config=config, accumulation=4)
    plain = train_compiled(case, "not at all")
    for how in ("model wrapped", "blocks after"):
        losses, counts, state = train_compiled(case, how)
        assert losses == plain[0] and list(state) == list(plain[2])
        assert counts[1] == (1, 4 // size * 4 * 2 * 2)  # four microbatches, two steps, and each block again in backward


SOCKETS = {"communication": {"transport": "sockets"}}
EAGER_BLOCKS: dict[str, Any] = {"compile": {"blocks": True, "backend": "eager"}}
Trained = tuple[list[float], list[tuple[int, int, int]]]


def train(build: Any, config: dict[str, Any], steps: int, take: Callable[[Any, int], Any]) -> Trained:
    """Losses; after each step, how many graphs were made, how many broke, and how many were made again."""
    with_a_new_compiler()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes
    torch.manual_seed(0)
    losses, counts = [], []
    with lowtide.initialize(build(), config) as engine:
        for step in range(steps):
            losses.append(take(engine, step).loss.item())
            broken, again = (sum(counters[kind].values()) for kind in ("graph_break", "recompiles"))
            counts.append((counters["stats"]["unique_graphs"], broken, again))
    return losses, counts


def train_case(case: Case, by_run: bool) -> Trained:
    """by_run: the engine runs a function around the model."""

    def take(engine: Any, step: int) -> Any:
        batch = share_of(case.global_batch(step, engine.world_size))
        if not by_run:
            return engine.train_step(batch)
        engine.backward(engine.run(lambda *batch: 2 * engine.module(*batch), *batch))
        return engine.step()

    return train(case.build, case.as_config(), case.steps, take)


@pytest.mark.parametrize(("size", "by_run"), [(2, False), (1, True)])
@on_ranks("size")
def test_blocks_are_one_graph_and_compute_the_same(size: int, by_run: bool) -> None:
    recomputed = SOCKETS | {"activation_checkpointing": {"every": 1}}
    offload = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    plain, _ = train_case(CASE.at(0), by_run)
    for stage, beside in ((0, {}), (3, recomputed | {"zero_optimization": offload})):
        losses, counts = train_case(CASE.at(stage, config=beside | EAGER_BLOCKS), by_run)
        assert losses == pytest.approx(plain, abs=1e-6)
        assert counts == [(1, 0, 0)] * CASE.steps


def by_aot_eager(graph: Any, inputs: Any, **options: Any) -> Any:
    """In the place of inductor, which would run a C++ compiler for half a minute."""
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@on_ranks(1)
def test_inductor_is_given_each_graph() -> None:
    with_a_new_compiler()  # to import inductor warns
    plain, _ = train_case(SMALL.at(3), by_run=False)
    with patch("torch._inductor.compile_fx.compile_fx", side_effect=by_aot_eager) as compile_fx:
        losses, counts = train_case(SMALL.at(3, config={"compile": {"blocks": True}}), by_run=False)
    assert losses == pytest.approx(plain, abs=1e-6)
    assert compile_fx.call_count and counts == [(compile_fx.call_count, 0, 0)] * SMALL.steps


def train_llama(build: Any, stage: int, both: dict[str, Any], compiled: dict[str, Any]) -> list[Trained]:
    """Without and with the compiler."""

    def take(engine: Any, step: int) -> Any:
        return engine.train_step({"input_ids": tokens(step)[:2], "labels": tokens(step)[:2]})

    return [train(build, settings(stage, **both, **more), 4, take) for more in ({}, compiled)]


FULLGRAPH = {"compile": {"blocks": True, "backend": "aot_eager", "fullgraph": True}}


@on_ranks(1)
def test_kernels_by_name_are_operators_of_one_graph() -> None:
    """fullgraph=True raises where a launch breaks the graph."""
    more: dict[str, Any] = {"kernels": {"fuse_modules": ["rms_norm", "gated_mlp", "rotary_embedding"]}}
    more |= {"activation_checkpointing": {"every": 1}, "bf16": {"enabled": True}}
    (plain, _), (losses, counts) = train_llama(base, 3, more, FULLGRAPH)
    assert losses == pytest.approx(plain, rel=2**-7)
    assert counts[2:] == [(counts[2][0], 0, 0)] * 2


@on_ranks(1)
def test_a_cache_costs_no_graphs() -> None:
    """It has a place for each block, and torch gives up after 8 graphs, which fullgraph=True makes an error."""
    from tests.kernels.fused_models import llama  # without transformers the test is skipped

    with_a_new_compiler()
    config = settings(**EAGER_BLOCKS | {"compile": EAGER_BLOCKS["compile"] | {"fullgraph": True}})
    with lowtide.initialize(llama(num_hidden_layers=9), config) as engine:
        model: Any = engine.module
        batch = {"input_ids": tokens(0)[:2], "labels": tokens(0)[:2]}
        with torch.no_grad():
            model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False)
            with_cache = engine(**batch, use_cache=True)
        assert counters["stats"]["unique_graphs"] == 0 and any(map(is_cache, with_cache.values()))
        loss = engine.train_step(batch).loss.item()
        assert counters["stats"]["unique_graphs"] == 1 and model.config.use_cache is True
        assert loss == pytest.approx(with_cache.loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {},
            [
                "fused 1 x LlamaForCausalLM (cross_entropy)",
                "fused 1 x LlamaForCausalLM (linear_cross_entropy)",
                "fused 2 x LlamaAttention (rotary_embedding)",
                "fused 2 x LlamaMLP (gated_mlp)",
                "fused 5 x LlamaRMSNorm (rms_norm)",
            ],
        ),
        (
            FULLGRAPH,
            [
                'config: kernels.fuse_modules: "auto" leaves the layers of compiled blocks to torch.compile',
                "fused 1 x LlamaForCausalLM (cross_entropy)",
                "fused 1 x LlamaForCausalLM (linear_cross_entropy)",
                "fused 1 x LlamaRMSNorm (rms_norm)",
            ],
        ),
    ],
)
def test_auto_leaves_compiled_blocks_to_the_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, more: dict[str, Any], said: list[str]
) -> None:
    monkeypatch.setattr(prepared_model, "where_triton_runs", lambda device, backends: ("as on a GPU", list(backends)))
    with caplog.at_level("INFO", "lowtide"), lowtide.initialize(base(), settings(**more)):
        assert [line for line in caplog.messages if "fuse" in line] == said


@on_ranks(2)
def test_beside_a_tensor_split_it_is_refused() -> None:
    text = refusal(lowtide.initialize, base(), settings(parallel={"tensor": 2}, **EAGER_BLOCKS))
    assert "found compile.blocks: collectives of split layers" in text


def test_a_cpu_has_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    config = {"compile": {"graphs": True}, "device": "cpu", "optimizer": {"type": "adamw"}}
    with caplog.at_level("INFO"), lowtide.initialize(nn.Linear(3, 1), config) as engine:
        assert not hasattr(engine._runner, "graphs")
    assert "compile.graphs: true has no effect here: the CPU launches nothing" in caplog.text


def has_graphs(device: str, config: dict[str, Any], **world: Any) -> bool:
    found: Any = SimpleNamespace(**{"device": torch.device(device), "size": 1, "waits_on_host": False, **world})
    return are_possible(Blueprint.of(Config.load(config).resolve(1), nn.Linear(3, 1), 1), found)


def graph_refusal(device: str, config: dict[str, Any], **world: Any) -> str:
    with pytest.raises(ValueError, match=r"^compile\.graphs: expected") as error:
        has_graphs(device, config, **world)
    return str(error.value)


def test_what_a_device_or_an_update_does_not_repeat_is_refused() -> None:
    assert "a device with torch.cuda's graphs, found xpu; leave it out" in graph_refusal("xpu", {})
    text = graph_refusal("cuda", {}, size=2, waits_on_host=True, backend="gloo")
    assert "collectives for graphs (NCCL), found gloo, and the host waits for its collectives" in text
    signs = {"optimizer": {"type": "onebitadam", "params": {"freeze_step": 2}}}
    assert "gradients that each step sums alike, found the optimizer 'onebitadam'" in graph_refusal("cuda", signs)


@pytest.mark.parametrize(("given", "size", "expected"), [(None, 1, None), (None, 2, "0"), ("1", 2, "1")])
def test_nccl_registers_no_buffers_of_graphs(
    monkeypatch: pytest.MonkeyPatch, given: str | None, size: int, expected: str | None
) -> None:
    """With torch's expandable segments it would hang. A user may ask for it."""
    environment = {} if given is None else {"NCCL_GRAPH_REGISTER": given}
    monkeypatch.setattr(os, "environ", environment)
    assert has_graphs("cuda", {}, size=size) and environment.get("NCCL_GRAPH_REGISTER") == expected


def test_batches_that_always_differ_are_named_and_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MAX_COUNTED", 3)
    said, times = list[str](), Counter[tuple[str, ...]]()
    runner: Any = SimpleNamespace(graphs={}, _times=times, _max_graphs=8, _say=said.append)
    for number in range(5):
        assert not graphs.GraphRunner._has_graph(runner, ((f"name {number}", 0),))
    assert len(times) == 2
    assert [line.partition(":")[0] for line in said] == ["3 kinds of microbatches"]
