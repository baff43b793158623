"""Layer by layer, a step has the bits of the plain order, and moves parameters twice."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.comm.sockets import SocketTransport
from lowtide.engine.config.config import Config, ConfigError
from lowtide.offload.file_store import FileStore
from lowtide.pipe.split.random_streams import seeds_behind
from tests.engine.test_hugging_face import MODELS, batch_of
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, Outcome, train, train_all

LAYERED = {"layered_gradient_accumulation": True}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 64}}


LATE = {"delay_after_steps": 1}
SPLIT: dict[str, Any] = {
    "parallel": {"tensor": 2},
    "tensor_parallel": {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}},
}


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings}


def pair(stage: int, build: Any = models.tiny_gpt, plain_stage: int | None = None, **config: Any) -> list[Case]:
    """The same training in the plain order, and layer by layer."""
    case = Case(build, models.token_batch, stage, accumulation=3, clip=0.3, steps=2, config=config)
    layered = {**config.get("zero_optimization", {}), **LAYERED}
    return [case.at(stage if plain_stage is None else plain_stage), case.at(stage, config=zero(**layered))]


def of_two_blocks() -> nn.Module:
    return models.TinyGPT(layers=2)


Law = tuple[Case, ...]  # a training in the plain order, and others that have its bits


def also(case: Case, stage: int = 3, **settings: Any) -> Case:
    """Layer by layer, with other settings of ZeRO."""
    return case.at(stage, config=zero(**LAYERED, **settings))


def differences(laws: list[Law], outcomes: list[Outcome]) -> list[str]:
    found, at = [], 0
    for number, law in enumerate(laws):
        plain, *others = outcomes[at : at + len(law)]
        found += [f"{number}: {these}" for other in others if (these := plain.differences(other))]
        at += len(law)
    return found


def cases_of(laws: list[Law]) -> list[Case]:
    return [case for law in laws for case in law]


def everywhere(folder: Path) -> list[Law]:
    """Places of parameters, states and activations, dtypes and times of updates, though not every pair of them."""
    file: dict[str, Any] = {"device": "nvme", "nvme_path": str(folder)}
    host: dict[str, Any] = {"device": "cpu"}
    activations = {"offload": {**file, "min_bytes": 64, "budget_bytes": 20_000}}
    plain, layered = pair(3)
    return [
        (*pair(1, **BF16), also(layered.at(3, config=BF16), offload_param=file, offload_optimizer=file)),
        tuple(pair(2, **FP16)),
        (
            plain,
            also(layered, offload_param=host, offload_optimizer={**file, "overlap": "speculative"}),
            also(layered, stage3_prefetch_bucket_size=0),
            layered.at(3, config={"activation_checkpointing": {"every": 1, **activations}}),
        ),
        tuple(pair(3, **zero(offload_param=host, offload_optimizer={**host, "overlap": "delayed", **LATE}))),
    ]


def test_one_rank(tmp_path: Path) -> None:
    laws = everywhere(tmp_path)
    assert not differences(laws, train_all(cases_of(laws)))


def test_update_in_backward(tmp_path: Path) -> None:
    """Which the plain order does not have with several microbatches."""
    file: dict[str, Any] = {"device": "nvme", "nvme_path": str(tmp_path)}
    plain, layered = (case.at(3, clip=0.0) for case in pair(3))
    updates = {"update_in_backward": True, "offload_param": file, "offload_optimizer": file}
    assert not train(plain).differences(train(layered.at(3, config=zero(**LAYERED, **updates))))


@pytest.mark.parametrize(("world_size", "transport"), [(2, "sockets"), (4, "shared_memory")])
def test_several_ranks_have_the_sums_of_stage_1(
    ranks: RankPool, tmp_path: Path, world_size: int, transport: str
) -> None:
    """Which adds up microbatches first, and then ranks; stages 2 and 3 in the plain order reduce each microbatch."""
    by: dict[str, Any] = {"communication": {"transport": transport}}
    file: dict[str, Any] = {"device": "nvme", "nvme_path": str(tmp_path)}
    plain, layered = pair(1, of_two_blocks, **by)
    laws: list[Law]
    whole: Law
    if world_size == 2:
        split = pair(1, of_two_blocks, **by, **SPLIT)
        whole = (plain, layered, also(layered, offload_param=file, offload_optimizer=file))
        laws = [whole, tuple(pair(2, of_two_blocks, plain_stage=1, **by, **BF16)), (split[0], also(split[1]))]
    else:
        whole = (plain, also(layered, zero_hpz_partition_size=2))
        laws = [whole, tuple(pair(3, of_two_blocks, plain_stage=1, **by, **zero(shard_size=2)))]
    assert not differences(laws, ranks(world_size, train_all, cases_of(laws))[0])


def test_what_is_updated_or_sent_otherwise(ranks: RankPool) -> None:
    """Updates that need whole matrices or all of a tensor, or send signs; messages of few bits, of one microbatch: they
    round each."""
    laws: list[Law] = [
        tuple(pair(3, of_two_blocks, plain_stage=1, optimizer={"type": name, "params": {"lr": 1e-2}}))
        for name in ("lamb", "muon")
    ]
    laws.append(tuple(pair(1, of_two_blocks, communication={"power_sgd": {"rank": 2}})))
    signs = {"type": "onebitadam", "params": {"lr": 1e-3, "freeze_step": 1}}
    laws.append(tuple(pair(0, of_two_blocks, optimizer=signs)))
    laws = [tuple(case.at(case.stage, accumulation=2) for case in law) for law in laws]
    few_bits = {"transport": "sockets", "weight_bits": 8, "gradient_bits": 8}
    laws.append(tuple(case.at(3, accumulation=1) for case in pair(3, of_two_blocks, communication=few_bits)))
    assert not differences(laws, ranks(2, train_all, cases_of(laws))[0])


# -- bytes ------------------------------------------------------------------------------------------------------------


def chain() -> nn.Module:
    return models.linear_chain(64, 5)


def rows_of(step: int, rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 64, generator=torch.Generator().manual_seed(step)),)


def trained(settings: dict[str, Any], accumulation: int) -> lowtide.Engine:
    """After a step."""
    case = Case(chain, rows_of, 3, accumulation=accumulation, config={"communication": {"transport": "sockets"}})
    engine = lowtide.initialize(chain(), case.at(3, config={**case.config, **zero(**settings)}).as_config())
    engine.train_step(rows_of(0, 2 * accumulation))
    return engine


def sent(settings: dict[str, Any], accumulation: int) -> dict[str, int]:
    """Elements that this rank sends in a step, of one shard of a block each."""
    counted = Counter[str]()
    plain = SocketTransport._send

    def count(self: SocketTransport, tensors: dict[int, Tensor], tag: int, what: str) -> Any:
        kind = "gather" if what.startswith("gather of") else "reduction" if what.startswith("reduction of") else "other"
        counted[kind] += sum(one.numel() for one in tensors.values())
        return plain(self, tensors, tag, what)

    engine = trained(settings, accumulation)
    shard = engine._runner.passes.units[-1].groups[0].layout.shard_numel
    with patch.object(SocketTransport, "_send", count):
        engine.train_step(rows_of(1, 2 * accumulation))
    engine.close()
    return {kind: counted[kind] // shard for kind in ("gather", "reduction")}


def test_parameters_cross_the_wire_twice_a_step(ranks: RankPool) -> None:
    """Of five blocks, the last one once: it stays between forward and backward."""
    for accumulation in (1, 4):
        assert ranks(2, sent, LAYERED, accumulation)[0] == {"gather": 2 * 5 - 1, "reduction": 5}
    assert ranks(2, sent, {}, 4)[0] == {"gather": 4 * (2 * 5 - 1), "reduction": 4 * 5}


def read(settings: dict[str, Any], accumulation: int, folder: Path) -> int:
    """Blocks that come from files in the forwards and backwards of a step."""
    engine = trained({**settings, "offload_param": {"device": "nvme", "nvme_path": str(folder)}}, accumulation)
    plain, counted = FileStore.load, [0]

    def count(self: FileStore, key: str, out: Tensor) -> Any:
        counted[0] += out.nbytes
        return plain(self, key, out)

    with patch.object(FileStore, "load", count):
        engine._runner.train(engine._steps, rows_of(1, 2 * accumulation))
    nbytes = 4 * engine._runner.passes.units[-1].numel
    engine._steps.forget()
    engine.close()
    return counted[0] // nbytes


def test_parameters_are_read_twice_a_step(tmp_path: Path) -> None:
    assert [read(LAYERED, accumulation, tmp_path) for accumulation in (1, 8)] == [9, 9]
    assert read({}, 8, tmp_path) == 8 * 9


# -- what a model may be ----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Blocks that take keywords and return several values; a skip over all of them; dropout outside and inside."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.before = nn.Linear(5, 8)
        self.outer = nn.Dropout(rate)
        self.blocks = nn.ModuleList(MixedBlock(rate) for _ in range(4))
        self.behind = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        first = hidden = self.before(self.outer(x))
        scale, means = torch.ones(()), []
        for block in self.blocks:
            hidden, scale, extra = block(hidden=hidden, scale=scale, options={"by": 0.5})
            means.append(extra["mean"])
        found = self.behind(self.outer(hidden + first) * scale)
        return {"loss": (found - y).square().mean() + 0.1 * sum(means), "found": found}


class MixedBlock(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.scale, self.drop = nn.Linear(8, 8), nn.Parameter(torch.ones(())), nn.Dropout(rate)

    def forward(self, *, hidden: Tensor, scale: Tensor, options: dict[str, float]) -> Any:
        made = self.drop(torch.tanh(self.layer(hidden)))
        return hidden + options["by"] * made, scale * self.scale, {"mean": made.mean()}


def test_keywords_several_outputs_and_skips() -> None:
    case = Case(Mixed, models.vector_batch, 3, accumulation=3, steps=3)
    assert not train(case).differences(train(case.at(3, config=zero(**LAYERED))))


def test_a_loss_fn_and_an_evaluation() -> None:
    def loss_fn(output: Any, batch: Any) -> Tensor:
        return (output["found"] - batch[1]).abs().mean()

    found = []
    for settings in ({}, LAYERED):
        torch.manual_seed(0)
        config = Case(Mixed, models.vector_batch, 3, accumulation=2, config=zero(**settings)).as_config()
        with lowtide.initialize(Mixed(), config, loss_fn=loss_fn) as engine:
            losses = [engine.train_step(models.vector_batch(step, 4)).loss.item() for step in range(2)]
            found.append([*losses, engine.eval_step(models.vector_batch(5, 7)).item()])
    assert found[0] == found[1]


def test_a_step_that_fp16_skips() -> None:
    cases = pair(2, fp16={"enabled": True, "initial_scale_power": 18, "hysteresis": 1})
    plain, layered = train_all(cases)
    assert plain.skipped == layered.skipped == [True, False]
    assert plain.differences(layered) == ["norms"] and plain.norms[1] == layered.norms[1], "the first one is NaN"


def test_an_error_in_the_middle_and_an_evaluation_leave_nothing_behind(tmp_path: Path) -> None:
    """Nor does a save, from which another engine goes on."""
    config = Case(models.tiny_gpt, models.token_batch, 3, accumulation=3, config=zero(**LAYERED)).as_config()
    ids, targets = models.token_batch(1, 6)
    wrong = torch.where(torch.arange(6)[:, None] == 3, models.VOCAB, targets)  # of the second microbatch
    losses = []
    for is_disturbed in (False, True):
        torch.manual_seed(0)
        engine = lowtide.initialize(models.tiny_gpt(), config)
        found = [engine.train_step(models.token_batch(0, 6)).loss.item()]
        if is_disturbed:
            with pytest.raises(IndexError, match="out of bounds"):
                engine.train_step((ids, wrong))
            engine.eval_step((ids, targets))
            engine.save_checkpoint(tmp_path)
            engine.close()
            engine = lowtide.initialize(models.tiny_gpt(), config)
            engine.load_checkpoint(tmp_path)
        found += [engine.train_step(models.token_batch(step, 6)).loss.item() for step in (1, 2)]
        engine.close()
        losses.append(found)
    assert losses[0] == losses[1]


def test_each_microbatch_draws_what_a_forward_draws_behind_its_seed() -> None:
    """The first one what follows the generator; dropout outside of blocks too, of which each stage runs the code."""
    torch.manual_seed(0)
    plain = Mixed(rate=0.3)
    torch.manual_seed(0)
    config = Case(Mixed, models.vector_batch, 3, accumulation=3, config=zero(**LAYERED)).as_config()
    with lowtide.initialize(Mixed(rate=0.3), config) as engine:
        torch.manual_seed(7)
        losses = [engine.train_step(models.vector_batch(0, 6)).loss.item() for _ in range(2)]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    assert ADAMW["params"]["lr"] == 1e-2
    torch.manual_seed(7)
    for expected in losses:
        seeds, total = seeds_behind(torch.get_rng_state(), 2), 0.0
        for at, part in enumerate(zip(*(one.chunk(3) for one in models.vector_batch(0, 6)), strict=True)):
            if at:
                torch.manual_seed(seeds[at - 1])
            loss = plain(*part)["loss"]
            if not at:
                behind = torch.get_rng_state()
            (loss / 3).backward()
            total += loss.item() / 3
        torch.set_rng_state(behind)
        optimizer.step()
        optimizer.zero_grad()
        assert total == pytest.approx(expected, rel=1e-5)


def test_tied_weights_are_summed_in_another_order() -> None:
    """Those of the head first, of all microbatches; so the last bits may differ."""
    outcomes = [train(case) for case in pair(3, build=lambda: models.tied_gpt().double())]
    assert outcomes[0].losses == pytest.approx(outcomes[1].losses, rel=1e-12)
    for name, value in outcomes[0].state.items():
        torch.testing.assert_close(outcomes[1].state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_hugging_face(name: str) -> None:
    found = []
    for settings in ({}, LAYERED):
        torch.manual_seed(0)
        config = Case(chain, rows_of, 3, accumulation=3, config=zero(**settings)).as_config()
        with lowtide.initialize(MODELS[name](), config) as engine:
            engine.train(name == "llama")
            generator = torch.Generator().manual_seed(1)
            results = [engine.train_step(iter([batch_of(name, generator) for _ in range(3)])) for _ in range(2)]
            found.append([number.item() for result in results for number in (result.loss, result.grad_norm)])
    assert found[0] == found[1] if name == "llama" else found[0] == pytest.approx(found[1], rel=1e-5)


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"parallel": {"pipeline": 2}}, "needs parallel.pipeline 1, found 2: a pipeline schedule already runs several"),
        ({"parallel": {"sequence": 2}}, "needs parallel.sequence 1, found 2: its ranks exchange data of a single"),
        ({"parallel": {"expert": 2}}, "needs parallel.expert 1, found 2: its ranks exchange data of a single"),
        ({"torch_autocast": {"enabled": True}}, "needs torch_autocast.enabled false, found true: blocks run outside"),
    ],
)
def test_what_does_not_go_together(values: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({**values, **zero(**LAYERED)})
    assert f"zero_optimization.layered_gradient_accumulation: {part}" in str(caught.value)


def test_models_that_cannot_be_cut() -> None:
    config = Case(chain, rows_of, 3, accumulation=2, config=zero(**LAYERED)).as_config()
    with pytest.raises(ValueError, match=r"a stage for each block, found: pipeline: Linear has no repeated blocks"):
        lowtide.initialize(nn.Linear(3, 3), config)


def test_loops_by_hand() -> None:
    config = Case(chain, rows_of, 3, accumulation=2, config=zero(**LAYERED)).as_config()
    with lowtide.initialize(chain(), config) as engine:
        for call in (
            lambda: engine(*rows_of(0, 2)),
            lambda: engine.backward(torch.zeros((), requires_grad=True)),
            lambda: engine.run(lambda: None),
        ):
            with pytest.raises(ValueError, match=r"without zero_optimization\.layered_gradient_accumulation, found it"):
                call()
        with pytest.raises(ValueError, match="so a step cannot have fewer"), engine.join():
            pass
        with engine.no_sync(), pytest.raises(ValueError, match="train_step runs all microbatches of a step"):
            engine.train_step(rows_of(0, 4))
