"""Adapters on a base that is only read: they train as by plain torch, and are saved and exported without the base."""

import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lowtide.checkpoint.files import CheckpointError
from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.comm import World
from lowtide.engine.archive.frozen import digest_of
from lowtide.zero.group import ShardedGroup
from tests.engine.adapted import (
    ByHand,
    base,
    engine_of,
    half_base,
    lora,
    run,
    tokens,
    train_all,
    train_plainly,
    with_peft,
)
from tests.kit import models
from tests.kit.hugging_face import small
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import differences, refusal

pytest.importorskip("peft")

SOCKETS = {"communication": {"transport": "sockets"}}
RECOMPUTED = {"activation_checkpointing": {"every": 1}}
STEPS = 2


def on_experts() -> Any:
    model = small("MixtralForCausalLM", num_local_experts=4, experts_implementation="eager")
    return lora(model, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])


def in_files(folder: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return {"zero_optimization": {"offload_param": nvme, "offload_optimizer": nvme}}


def test_lora_trains_as_by_plain_torch_at_every_stage(ranks: RankPool, tmp_path: Any) -> None:
    runs: list[Any] = [(lora, 0, {}), (lora, 3, RECOMPUTED | SOCKETS | in_files(tmp_path))]
    runs += [(lora, 1, {"accumulation": 2, "parallel": {"pipeline": 2}, "pipeline": {"schedule": "1f1b"}})]
    found = ranks(2, train_all, runs, STEPS)[0]
    losses, state = train_plainly(lora, STEPS)
    for (_, stage, config), (own_losses, own_state) in zip(runs, found, strict=True):
        torch.testing.assert_close(own_losses, losses, rtol=0, atol=1e-6, msg=f"{stage} {config}")
        torch.testing.assert_close(own_state, state, rtol=0, atol=1e-6)
    (own_losses, own_state), (at_3, state_at_3), _ = found
    assert own_losses == at_3 and differences(own_state, state_at_3) == []


def test_adapters_of_all_experts_train_as_by_plain_torch_and_merge(ranks: RankPool, tmp_path: Path) -> None:
    """PEFT parametrizes the experts' parameters in each forward, with an adapter inside of an adapter."""
    found = ranks(2, train_all, [(on_experts, stage, SOCKETS) for stage in (1, 3)], STEPS)[0]
    losses, state = train_plainly(on_experts, STEPS)
    for own_losses, own_state in found:
        torch.testing.assert_close(own_losses, losses, rtol=0, atol=1e-6)
        torch.testing.assert_close(own_state, state, rtol=0, atol=1e-6)
    (expected,) = ranks(2, export_all, [on_experts], 3, str(tmp_path), SOCKETS, merged=True)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "0")
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens(5)).logits, expected, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_a_bf16_base_keeps_its_dtype_and_its_adapters_theirs(tmp_path: Path) -> None:
    """Also beside a merged export, which changes nothing of the training."""
    found = []
    for stage in (0, 3):
        with engine_of(half_base, stage, **SOCKETS) as engine:
            losses = run(engine, 0, 1)
            if stage == 3:
                engine.export(tmp_path, merged=True)
            found.append((losses + run(engine, 1, 1), engine.state_dict()))
    (losses, state), (losses_at_3, state_at_3) = found
    torch.testing.assert_close(losses, train_plainly(half_base, 2)[0], rtol=0, atol=2e-2)
    assert losses_at_3 == losses and differences(state_at_3, state) == []
    for name, value in state.items():
        assert value.dtype == (torch.float32 if "lora" in name else torch.bfloat16), name


@on_ranks(2)
def test_attaching_adapters_gathers_nothing() -> None:
    """While a model is built with adapters and taken up, its buffers alone are sent."""
    with (
        mock.patch.object(ShardedGroup, "gather", autospec=True, side_effect=ShardedGroup.gather) as gather,
        mock.patch.object(World, "broadcast_tensor", autospec=True, side_effect=World.broadcast_tensor) as broadcast,
        engine_of(lora, 3, **SOCKETS) as engine,
    ):
        sent = sum(call.args[1].nbytes for call in broadcast.call_args_list)
        assert gather.call_count == 0 and sent == sum(buffer.nbytes for buffer in engine.module.buffers())


LEFT_OUT = {"checkpoint": {"exclude_frozen_parameters": True}, "communication": {"transport": "sockets"}}
WRITTEN = {"communication": {"transport": "sockets"}}


