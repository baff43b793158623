"""Weights stream from a Hugging Face folder into the shards: the ordinary model, and no rank ever holds it."""

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engine.model.deferred import DeferredModel
from lowtide.huggingface import from_pretrained, streaming
from tests.engine.adapted import base, with_peft
from tests.engine.test_hugging_face import bert, gpt2, llama, mixtral
from tests.integrations.huggingface.trainings import (
    Outcome,
    closed,
    differences,
    llama as tiny_llama,
    outcome_of,
    stage,
    trainer,
)
from tests.kit.hugging_face import small
from tests.kit.ranks import RankPool
from tests.kit.resident import own_bytes

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

SGD = {"train_batch_size": 2, "optimizer": {"type": "sgd", "params": {"lr": 0.1}}}
MODELS: dict[str, Callable[[], Any]] = {"gpt2 (tied)": gpt2, "mixtral (experts)": mixtral, "bert": bert}


def save(build: Callable[[], Any], folder: Path, **options: Any) -> Any:
    torch.manual_seed(1)
    model = build()
    model.save_pretrained(folder, **options)
    return model


def loaded(folder: str, config: dict[str, Any], kind: str = "AutoModel", **options: Any) -> dict[str, Tensor]:
    def build() -> Any:
        return from_pretrained(getattr(transformers, kind), folder, **options)

    with lowtide.initialize(build, SGD | config) as engine:
        return engine.state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_the_values_are_those_of_from_pretrained(ranks: RankPool, tmp_path: Path, name: str) -> None:
    model = save(MODELS[name], tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = type(model).from_pretrained(tmp_path).state_dict()
    found = ranks(2, loaded, str(tmp_path), stage(3), kind=type(model).__name__)[0]
    assert found.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
def test_the_dtype_is_as_transformers_has_it(tmp_path: Path, dtype: Any) -> None:
    save(llama, tmp_path)
    expected = transformers.LlamaModel.from_pretrained(tmp_path, dtype=dtype).state_dict()
    found = loaded(str(tmp_path), {}, dtype=dtype)
    assert all(value.dtype == found[key].dtype and torch.equal(value, found[key]) for key, value in expected.items())


@pytest.mark.parametrize("name", ["head", "adapters", "drawn by hand"])
def test_what_is_missing_has_the_bits_of_plain_from_pretrained(tmp_path: Path, name: str) -> None:
    """And what is drawn behind it."""
    kinds = {"head": transformers.BertForSequenceClassification, "drawn by hand": DrawnByHand}
    save({"head": bert, "adapters": base}.get(name, lambda: DrawnByHand(bert().config)), tmp_path)
    kind: Any = kinds.get(name, transformers.LlamaForCausalLM)
    change: Any = with_lora if name == "adapters" else lambda model: model
    torch.manual_seed(7)
    expected = {name: value.clone() for name, value in change(kind.from_pretrained(tmp_path)).named_parameters()}
    behind = torch.rand(3)
    torch.manual_seed(7)
    deferred = DeferredModel(lambda: change(from_pretrained(kind, tmp_path)))
    names = {id(param): name for name, param in deferred.module.named_parameters()}
    found = {names[id(param)]: values.clone() for param, values in deferred.values()}
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
    assert torch.equal(torch.rand(3), behind)


class DrawnByHand(transformers.BertForSequenceClassification):  # type: ignore[misc, name-defined]  # no types
    """Its constructor draws without torch.nn.init, as some models' do."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.noise = nn.Parameter(torch.randn(5).normal_())


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return with_peft(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def test_prompts_train_on_a_model_that_streams(tmp_path: Path) -> None:
    """PEFT keeps their numbers in a dict of the model, where they are neither parameters nor buffers."""
    peft = pytest.importorskip("peft")
    save(base, tmp_path)

    def losses(is_streamed: bool) -> list[float]:
        def build() -> Any:
            with streaming() if is_streamed else contextlib.nullcontext():
                model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
                return with_peft(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))

        torch.manual_seed(7)
        batch = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8)}
        with lowtide.initialize(build if is_streamed else build(), SGD | stage(3)) as engine:
            return [engine.train_step(batch).loss.item() for _ in range(2)]

    found = losses(is_streamed=True)
    assert found == losses(is_streamed=False) and found[0] != found[1]


def test_no_more_than_a_parameter_is_held(tmp_path: Path) -> None:
    """Beside mapped files: a parameter and its parts where values are made of those in files."""
    largest = max(param.nbytes for param in save(mixtral, tmp_path).parameters())
    deferred = DeferredModel(lambda: from_pretrained(transformers.MixtralForCausalLM, tmp_path))
    assert {id(param) for param, _ in deferred.values()} == {id(param) for param in deferred.module.parameters()}
    assert deferred.peak_bytes <= 3 * largest


def large() -> Any:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    return small("LlamaForCausalLM", vocab_size=512, num_key_value_heads=4, **sizes)


def test_the_kernel_counts_no_model_either(tmp_path: Path) -> None:
    total = sum(param.nbytes for param in save(large, tmp_path).parameters())
    deferred = DeferredModel(lambda: from_pretrained(transformers.LlamaForCausalLM, tmp_path))
    before, shards, counts = own_bytes(), [], []
    for _, values in deferred.values():
        shards.append(values.reshape(-1)[: values.numel() // 8].clone())  # what a rank of eight takes
        counts.append(own_bytes() - before)
    assert total > 40 << 20
    assert max(counts) < total // 8 + (4 << 20)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_map": "auto"}, "expected no device_map. The config"),
        ({"use_safetensors": False}, r"expected safetensors files, found .*pytorch_model.bin"),
    ],
)
def test_what_cannot_stream(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    model = save(llama, tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=text):
            loaded(str(tmp_path), {}, **options)


def test_outside_of_initialize_it_is_refused(tmp_path: Path) -> None:
    save(llama, tmp_path)
    with pytest.raises(ValueError, match=r"found a model with memory, so this would read its files at once. Call"):
        from_pretrained(transformers.LlamaModel, tmp_path)


def test_the_package_is_left_as_it_was(tmp_path: Path) -> None:
    before: Any = transformers.PreTrainedModel._load_pretrained_model
    save(llama, tmp_path)
    loaded(str(tmp_path), {})
    assert transformers.PreTrainedModel._load_pretrained_model is before
    assert isinstance(transformers.LlamaModel.from_pretrained(tmp_path), nn.Module)


def train_streaming(folder: str, streams: bool) -> Outcome:
    """An evaluation and a training; streams: by lowtide's `from_pretrained`."""
    kind = transformers.LlamaForCausalLM

    def build() -> Any:
        return with_lora(from_pretrained(kind, folder) if streams else kind.from_pretrained(folder))

    made = trainer(f"{folder}/out", stage(3), {"max_steps": 2}, model_init=build)
    torch.rand(3)  # what a script draws between the model and its engine
    made.evaluate()
    made.train()
    outcome = outcome_of(made)
    closed(made)
    return outcome


def test_the_model_of_a_trainer_streams_in_model_init(ranks: RankPool, tmp_path: Path) -> None:
    save(tiny_llama, tmp_path)
    read, streamed = (ranks(2, train_streaming, str(tmp_path), streams)[0] for streams in (False, True))
    assert differences(read, streamed) == 0
    assert streamed.logged("eval_loss") == read.logged("eval_loss")
