"""A fit with a strategy of ours is one with Lightning's own DDP, whatever of the Trainer is used."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.lightning.modules import lightning, loader, module, trainer
from tests.kit.ranks import RankError, RankPool

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    "clipped by value": ({"calls": "net"}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "manual": ({"manual": True, "calls": "net"}, {}),
    "configured": ({"configured": True}, {}),
    "on meta": ({"configured": True, "on_meta": True}, {}),
}


def world_size() -> int:
    return dist.get_world_size()  # Lightning takes the variable out of the environment


def strategy_of(name: str, **config: Any) -> Any:
    if name == "ddp" or not config:
        return name
    from lowtide.lightning import LowtideStrategy

    stage = int(name.rpartition("_")[2])
    return LowtideStrategy(config={"zero_optimization": {"stage": stage}, **config})


def fitted(strategy: str, how: dict[str, Any], options: dict[str, Any], config: dict[str, Any]) -> list[float]:
    """The losses of this rank's microbatches, then the mean of a validation."""
    pl = lightning()
    made = module(pl, **how)
    runner = trainer(pl, strategy_of(strategy, **config), world_size(), **options)
    runner.fit(made, loader(), loader())
    result = [*made.losses, float(runner.callback_metrics["valid"])]
    if strategy != "ddp":
        runner.strategy.engine.close()
    return result


def fitted_each(how: dict[str, Any], options: dict[str, Any], ways: list[tuple[str, Any]]) -> list[list[float]]:
    expected = fitted("ddp", {**how, "on_meta": False}, options, {})
    return [expected, *(fitted(strategy, how, options, config) for strategy, config in ways)]


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_ddp_at_every_stage(ranks: RankPool, way: str) -> None:
    how, options = WAYS[way]
    stages = (1, 2, 3) if way in ("plain", "accumulated") else (1, 3)
    transports: dict[int, dict[str, Any]] = {3: {"communication": {"transport": "sockets"}}}
    ways = [(f"lowtide_stage_{stage}", transports.get(stage, {})) for stage in stages]
    for expected, *found in ranks(2, fitted_each, how, options, ways):
        for one in found:
            torch.testing.assert_close(torch.tensor(one), torch.tensor(expected), rtol=1e-6, atol=1e-6)
        # stage 1 adds gradients of microbatches up before those of ranks, stages 2 and 3 after
        same = found[1:] if "accumulate" in str(options) or "manual" in how else found
        assert all(one == same[0] for one in same)


def refused(strategy: Any, how: dict[str, Any], options: dict[str, Any]) -> str:
    try:
        pl = lightning()
        if isinstance(strategy, dict):
            from lowtide.lightning import LowtideStrategy

            strategy = LowtideStrategy(**strategy)
        callbacks = [getattr(pl.callbacks, name)(*args) for name, *args in options.pop("callbacks", [])]
        trainer(pl, strategy, world_size(), callbacks=callbacks, **options).fit(module(pl, **how), loader(), loader())
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    (
        "optimizers",
        {"stage": 2},
        {"optimizers": 2, "manual": True},
        {},
        "configure_optimizers: expected one optimizer",
    ),
    ("no optimizer", {"stage": 2}, {"optimizers": 0}, {}, "configure_optimizers: expected an optimizer"),
    ("two places", {"config": "zero1"}, {}, {}, 'optimizer: found both "adamw" in the config and the AdamW'),
    ("batch", {"config": {"train_batch_size": 4}}, {}, {}, "train_batch_size: expected no batch sizes"),
    ("pipeline", {"config": {"parallel": {"pipeline": 2}}}, {}, {}, "parallel.pipeline: expected 1 in the config of"),
    ("both", {"config": {}, "stage": 2}, {}, {}, "LowtideStrategy: expected either config or other arguments"),
    ("unknown", {"sub_group_size": 2}, {}, {}, "LowtideStrategy: unknown argument 'sub_group_size'"),
    (
        "clips",
        {"config": {"gradient_clipping": 1.0}},
        {},
        {"gradient_clip_val": 2.0},
        "gradient_clipping: found both 1 (by",
    ),
    (
        "clips values",
        {"config": {"gradient_clipping": 1.0}},
        {},
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        'Trainer(gradient_clip_val=1, gradient_clip_algorithm="value"). Leave one',
    ),
    ("folder", {"config": {"checkpoint": {"folder": "x"}}}, {}, {}, "checkpoint.folder: expected none"),
    ("float16", {"stage": 1}, {}, {"precision": "16-true"}, "precision '16-true': without a loss scale"),
    ("ema", {"stage": 2}, {}, {"callbacks": [("EMAWeightAveraging",)]}, "callbacks: expected none that averages the"),
    ("swa", {"stage": 2}, {}, {"callbacks": [("StochasticWeightAveraging", 0.1)]}, "found a StochasticWeightAveraging"),
    ("section", {"config": {"bf16": {"enabled": True}}}, {}, {}, "bf16: enabled in the config, but"),
]


@pytest.mark.parametrize(
    ("strategy", "how", "options", "text"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_what_the_engine_would_not_do_is_refused(
    ranks: RankPool, strategy: dict[str, Any], how: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    assert text in ranks(1, refused, strategy, how, options)[0]


def precise(strategy: str, precision: str) -> tuple[str, list[float], str, float]:
    pl = lightning()
    from lowtide.lightning import LowtidePrecision

    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # else Lightning makes bf16 of it on a CPU
        options = {"plugins": [LowtidePrecision(precision)]}
    made = module(pl, calls="net")
    runner = trainer(pl, strategy, world_size(), gradient_clip_val=1.0, **options)
    runner.fit(made, loader(), loader())
    engine = runner.strategy.engine
    kind = str(next(iter(engine.state_dict().values()), torch.zeros((), dtype=made.net.scale.dtype)).dtype)
    scale = engine.full("net.scale").dtype, engine.optimizer.num_steps
    engine.close()
    return kind, made.losses, str(scale[0]), float(scale[1])


MASTERS = {
    "32-true": "torch.float32",
    "bf16-mixed": "torch.float32",
    "16-mixed": "torch.float32",
    "bf16-true": "torch.float32",
    "64-true": "torch.float64",
}


@pytest.fixture(scope="module")
def clipped(ranks: RankPool) -> list[list[float]]:
    return ranks(2, fitted, "ddp", {}, {"gradient_clip_val": 1.0}, {})


@pytest.mark.parametrize("precision", MASTERS)
def test_precisions_train_with_the_master_weights_that_they_say(
    ranks: RankPool, clipped: list[list[float]], precision: str
) -> None:
    found = ranks(2, precise, "lowtide_stage_3", precision)
    assert found[0][2] == MASTERS[precision]
    tolerance = 1e-6 if precision in ("32-true", "64-true") else 0.05
    known = 1 if precision == "16-mixed" else 8  # its loss scale begins too high for some steps
    for (_, losses, _, num_steps), reference in zip(found, clipped, strict=True):
        torch.testing.assert_close(losses[:known], reference[:known], rtol=tolerance, atol=tolerance)
        assert known <= num_steps <= 8


def test_an_error_in_a_step_closes_the_engine(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="a fault of the user's"):
        ranks(1, failing)
    assert ranks(1, fitted, "lowtide_stage_2", {}, {}, {})


def failing() -> None:
    pl = lightning()
    made = module(pl)
    made.forward = lambda x: (_ for _ in ()).throw(RuntimeError("a fault of the user's"))
    trainer(pl, "lowtide_stage_2", 1).fit(made, loader(), loader())