def save(folder: str, stage: int, config: dict[str, Any]) -> list[float]:
    with engine_of(ByHand, stage, **config) as engine:
        run(engine, 0, 2)
        engine.save_checkpoint(folder)
        return run(engine, 2, 2)


def load(folder: str, stage: int, config: dict[str, Any]) -> list[float]:
    with engine_of(ByHand, stage, **config) as engine:
        engine.load_checkpoint(folder)
        return run(engine, 2, 2)


def names_in(folder: Path) -> set[str]:
    return set(CheckpointFolder(folder).open().weights.tensors)


def test_a_resume_takes_the_base_from_the_model(ranks: RankPool, tmp_path: Path) -> None:
    names = {name for name, _ in ByHand().named_parameters()}
    adapters = {name for name in names if "lora_" in name}
    losses = ranks(2, save, str(tmp_path / "part"), 3, LEFT_OUT)[0]
    assert names_in(tmp_path / "part") == adapters  # of the base: 0 bytes
    assert set(CheckpointFolder(tmp_path / "part").open().manifest.left_out) == names - adapters
    assert ranks(2, load, str(tmp_path / "part"), 3, LEFT_OUT)[0] == losses
    assert load(str(tmp_path / "part"), 0, WRITTEN) == pytest.approx(losses, rel=1e-6)  # one rank, in this process
    ranks(2, save, str(tmp_path / "all"), 3, WRITTEN)
    assert names_in(tmp_path / "all") == names


def test_another_base_is_an_error(tmp_path: Path) -> None:
    save(str(tmp_path), 0, LEFT_OUT)
    with engine_of(ByHand, 0, **LEFT_OUT) as engine:
        weight = engine.module.head.weight
        with engine.gathered(weight, modify=True), torch.no_grad():
            weight[0, 0] += 1
        before = engine.state_dict()
        text = refusal(engine.load_checkpoint, tmp_path, kind=CheckpointError)
        assert differences(engine.state_dict(), before) == []
    assert "The checkpoint has no frozen parameters (checkpoint.exclude_frozen_parameters): load the base" in text
    assert "frozen parameter 'head.weight' differs from the checkpoint's base model" in text
    assert "Nothing was changed." in text


def test_a_base_is_compared_in_the_type_that_was_saved(tmp_path: Path) -> None:
    half, single = LEFT_OUT | {"bf16": {"enabled": True}}, LEFT_OUT
    save(str(tmp_path / "half"), 0, half)
    load(str(tmp_path / "half"), 0, single)  # its values round to what was saved
    save(str(tmp_path / "single"), 0, single)
    text = refusal(load, str(tmp_path / "single"), 0, half, kind=CheckpointError)
    assert "base model: torch.bfloat16 here, torch.float32 there. The" in text


@on_ranks(2)
def test_what_was_changed_by_hand_is_written(tmp_path: Path) -> None:
    """What only a checkpoint has is in the next one too."""
    for loads in (False, True):
        with engine_of(ByHand, 3, **LEFT_OUT) as engine:
            if loads:
                engine.load_checkpoint(tmp_path)
            else:
                with engine.gathered(modify=True), torch.no_grad():  # all are shown, one is changed
                    engine.module.head.weight.mul_(1.5)
            run(engine, int(loads), 1)
            engine.save_checkpoint(tmp_path)
            assert sorted(engine._archive.frozen.by_hand) == ["head.weight"]
        assert [name for name in names_in(tmp_path) if "lora_" not in name] == ["head.weight"]


