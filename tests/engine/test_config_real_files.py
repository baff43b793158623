"""Every file of real projects in data/real_configs loads with the notes, or has the faults, that INDEX.tsv says."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.engine.config.config import Config, ConfigError
from tests.kit import models

FILES = Path(__file__).parent / "data" / "real_configs"
INDEX = {row["file"]: row for row in csv.DictReader((FILES / "INDEX.tsv").read_text().splitlines(), delimiter="\t")}
LOADS = [name for name, row in INDEX.items() if not row["faults"]]
TRAINED = [name for name, row in INDEX.items() if row["faults"] in ("", "scheduler.params.total_num_steps missing")]
FILL = {"scheduler.params.total_num_steps": 10}
SIZES = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}


def test_the_index_has_every_file() -> None:
    assert sorted(INDEX) == sorted(path.name for path in FILES.glob("*.json"))


@pytest.mark.parametrize("name", LOADS)
def test_it_loads_with_exactly_these_notes(name: str) -> None:
    config = Config.load(FILES / name)
    assert [note.split(": ")[0] for note in config.notes] == INDEX[name]["notes"].split()
    if config.train_batch_size is None:
        resolved = config.resolve(4)
        assert resolved.train_batch_size is not None and resolved.train_batch_size % 4 == 0


@pytest.mark.parametrize("name", [name for name in INDEX if name not in LOADS])
def test_it_has_exactly_these_faults(name: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        Config.load(FILES / name)
    assert ", ".join(f"{fault.path} {fault.kind}" for fault in caught.value.faults) == INDEX[name]["faults"]


def kind_of(value: Any) -> Any:
    """A value of a config without its numbers."""
    if isinstance(value, dict):
        return {key: kind_of(one) for key, one in value.items()}
    if isinstance(value, list):
        return [kind_of(one) for one in value]
    return "number" if type(value) in (int, float) else value


def trained(folder: Path) -> dict[str, float]:
    """Two steps with each file, with batches of one row. The loss of the second.

    One trains for all that differ in numbers alone, at the same stage.
    """
    losses, of_kind = {}, dict[str, float]()
    for name in TRAINED:
        config = Config.load(FILES / name, fill=FILL).as_dict() | SIZES
        kind = json.dumps([config["zero_optimization"]["stage"], kind_of(config)], sort_keys=True)
        if kind in of_kind:
            losses[name] = of_kind[kind]
            continue
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder)
        config["zero_optimization"]["offload_param"]["nvme_path"] = str(folder)
        optimizer = None if config["optimizer"] else torch.optim.AdamW
        torch.manual_seed(0)
        with lowtide.initialize(models.mlp(), config | {"device": "cpu"}, optimizer=optimizer) as engine:
            for step in range(2):
                result = engine.train_step(models.vector_batch(step, 1))
            losses[name] = of_kind[kind] = result.loss.item()
    return losses


def test_each_file_that_loads_trains(tmp_path: Path) -> None:
    losses = trained(tmp_path)
    assert list(losses) == TRAINED and all(math.isfinite(loss) for loss in losses.values())


def test_nearly_all_files_of_users_train() -> None:
    users = [name for name, row in INDEX.items() if not row["repo"].startswith("deepspeedai/")]
    assert sum(name in TRAINED for name in users) >= 0.95 * len(users)
