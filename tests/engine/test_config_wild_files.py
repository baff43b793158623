"""What files of users were found to have, each in a line: they load, and a note says what has no effect."""

from pathlib import Path

import pytest

from lowtide.engine.config.config import Config, ConfigError

LOADS = {  # text of a file: the start of a note of it, or nothing
    '{"zero_optimization": false, "train_batch_size": 4, "fp16": {"enabled": true}}': "",
    '{"bf16": {"enabled": true, "loss_scale": 1.0, "initial_scale_power": 10}}': "bf16.loss_scale: 1.0 has no effect",
    '{"fp16": {"enabled": true, "opt_level": "O2"}}': 'fp16.opt_level: "O2" has no effect here: it is a word of Apex',
    '{"fp16": {"enabled": true, "fp16": true, "type": "fp16"}, "fp32_allreduce": false}': "",
    '{"fp16": {"enabled": true, "min_loss_scale": 0, "loss_scale": 512}}': "",
    '{"activation_checkpointing": {"partition_activations": true, "number_checkpoints": false}}': (
        "activation_checkpointing.partition_activations: true has no effect here: it divides"
    ),
    '{"logging": {"steps_per_print": 50}}': "logging: ",
    '{"monitor": {"enabled": true}}': "monitor: ",
    '{"disable_fused_adam": true}': "disable_fused_adam: true has no effect here: DeepSpeed reads no such key either",
    '{"zero_optimization": {"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": true}}': (
        "zero_optimization.mics_hierarchical_params_gather: true has no effect"
    ),
    '{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 4e-3}}}': "",
    '{"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 5e5, "eta_min": 1e-5}}}': "",
    '{"optimizer": {"type": "RMSprop", "params": {"lr": 1e-3}}}': "",
    '{"optimizer": {"type": "AdamW", "params": {"bias_correction": false, "weight_decay": 0}}}': "",
    '{"train_batch_size": 2, "max_grad_norm": 0.5, "lr_scheduler": {"type": "x"}}': (
        "max_grad_norm: has no effect here, and DeepSpeed never reads it: gradient_clipping is the key"
    ),
    '{"train_batch_size": 2, "optimizer": {"type": "Adam", "eps": 1e-8, "adam_w_mode": true}}': (
        "optimizer.eps: has no effect here, and DeepSpeed never reads it: it belongs into optimizer.params"
    ),
    '{"bf16": {"enabled": true, "loss_scale": "dynamic"}}': 'bf16.loss_scale: "dynamic" has no effect here',
    '{"compile": {"disable": false, "backend": "inductor"}}': "compile.disable: ",
    '{"train_batch_size": 2, // over all\n "zero_optimization": {"stage": 1, "overlap_comm": false,},}': "",
}


@pytest.mark.parametrize("text", LOADS)
def test_it_loads(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    notes = Config.load(path).notes
    assert any(note.startswith(LOADS[text]) for note in notes) or not LOADS[text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"fp16": {"enabled": true, "type": "bfloat16"}}',
            'fp16.type: "bfloat16" is not supported yet; it is',
        ),
        (
            '{"fp32_allreduce": true}',
            "fp32_allreduce: true is not supported yet; set communication_data_type",
        ),
        ('{"amp": {"enabled": true}}', "amp: not supported yet; set bf16.enabled or fp16.enabled"),
        ('{"compile": {"deepcompile": true}}', "compile.deepcompile: true is not supported yet; set compile.blocks"),
        ('{"max_grad_norm": 0.5}', 'max_grad_norm: unknown key "max_grad_norm"'),  # nothing says that it is DeepSpeed's
        ('{"optimizer": {"type": "Adam", "eps": 1e-8}}', 'optimizer.eps: unknown key "eps"'),
        ('{"fp16": {"enabled": True}}', "not valid JSON: Expecting value at line 1"),
    ],
)
def test_it_is_refused_with_words(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(path)
    assert expected in str(caught.value)
