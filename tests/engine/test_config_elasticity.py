"""DeepSpeed's section `elasticity` chooses the batch sizes as DeepSpeed does, or says why there are none."""

from typing import Any

import pytest

import lowtide
from lowtide.engine.config.batch import legal_sizes
from lowtide.engine.config.config import Config, ConfigError
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import share_of

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TWO_STAGES: dict[str, Any] = {"parallel": {"pipeline": 2}, "gradient_accumulation_steps": "auto"}


def section(limit: int, micros: list[int], version: float = 0.2, **others: Any) -> dict[str, Any]:
    return {"enabled": True, "max_train_batch_size": limit, "micro_batch_sizes": micros, "version": version, **others}


def resolved(elasticity: dict[str, Any], ranks: int, first: int | None = None, **others: Any) -> Config:
    return Config.load({"elasticity": elasticity, **others}).resolve(ranks, first)


@pytest.mark.parametrize(
    ("elasticity", "ranks", "batch", "micro", "num_sizes"),  # of DeepSpeed 0.18.0's compute_elastic_config
    [
        (section(2000, [2, 4, 6], 0.1), 8, 1680, 6, 32),
        (section(2000, [2, 4, 6], 0.1), 7, 1680, 6, 32),
        (section(2000, [2, 4, 6], 0.1, prefer_larger_batch=False), 4, 1680, 6, 32),
        (section(10000, [8, 12, 16, 17], 0.1, min_gpus=32, max_gpus=1500), 32, 9792, 17, 23),
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
def test_the_numbers_are_deepspeeds(
    elasticity: dict[str, Any], ranks: int, batch: int, micro: int, num_sizes: int | None
) -> None:
    config = resolved(elasticity, ranks)
    assert [getattr(config, key) for key in BATCH] == [batch, micro, batch // micro // ranks]
    assert Config.load(config.as_dict()) == config
    _, sizes = legal_sizes(Config.load({"elasticity": elasticity}).elasticity)
    assert ranks not in sizes if num_sizes is None else len(sizes) == num_sizes


def test_the_batch_stays_on_other_ranks_and_the_note_says_where_it_does_not() -> None:
    micros = section(2000, [2, 4, 6])
    assert resolved(micros, 6, first=8).notes[-1] == (
        "elasticity.enabled: it has chosen train_batch_size 1680 = microbatch x accumulation x data-parallel "
        "ranks = 4 x 70 x 6; 1680 is the batch on 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, ... data-parallel ranks"
    )
    assert " = 6 x 30 x 11; the job began with 1680; " in resolved(micros, 11, first=8).notes[-1]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"elasticity": {"enabled": True}}, "elasticity.micro_batch_sizes: must be given: the global batch is chosen"),
        ({"elasticity": section(4, [2, 8])}, "expected at most 4, by max_train_batch_size, found 8"),
        ({"elasticity": section(8, [2], min_gpus=4, max_gpus=2)}, "max_gpus: expected at least min_gpus(4), found 2"),
        ({"elasticity": section(8, [2]), "train_batch_size": 8}, "train_batch_size: is chosen by the section elastic"),
        ({"elasticity": section(8, [2]), "pipeline": {"microbatches": 2}}, "pipeline.microbatches: is chosen by the"),
        (
            {"elasticity": section(8, [2], model_parallel_size=2)},
            "expected parallel.tensor x pipeline x sequence = 1, found 2",
        ),
        ({"elasticity": section(8, [2], 0.1, model_parallel_size=2), **TWO_STAGES}, "elasticity.version: expected 0.2"),
        (
            {"elasticity": section(8, [2], model_parallel_size=2, num_gpus_per_node=3), **TWO_STAGES},
            "elasticity.num_gpus_per_node: expected a multiple of model_parallel_size(2), found 3",
        ),
        ({"elasticity": section(8, [2], 0.3)}, "elasticity.version: expected 0.1 or 0.2, found 0.3"),
        ({"elasticity": {"enabled": False, "max_gpu": 1}}, 'unknown key "max_gpu"; did you mean "max_gpus"?'),
        (
            {"elasticity": section(2000, [2, 4, 6], 0.1)},
            "elasticity: expected a number of ranks that divides the global batch 1680 into microbatches of 2, 4, 6, "
            "from min_gpus to max_gpus, found 11; the nearest are 10 or 12",
        ),
        (
            {"elasticity": section(8, [2])},
            "elasticity: expected a global batch of at least 22 for the smallest microbatch on 11 data-parallel ranks, "
            "found 0 within max_train_batch_size(8)",
        ),
    ],
)
def test_what_cannot_be_is_an_error(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(values).resolve(11 * (1 if "parallel" not in values else 2))
    assert text in str(caught.value)


def test_what_has_no_effect_is_said() -> None:
    ignoring = section(8, [2], 0.1, ignore_non_elastic_batch_info=True, min_time=20, num_gpus_per_node=2)
    config = Config.load({"elasticity": ignoring, "train_batch_size": 6, "gradient_clipping": 1.0})
    assert [note.partition(" has no effect here: ")[0] for note in config.notes] == [
        "train_batch_size: 6",
        "elasticity.min_time: 20.0",
        "elasticity.num_gpus_per_node: 2",
    ]
    assert config.resolve(2).train_batch_size == 8
    assert Config.load({"elasticity": None}) == Config.load({"elasticity": {"enabled": False}}) == Config.load({})


def test_ranks_of_one_sample_count_once() -> None:
    config = resolved(section(16, [1, 2], model_parallel_size=2, num_gpus_per_node=2), 8, **TWO_STAGES)
    assert [getattr(config, key) for key in BATCH] == [12, 1, 3]


def trained(elasticity: dict[str, Any]) -> tuple[int | None, float]:
    config = {"elasticity": elasticity, "optimizer": {"type": "sgd"}, "steps_per_print": 0}
    with lowtide.initialize(models.mlp(), config) as engine:
        batch = share_of(models.vector_batch(0, engine.config.train_batch_size or 0))
        return engine.config.train_batch_size, engine.train_step(batch).loss.item()


def test_an_engine_trains_with_the_batch(ranks: RankPool) -> None:
    (alone,) = ranks(1, trained, section(9, [1, 2]))
    assert alone[0] == 8 and ranks(2, trained, section(9, [1, 2]))[0] == (8, pytest.approx(alone[1], rel=1e-5))
