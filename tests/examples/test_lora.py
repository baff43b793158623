"""examples/lora.py, as a user runs it: it trains, goes on, and what it writes is read by PEFT and transformers."""

import runpy
import string
import sys
from pathlib import Path

import pytest
import torch

from lowtide.checkpoint.folder import CheckpointFolder
from tests.kit.hugging_face import HIDDEN

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")
SCRIPT = Path(__file__).parents[2] / "examples" / "lora.py"


def make_model(folder: Path) -> None:
    """A small model, and a tokenizer of single characters."""
    torch.manual_seed(0)
    vocabulary = {letter: number for number, letter in enumerate(["?", *string.printable])}
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="?").save_pretrained(folder)
    config = transformers.LlamaConfig(vocab_size=len(vocabulary), num_key_value_heads=2, **HIDDEN)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def run(folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = f"--steps {steps} --batch 4 --length 16 --save-every 2 --lr 0.02".split()
    folders = ["--model", str(folder / "model"), "--text", str(folder / "text"), "--out", str(folder / "out")]
    monkeypatch.setattr(sys, "argv", ["lora.py", *options, *folders])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_a_folder_without_a_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lora.py", "--model", str(tmp_path), "--text", "text", "--out", "out"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT))["arguments"]()
    assert f"--model: expected a folder with a tokenizer, found none in {tmp_path}" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_it_trains_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "text").write_text("the cat sat on the mat. " * 50)
    caplog.set_level("INFO", "lowtide")
    run(tmp_path, 4, monkeypatch)
    assert "loaded from" not in caplog.text
    run(tmp_path, 6, monkeypatch)
    assert "(step 4) loaded from" in caplog.text
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "merged")
    ids = torch.tensor([tokenizer("the cat sat on the mat")["input_ids"]])
    with torch.no_grad():
        before = base(input_ids=ids, labels=ids).loss.item()
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
        first, other = (model(input_ids=ids, labels=ids).loss.item() for model in (adapted, merged))
    assert first < before - 0.1 and other == pytest.approx(first, abs=0.02)  # both are of bfloat16 weights
    written = CheckpointFolder(tmp_path / "out" / "checkpoints").open().weights.tensors
    assert written and all("lora_" in name for name in written)
