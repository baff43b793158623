"""`resolve` fills the batch triple, and DeepSpeed's section `elasticity` chooses it; the table has the errors."""

from itertools import product
from typing import Any

import pytest

import lowtide
from lowtide.engine.config.batch import legal_sizes
from lowtide.engine.config.config import Config, ConfigError
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import share_of

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def triple(config: Config) -> list[int]:
    return [getattr(config, key) for key in (TRAIN, MICRO, ACCUMULATION)]


def test_every_triple_that_resolves_holds_the_equation() -> None:
    choices = [None, 1, 2, 3, 12]
    for train, micro, accumulation, world_size in product([None, 7, 12, 24], choices, choices, (1, 3, 4)):
        given = {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
        values = {key: value for key, value in given.items() if value is not None}
        try:
            t, m, a = triple(Config.load(values).resolve(world_size))
        except ConfigError:
            continue
        assert t == m * a * world_size and values.items() <= {TRAIN: t, MICRO: m, ACCUMULATION: a}.items()


def test_resolve_keeps_the_original_and_happens_once() -> None:
    config = Config.load({TRAIN: "auto", MICRO: 2})
    resolved = config.resolve(4)
    assert resolved.train_batch_size == 8 and config.train_batch_size is None
    assert resolved.resolve(4).notes == resolved.notes != config.notes
    with pytest.raises(ValueError, match="world_size: expected at least 1, found 0"):
        config.resolve(0)


def section(limit: int, micros: list[int], version: float = 0.2, **others: Any) -> dict[str, Any]:
    return {"enabled": True, "max_train_batch_size": limit, "micro_batch_sizes": micros, "version": version, **others}


@pytest.mark.parametrize(
    ("elasticity", "ranks", "batch", "micro", "num_sizes"),  # of DeepSpeed 0.18.0's compute_elastic_config
    [
        (section(2000, [2, 4, 6], 0.1), 8, 1680, 6, 32),
        (section(2000, [2, 4, 6], 0.1, prefer_larger_batch=False), 4, 1680, 6, 32),
        (section(10000, [8, 12, 16, 17], 0.1, min_gpus=32, max_gpus=1500), 64, 9792, 17, 23),
        (section(1, [1], 0.1), 1, 1, 1, 1),
        (section(2000, [2, 4, 6]), 7, 1680, 6, 32),
        (section(2000, [2, 4, 6], num_gpus_per_node=8), 16, 1920, 6, 16),
        (section(2000, [2, 4, 6], num_gpus_per_node=8), 56, 1904, 2, None),  # a batch of these ranks alone
        (section(2000, [3, 7], num_gpus_per_node=4), 11, 1980, 3, None),
        (section(500, [5, 9], prefer_larger_batch=False), 13, 455, 5, None),
        (section(300, [4, 6], max_gpus=4), 64, 256, 4, None),
    ],
)
def test_elastic_numbers_are_deepspeeds(
    elasticity: dict[str, Any], ranks: int, batch: int, micro: int, num_sizes: int | None
) -> None:
    loaded = Config.load({"elasticity": elasticity})
    config = loaded.resolve(ranks)
    assert triple(config) == [batch, micro, batch // micro // ranks] and Config.load(config.as_dict()) == config
    _, sizes = legal_sizes(loaded.elasticity)
    assert ranks not in sizes if num_sizes is None else len(sizes) == num_sizes


def test_an_elastic_batch_stays_on_other_ranks_and_the_note_says_where_it_does_not() -> None:
    config = Config.load({"elasticity": section(2000, [2, 4, 6])})
    assert config.resolve(6, 8).notes[-1] == (
        "elasticity.enabled: it has chosen train_batch_size 1680 = microbatch x accumulation x data-parallel "
        "ranks = 4 x 70 x 6; 1680 is the batch on 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, ... data-parallel ranks"
    )
    assert " = 6 x 30 x 11; the job began with 1680; " in config.resolve(11, 8).notes[-1]


def test_ranks_of_one_sample_count_once() -> None:
    elasticity = section(16, [1, 2], model_parallel_size=2, num_gpus_per_node=2)
    config = Config.load({"elasticity": elasticity, "parallel": {"pipeline": 2}, ACCUMULATION: "auto"})
    assert triple(config.resolve(8)) == [12, 1, 3]


def trained(elasticity: dict[str, Any]) -> tuple[int | None, float]:
    config = {"elasticity": elasticity, "optimizer": {"type": "sgd"}, "steps_per_print": 0}
    with lowtide.initialize(models.mlp(), config) as engine:
        batch = share_of(models.vector_batch(0, engine.config.train_batch_size or 0))
        return engine.config.train_batch_size, engine.train_step(batch).loss.item()


def test_an_engine_trains_with_the_batch(ranks: RankPool) -> None:
    (alone,) = ranks(1, trained, section(9, [1, 2]))
    assert alone[0] == 8 and ranks(2, trained, section(9, [1, 2]))[0] == (8, pytest.approx(alone[1], rel=1e-5))
