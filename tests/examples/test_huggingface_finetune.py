"""The fine-tuning script as a user runs it, at a size that takes a second."""

from pathlib import Path

import pytest
import transformers

pytest.importorskip("accelerate")
import huggingface_finetune

SIZE = ["--context", "16", "--pieces", "24", "--use_cpu", "--report_to", "none", "--disable_tqdm", "True"]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
def test_it_trains_saves_and_tunes_what_it_has_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the tide comes in, the tide goes out. " * 40, encoding="utf-8")
    arguments = [*SIZE, "--data", str(text), "--lowtide", "zero3", "--learning_rate", "0.01", "--max_steps", "6"]
    first = huggingface_finetune.main([*arguments, "--output_dir", str(tmp_path / "one")])
    again = ["--model", str(tmp_path / "one"), "--output_dir", str(tmp_path / "two")]
    fields = transformers.TrainingArguments.__dataclass_fields__
    # Versions of transformers name it differently.
    checkpointing = "activation" if "activation_checkpointing" in fields else "gradient"
    then = huggingface_finetune.main([*arguments, *again, f"--{checkpointing}_checkpointing"])
    assert then["eval_loss"] < first["eval_loss"]
    assert f"the model is in {tmp_path / 'two'}" in capsys.readouterr().out
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two").config.vocab_size == 256