@on_ranks(2)
def test_what_was_changed_on_another_stage_is_written(tmp_path: Path) -> None:
    with engine_of(ByHand, 0, parallel={"pipeline": 2}, **LEFT_OUT) as engine:
        engine.save_checkpoint(tmp_path)  # from here on each rank knows all digests
        with engine.gathered(modify=True), torch.no_grad():
            for param in (param for name, param in engine.named_parameters() if name == "head.weight"):
                param.mul_(1.5)
        engine.save_checkpoint(tmp_path, tag="changed")
    assert [name for name in names_in(tmp_path) if "lora_" not in name] == ["head.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_digest_is_a_sum_of_its_parts(dtype: torch.dtype) -> None:
    values = (torch.randn(300_000, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    whole = digest_of(values, 0, dtype)
    cuts = [0, 3, 4096, 4099, 9000, 290_000, 300_000]
    assert sum(digest_of(values[low:high], low, dtype) for low, high in pairwise(cuts)) % (1 << 64) == whole
    swapped = values.clone()
    swapped[[5000, 5001]] = swapped[[5001, 5000]] + 1
    assert digest_of(swapped, 0, dtype) != whole


transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors_torch = pytest.importorskip("safetensors.torch")


def with_head() -> Any:
    return lora(modules_to_save=["lm_head"], use_rslora=True)


def with_dora() -> Any:
    return lora(use_dora=True, target_modules=["q_proj"])


def with_two() -> Any:
    model = lora()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
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


def tied() -> Any:
    return small("LlamaForCausalLM", tie_word_embeddings=True)


def with_tied_modules() -> Any:
    """Their parameter is in the file under the names of both."""
    options = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    return lora(tied(), target_modules=["q_proj"], **options)


def test_peft_loads_what_is_exported(ranks: RankPool, tmp_path: Path) -> None:
    bases = {lora: base, with_head: base, with_dora: base, with_two: base, with_tied_modules: tied}
    outputs = ranks(2, export_all, list(bases), 3, str(tmp_path), SOCKETS, adapters_only=True)[0]
    for number, ((build, bare), expected) in enumerate(zip(bases.items(), outputs, strict=True)):
        torch.manual_seed(0)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            model = peft.PeftModel.from_pretrained(bare(), tmp_path / str(number)).eval()
            torch.testing.assert_close(model(input_ids=tokens(5)).logits, expected, msg=str(build))
    assert (tmp_path / "3" / "other" / "adapter_model.safetensors").exists()
    assert {path.name for path in (tmp_path / "0").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    total_bytes = sum(file.stat().st_size for file in (tmp_path / "0").iterdir())
    assert total_bytes < 4 * 1.5 * sum(p.numel() for p in lora().parameters() if p.requires_grad)


def with_shared_matrices() -> Any:
    return with_peft(base(), peft.VeraConfig(target_modules=["q_proj"], r=2, init_weights=False))


def with_copied_embeddings() -> Any:
    return lora(tied(), target_modules=["q_proj"], modules_to_save=["embed_tokens"])


def test_a_merged_model_is_an_ordinary_one(ranks: RankPool, tmp_path: Path) -> None:
    config = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    builds = [with_head, with_dora, with_shared_matrices, with_copied_embeddings]
    outputs = ranks(2, export_all, builds, 3, str(tmp_path), config, merged=True)[0]
    for number, expected in enumerate(outputs):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
        assert type(model) is transformers.LlamaForCausalLM
        written = safetensors_torch.load_file(tmp_path / str(number) / "model.safetensors")
        assert written.keys() == model.state_dict().keys()
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=tokens(5)).logits, expected, rtol=1e-4, atol=1e-5)


def test_what_was_trained_of_a_model_by_hand_is_exported_and_a_base_beside_it_stays(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with engine_of(ByHand, 0) as engine:
        engine.train_step(models.token_batch(0, 8))
        engine.export(tmp_path, adapters_only=True)
        trained = {name: value for name, value in engine.state_dict().items() if "lora_" in name}
        text = refusal(engine.export, "", adapters_only=True, kind=CheckpointError)
    assert text.startswith('export to "" failed on rank 0: expected the path of a folder')
    assert differences(safetensors_torch.load_file(tmp_path / "adapter_model.safetensors"), trained) == []
    assert (tmp_path / "model.safetensors").exists()


@on_ranks(2)
def test_a_pipeline_exports_adapters_alone(tmp_path: Path) -> None:
    with engine_of(lora, 1, accumulation=2, parallel={"pipeline": 2}) as engine:
        assert refusal(engine.export, tmp_path, merged=True).startswith(
            "engine.export(merged=True): expected ranks with whole layers, found layers split by parallel.pipeline"
        )
        engine.export(tmp_path, adapters_only=True)
    names = safetensors_torch.load_file(tmp_path / "adapter_model.safetensors").keys()
    assert sum("lora_A" in name for name in names) == 6


def with_tokens() -> Any:
    return lora(target_modules=["q_proj"], trainable_token_indices=[1, 2])


def with_prompt() -> Any:
    return with_peft(base(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def with_tied_head() -> Any:
    return lora(tied(), target_modules=["embed_tokens"])


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
        (
            with_tied_head,
            {"merged": True},
            "found tied weights at 'base_model.model.model.embed_tokens'; a merge would",
        ),
        (with_prompt, {"merged": True}, "found PROMPT_TUNING, which PEFT cannot merge; leave merged out"),
        (with_prompt, {"adapters_only": True}, "found the embeddings of PROMPT_TUNING, which PEFT computes"),
    ],
)
def test_what_cannot_be_exported(build: Any, options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with engine_of(build, 0) as engine:
        assert text in refusal(engine.export, tmp_path, **options)
