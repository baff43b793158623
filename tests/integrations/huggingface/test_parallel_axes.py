"""A Trainer over ranks that share layers, sequences or experts trains as one process does with the same batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from tests.integrations.huggingface.test_accelerator import accelerator_of
from tests.integrations.huggingface.test_parity import differences, summed_loss
from tests.integrations.huggingface.trainings import (
    NUM_TOKENS,
    SIZES,
    Outcome,
    Sentences,
    closed,
    outcome_of,
    padded,
    trainer,
)
from tests.kit.ranks import RankPool


def llama() -> nn.Module:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(vocab_size=NUM_TOKENS, pad_token_id=0, **{**SIZES, "num_key_value_heads": 2})
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    torch.manual_seed(5)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=NUM_TOKENS, pad_token_id=0, num_local_experts=4, **SIZES)
    )


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions[:, :-1].argmax(-1) == predictions.label_ids[:, 1:]).mean())}


def run(folder: str, build: Any, parallel: dict[str, int] | None, stage: int, batch: int, **options: Any) -> Any:
    """Of a training of three steps with evaluations; batch: of the microbatches of all ranks together."""
    config = None if parallel is None else {"zero_optimization": {"stage": stage}, "parallel": parallel}
    ranks = int(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else 1
    sharers = (parallel or {}).get("tensor", 1) * (parallel or {}).get("sequence", 1)
    chosen = {
        "per_device_train_batch_size": batch * sharers // ranks,
        "per_device_eval_batch_size": 2 * sharers // ranks,
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


REBALANCED = {"train_sampling_strategy": "batch_rebalance"}
BY_LENGTH = {"train_sampling_strategy": "group_by_length"}
CASES: list[tuple[str, int, int, dict[str, int], int, Any, dict[str, Any]]] = [
    ("expert", 2, 2, {"expert": 2}, 3, mixtral, {}),
    ("tensor x data", 4, 2, {"tensor": 2}, 3, llama, REBALANCED),
    ("sequence x data", 4, 2, {"sequence": 2}, 1, llama, BY_LENGTH),
]


@pytest.mark.parametrize(
    ("num_ranks", "data_size", "parallel", "stage", "build", "options"),
    [row[1:] for row in CASES],
    ids=[row[0] for row in CASES],
)
def test_it_trains_and_predicts_as_plain_processes(
    ranks: RankPool,
    tmp_path: Path,
    num_ranks: int,
    data_size: int,
    parallel: dict[str, int],
    stage: int,
    build: Any,
    options: dict[str, Any],
) -> None:
    plain: Outcome = ranks(data_size, run, str(tmp_path / "plain"), build, None, 0, 4, **options)[0]
    ours: Outcome = ranks(num_ranks, run, str(tmp_path / "ours"), build, parallel, stage, 4, **options)[0]
    assert differences(plain, ours) < 1e-6
    for key in ("eval_loss", "eval_accuracy", "num_input_tokens_seen", "epoch"):
        assert ours.logged(key) == pytest.approx(plain.logged(key), abs=1e-6)
    for found, expected in zip(ours.result, plain.result, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def best_and_resumed(folder: str, parallel: dict[str, int] | None, resumed: str | None) -> Any:
    """The weights of the last step, or of a training that goes on to it; with a best model those of the first step."""
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "optim": "sgd"}
    ranks = torch.distributed.get_world_size()
    options |= {"per_device_train_batch_size": 4 * (2 if parallel else 1) // ranks}
    if resumed is None:
        options |= {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
        options |= {"metric_for_best_model": "worth", "greater_is_better": False}
    config = None if parallel is None else {"zero_optimization": {"stage": 3}, "parallel": parallel}
    steps = iter((0.0, 1.0, 2.0))
    given: dict[str, Any] = {"compute_metrics": lambda _: {"worth": next(steps)}} if resumed is None else {}
    made = trainer(folder, {} if config is None else config, options, model=llama(), **given)
    made.train(resume_from_checkpoint=resumed)
    made.model.eval()
    prompt = torch.tensor([[3, 7, 9]])
    written = made.model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None).tolist()
    outcome = outcome_of(made, written)
    made.save_model(f"{folder}/saved")
    closed(made)
    return outcome


def test_layers_that_are_shared_are_saved_loaded_and_generate(ranks: RankPool, tmp_path: Path) -> None:
    best = ranks(2, best_and_resumed, str(tmp_path), {"tensor": 2}, None)[0]
    first, last = (load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (1, 3))
    assert all(torch.equal(best.state[name], value) for name, value in first.items())
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == first.keys()
    for parallel, num_ranks in (({"tensor": 2}, 2), (None, 1)):
        again = ranks(num_ranks, best_and_resumed, str(tmp_path / "on"), parallel, str(tmp_path / "checkpoint-2"))[0]
        assert max(float((again.state[name] - value).abs().max()) for name, value in last.items()) < 1e-6
    model: Any = llama()
    model.load_state_dict(best.state)
    expected = model.eval().generate(torch.tensor([[3, 7, 9]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert best.result == expected.tolist()


def accelerated(parallel: dict[str, int] | None) -> Any:
    """What a loop of Accelerate's sees: losses, norms and rates, and what is collected of the ranks."""
    config = None if parallel is None else {"zero_optimization": {"stage": 2}, "parallel": parallel}
    accelerator = accelerator_of(config, gradient_accumulation_steps=2)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    loader = torch.utils.data.DataLoader(Sentences(10), batch_size=2, collate_fn=padded)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    seen, rows, names = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen += [float(accelerator.gather(loss.detach()).mean()), scheduler.get_last_lr()[0]]
        seen += [float(accelerator.reduce(loss.detach())), float(accelerator.reduce(loss.detach(), "mean"))]
        rows += accelerator.gather_for_metrics(batch["input_ids"]).tolist()
        names += accelerator.gather_for_metrics([str(row.tolist()) for row in batch["input_ids"]])
    with accelerator.split_between_processes(list(range(5))) as own:
        parts = accelerator.gather_for_metrics([own], use_gather_object=True)
    state = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return seen, rows, names, parts, {name: value.clone() for name, value in state.items()}


