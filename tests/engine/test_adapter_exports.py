"""engine.export of adapters alone, as PEFT reads them, and of the model with its adapters merged."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.adapted import ByHand, base, engine_of, half_base, lora, run, tokens, with_peft
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import differences, refusal

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors_torch = pytest.importorskip("safetensors.torch")

SOCKETS = {"communication": {"transport": "sockets"}}


def with_head() -> Any:
    return lora(modules_to_save=["lm_head"], use_rslora=True)


def with_dora() -> Any:
    return lora(use_dora=True, target_modules=["q_proj"])


def with_two() -> Any:
    model = lora()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    return model


def inside() -> Any:
    """As transformers puts adapters on by itself."""
    model = base()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    return model


def export_all(builds: Sequence[Any], stage: int, folder: str, config: dict[str, Any], **options: Any) -> list[Any]:
    """Exports to folder/NUMBER; returns what the model says then, on rank 0."""
    outputs = []
    for number, build in enumerate(builds):
        with engine_of(build, stage, **config) as engine:
            if any("lora_" in name for name, param in engine.module.named_parameters() if param.requires_grad):
                run(engine, 0, 1)
            engine.export(f"{folder}/{number}", **options)
            with torch.no_grad():
                outputs.append(engine.eval()(input_ids=tokens(5)).logits)
    return outputs


def check_exports(ranks: RankPool, builds: Sequence[Any], stage: int, folder: Path) -> None:
    outputs = ranks(2, export_all, builds, stage, str(folder), SOCKETS, adapters_only=True)[0]
    for number, expected in enumerate(outputs):
        torch.manual_seed(0)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            model = peft.PeftModel.from_pretrained(base(), folder / str(number)).eval()
            torch.testing.assert_close(model(input_ids=tokens(5)).logits, expected, msg=str(builds[number]))


def test_peft_loads_what_is_exported(ranks: RankPool, tmp_path: Path) -> None:
    check_exports(ranks, [lora, with_head, with_dora, with_two], 3, tmp_path)
    assert (tmp_path / "3" / "other" / "adapter_model.safetensors").exists()
    assert {path.name for path in (tmp_path / "0").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    total_bytes = sum(file.stat().st_size for file in (tmp_path / "0").iterdir())
    assert total_bytes < 4 * 1.5 * sum(p.numel() for p in lora().parameters() if p.requires_grad)


def test_peft_loads_adapters_that_transformers_has_put_on(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("peft", minversion=transformers.integrations.peft.MIN_PEFT_VERSION)
    check_exports(ranks, [inside], 3, tmp_path)


def test_a_merged_model_is_an_ordinary_one(ranks: RankPool, tmp_path: Path) -> None:
    config = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    outputs = ranks(2, export_all, [with_head, with_dora], 3, str(tmp_path), config, merged=True)[0]
    for number, expected in enumerate(outputs):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
        assert type(model) is transformers.LlamaForCausalLM
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=tokens(5)).logits, expected, rtol=1e-4, atol=1e-5)


def merge_and_train(folder: str) -> list[list[float]]:
    """A merged export changes nothing of the training."""
    found = []
    for exports in (False, True):
        with engine_of(half_base, 3, **SOCKETS) as engine:
            losses = run(engine, 0, 1)
            if exports:
                engine.export(folder, merged=True)
            found.append(losses + run(engine, 1, 2))
    return found


def test_training_goes_on_after_a_merged_export(ranks: RankPool, tmp_path: Path) -> None:
    plain, merged = ranks(2, merge_and_train, str(tmp_path))[0]
    assert merged == plain


def test_what_was_trained_of_a_model_by_hand_is_exported_and_a_base_beside_it_stays(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with engine_of(ByHand, 0) as engine:
        engine.train_step(models.token_batch(0, 8))
        engine.export(tmp_path, adapters_only=True)
        trained = {name: value for name, value in engine.state_dict().items() if "lora_" in name}
    assert differences(safetensors_torch.load_file(tmp_path / "adapter_model.safetensors"), trained) == []
    assert (tmp_path / "model.safetensors").exists()


def refuse_in_a_pipeline(folder: str) -> str:
    with engine_of(lora, 1, accumulation=2, parallel={"pipeline": 2}) as engine:
        text = refusal(engine.export, folder, merged=True)
        engine.export(folder, adapters_only=True)
    return text


def test_a_pipeline_exports_adapters_alone(ranks: RankPool, tmp_path: Path) -> None:
    text = "engine.export(merged=True): expected ranks with whole layers, found layers split by parallel.pipeline"
    assert all(one.startswith(text) for one in ranks(2, refuse_in_a_pipeline, str(tmp_path)))
    names = safetensors_torch.load_file(tmp_path / "adapter_model.safetensors").keys()
    assert sum("lora_A" in name for name in names) == 6


def with_tokens() -> Any:
    return lora(target_modules=["q_proj"], trainable_token_indices=[1, 2])


def with_prompt() -> Any:
    return with_peft(base(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


NO_PIECES = "expected no shard_bytes, found '1MB', since PEFT reads"
WRAPPED = "expected adapted layers that can be merged, found a TrainableTokensWrapper at"


@pytest.mark.parametrize(
    ("build", "options", "text"),
    [
        (models.TinyGPT, {"adapters_only": True}, "found no frozen parameter; leave adapters_only out"),
        (ByHand, {"merged": True}, "expected a PEFT model (get_peft_model), found ByHand"),
        (lora, {"merged": True, "adapters_only": True}, "expected adapters_only or merged, found both"),
        (lora, {"adapters_only": True, "shard_bytes": "1MB"}, NO_PIECES),
        (with_tokens, {"merged": True}, WRAPPED),
        (with_prompt, {"adapters_only": True}, "found the embeddings of PROMPT_TUNING, which PEFT computes"),
    ],
)
def test_what_cannot_be_exported(build: Any, options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with engine_of(build, 0) as engine:
        assert text in refusal(engine.export, tmp_path, **options)
