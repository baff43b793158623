"""A Trainer over ranks that share layers, sequences or experts trains as one process does with the same batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.integrations.huggingface.test_parity import summed_loss
from tests.integrations.huggingface.trainings import (
    Outcome,
    Sentences,
    apart,
    closed,
    differences,
    llama,
    mixtral,
    outcome_of,
    stage,
    trained,
    trainer,
)
from tests.kit.ranks import RankPool
from tests.kit.training import rank_and_world


def two_heads() -> Any:
    return llama(num_key_value_heads=2)


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions[:, :-1].argmax(-1) == predictions.label_ids[:, 1:]).mean())}


def run(folder: str, build: Any, config: dict[str, Any] | None, **options: Any) -> Outcome:
    """Of a training of three steps with evaluations; in a microbatch are four samples of all ranks together."""
    parallel = (config or {}).get("parallel", {})
    sharers = parallel.get("tensor", 1) * parallel.get("sequence", 1)
    chosen = {
        "per_device_train_batch_size": 4 * sharers // rank_and_world()[1],
        "per_device_eval_batch_size": 2 * sharers // rank_and_world()[1],
        "gradient_accumulation_steps": 2,
        "optim": "sgd",  # Adam divides gradients of experts that nearly nobody chose by their own size
        "optim_args": "momentum=0.9",
        "learning_rate": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "include_num_input_tokens_seen": "all",
        **options,
    }
    made = trainer(folder, config, chosen, model=build(), compute_metrics=accuracy, eval_dataset=Sentences(5, 8))
    outcome = outcome_of(made, made.train())
    predicted = made.predict(Sentences(5, 4))
    outcome.result = predicted.predictions, predicted.label_ids, predicted.metrics["test_loss"], made.state.global_step
    closed(made)
    return outcome


CASES: dict[str, tuple[int, Any, dict[str, Any], dict[str, Any]]] = {
    "expert": (2, mixtral, stage(3, parallel={"expert": 2}), {}),
    "tensor x data": (4, two_heads, stage(3, parallel={"tensor": 2}), {"train_sampling_strategy": "batch_rebalance"}),
    "sequence x data": (
        4,
        two_heads,
        stage(1, parallel={"sequence": 2}),
        {"train_sampling_strategy": "group_by_length"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_and_predicts_as_plain_processes(ranks: RankPool, tmp_path: Path, name: str) -> None:
    num_ranks, build, config, options = CASES[name]
    plain: Outcome = ranks(2, run, str(tmp_path / "plain"), build, None, **options)[0]
    ours: Outcome = ranks(num_ranks, run, str(tmp_path / "ours"), build, config, **options)[0]
    assert differences(plain, ours) < 1e-6
    for key in ("eval_loss", "eval_accuracy", "num_input_tokens_seen", "epoch"):
        assert ours.logged(key) == pytest.approx(plain.logged(key), abs=1e-6)
    for found, expected in zip(ours.result, plain.result, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


PROMPT = torch.tensor([[3, 7, 9]])
WRITING = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}


def best_and_resumed(folder: str, parallel: dict[str, int], resumed: str | None) -> Any:
    """The weights of the last step, or of a training that goes on to it; with a best model those of the first step."""
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "optim": "sgd"}
    options |= {"per_device_train_batch_size": 4 * (2 if parallel else 1) // torch.distributed.get_world_size()}
    given: dict[str, Any] = {}
    if resumed is None:
        options |= {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
        options |= {"metric_for_best_model": "worth", "greater_is_better": False}
        steps = iter((0.0, 1.0, 2.0))
        given["compute_metrics"] = lambda _: {"worth": next(steps)}
    made = trainer(folder, stage(3, parallel=parallel) if parallel else {}, options, model=two_heads(), **given)
    made.train(resume_from_checkpoint=resumed)
    made.model.eval()
    outcome = outcome_of(made, made.model.generate(PROMPT, **WRITING).tolist())
    made.save_model(f"{folder}/saved")
    closed(made)
    return outcome


def test_layers_that_are_shared_are_saved_loaded_and_generate(ranks: RankPool, tmp_path: Path) -> None:
    best = ranks(2, best_and_resumed, str(tmp_path), {"tensor": 2}, None)[0]
    first, last = (load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (1, 3))
    assert all(torch.equal(best.state[name], value) for name, value in first.items())
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == first.keys()
    for parallel, num_ranks in (({"tensor": 2}, 2), ({}, 1)):
        again = ranks(num_ranks, best_and_resumed, str(tmp_path / "on"), parallel, str(tmp_path / "checkpoint-2"))[0]
        assert apart({name: again.state[name] for name in last}, last) < 1e-6
    model: Any = two_heads()
    model.load_state_dict(best.state)
    assert best.result == model.eval().generate(PROMPT, **WRITING).tolist()


DISPATCH = {"accelerator_config": {"dispatch_batches": True}}
REFUSED: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "expected no neftune_noise_alpha with parallel.seq": ({"sequence": 2}, {"neftune_noise_alpha": 5.0}, {}),
    "expected label_smoothing_factor=0 with para": ({"sequence": 2}, {"label_smoothing_factor": 0.1}, {}),
    "expected labels among the inputs, or": ({"sequence": 2}, {}, {"compute_loss_func": summed_loss}),
    "expected no dispatch_batches if 2 ranks need the same batches": ({"tensor": 2}, DISPATCH, {}),
    "parallel.tensor: expected a model without torch.compile": ({"tensor": 2}, {"torch_compile": True}, {}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_such_ranks_cannot_do_is_an_error(ranks: RankPool, tmp_path: Path, said: str) -> None:
    parallel, options, given = REFUSED[said]
    failed = ranks.fails(2, trained, str(tmp_path), {"parallel": parallel}, options, model=two_heads(), **given)
    assert all(said in of_rank.text for of_rank in failed)