def test_a_loop_of_accelerate_divides_data_over_those_that_have_other_data(ranks: RankPool) -> None:
    plain, ours = ranks(2, accelerated, None)[0], ranks(4, accelerated, {"tensor": 2})[0]
    assert ours[0] == pytest.approx(plain[0], abs=1e-6)
    assert ours[1:4] == plain[1:4]
    assert max(float((ours[4][name] - value).abs().max()) for name, value in plain[4].items()) < 1e-6


def refusal(folder: str, parallel: dict[str, int], options: dict[str, Any], given: dict[str, Any]) -> None:
    trainer(folder, {"parallel": parallel}, options, model=llama(), **given).train()


DISPATCH = {"accelerator_config": {"dispatch_batches": True}}
REFUSED: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any], str]] = {
    "noise": ({"sequence": 2}, {"neftune_noise_alpha": 5.0}, {}, "expected no neftune_noise_alpha with parallel.seq"),
    "smoothing": ({"sequence": 2}, {"label_smoothing_factor": 0.1}, {}, "expected label_smoothing_factor=0 with para"),
    "loss function": ({"sequence": 2}, {}, {"compute_loss_func": summed_loss}, "expected labels among the inputs, or"),
    "dispatch": ({"tensor": 2}, DISPATCH, {}, "expected no dispatch_batches if 2 ranks need the same batches"),
    "compiled": ({"tensor": 2}, {"torch_compile": True}, {}, "parallel.tensor: expected a model without torch.compile"),
    "degree": ({"tensor": 3}, {}, {}, "tensor(3) x data(?) = world size (2) does not hold"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_such_ranks_cannot_do_is_an_error(ranks: RankPool, tmp_path: Path, name: str) -> None:
    *case, text = REFUSED[name]
    assert all(text in failed.text for failed in ranks.fails(2, refusal, str(tmp_path), *case))
