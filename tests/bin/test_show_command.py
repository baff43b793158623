"""`lowtide checkpoint show`: every state in which a folder of checkpoints can be, and what the command says of it."""

import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.bin.checkpoint import find_entries
from lowtide.bin.main import main as lowtide_main
from lowtide.checkpoint.files import MANIFEST
from lowtide.checkpoint.folder import CheckpointFolder
from tests.checkpoint.making import resign
from tests.kit.models import tiny_gpt, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case

TAGS = ["global_step1", "global_step2", "best"]
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "adamw", "params": {"lr": 0.25}},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 0.5,
    "steps_per_print": 0,
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of one rank; `latest` names the last."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    with lowtide.initialize(tiny_gpt(), CONFIG) as engine:
        for step in range(2):
            engine.train_step(token_batch(step, 2))
            engine.save_checkpoint(folder)
        engine.save_checkpoint(folder, tag="best")
    return folder


@pytest.fixture
def folder(healthy: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(healthy, tmp_path / "run"))


def show(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """The status and what was printed."""
    capsys.readouterr()
    status = lowtide_main(["checkpoint", "show", *map(str, arguments)])
    return status, capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The text of a usage error."""
    with pytest.raises(SystemExit) as error:
        lowtide_main(["checkpoint", "show", *map(str, arguments)])
    assert error.value.code == 2
    return capsys.readouterr().err


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each row of the list by its first cell."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    return {first: rest for first, *rest in cells}


def health(text: str) -> dict[str, str]:
    return {tag: cells[-1] for tag, cells in rows(text).items()}


# -- all is well ----------------------------------------------------------------------------------------------------


def test_a_healthy_folder_is_listed_oldest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = show(capsys, folder)
    assert status == 0
    assert list(rows(out)) == ["global_step1", "global_step2", "best (latest)"]
    manifest = CheckpointFolder(folder).open("best").manifest
    size = f"{sum(file.stat().st_size for file in (folder / 'best').iterdir() if file.name != MANIFEST) / 1e3:.3g} KB"
    step, saved, topology, parameters, found_size, state = rows(out)["best (latest)"]
    assert (step, topology, found_size, state) == ("2", "1 x stage 2", size, "complete")
    assert parameters == f"{sum(p.numel() for p in tiny_gpt().parameters()) / 1e3:.3g}K"
    assert saved[:2] == "20" and len(saved) == len("2026-01-31 23:59:59") and manifest.step == 2


def test_verify_reads_every_byte_of_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = show(capsys, folder, "--verify")
    assert status == 0 and set(health(out).values()) == {"verified"}


def test_verify_shows_a_bar_on_a_terminal_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowtide_main(["checkpoint", "show", str(folder), "--verify"])
    assert capsys.readouterr().err == ""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert lowtide_main(["checkpoint", "show", str(folder), "--verify"]) == 0
    assert "verifying" in terminal.getvalue()


def test_progress_counts_the_bytes_of_all_values(folder: Path) -> None:
    checkpoint = CheckpointFolder(folder).open("best")
    counted: list[int] = []
    checkpoint.verify(counted.append)
    tensors = sum(info.nbytes for info in checkpoint.manifest.tensors.values())
    assert tensors <= sum(counted) < checkpoint.manifest.nbytes


def test_one_checkpoint_in_detail(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = show(capsys, folder, "--tag", "global_step2")
    assert status == 0
    facts = rows(out)
    count = sum(p.numel() for p in tiny_gpt().parameters())
    assert facts["step"] == ["2 (2 updates of the optimizer)"]
    assert f"{count:,} in " in facts["parameters"][0] and "computed in float32; 0 buffers" in facts["parameters"][0]
    assert f"torch {torch.__version__}" in facts["written by"][0]
    assert facts["optimizer"] == ["adamw"] and "lr 0.25, betas (0.9, 0.999)" in out
    assert "gradient_clipping: 0.5" in out and "zero_optimization.stage: 2" in out
    assert "steps_per_print: 0" in out and "bf16" not in out  # what is not the default, and no more
    assert facts["health"] == ["complete"]
    nbytes = 301 * 22 * 4
    assert facts["optim.state.embedding.weight.exp_avg"] == ["301 x 22", "float32", f"{nbytes / 1e3:.3g} KB"]
    files = {path.name for path in (folder / "global_step2").iterdir()} - {MANIFEST}
    assert files == {"__0_0.distcp", "rank0.json", ".metadata"} <= set(facts)


def test_the_detail_can_be_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = show(capsys, folder, "--tag", "best", "--verify")
    assert status == 0 and "checkpoint best (latest)" in out and rows(out)["health"] == ["verified"]


def test_the_path_of_a_checkpoint_shows_that_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = show(capsys, folder / "global_step1")
    assert status == 0 and "checkpoint global_step1" in out and "global_step2" not in out


def test_a_renamed_checkpoint_goes_by_its_new_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "global_step1").rename(folder / "kept [1]")
    status, out = show(capsys, folder, "--verify")
    assert status == 0 and health(out)["kept [1]"] == "verified" and "global_step1" not in out


def test_a_checkpoint_that_was_being_replaced_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "best").rename(folder / ".replaced-best")
    status, out = show(capsys, folder)
    assert status == 0 and health(out)["best (latest)"] == "complete"


def test_ranks_that_hold_copies_are_told(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(2, save_one, Case(tiny_gpt, token_batch, stage=3), tmp_path / "sharded")
    hybrid = Case(tiny_gpt, token_batch, stage=3, config={"zero_optimization": {"shard_size": 1}})
    ranks(2, save_one, hybrid, tmp_path / "hybrid")
    assert rows(show(capsys, tmp_path / "sharded", "--verify")[1])["global_step0 (latest)"][2] == "2 x stage 3"
    copies = rows(show(capsys, tmp_path / "hybrid", "--verify")[1])["global_step0 (latest)"]
    assert copies[2] == "2 x stage 3 (shard size 1, 2 replicas)" and copies[-1] == "verified"


def save_one(case: Case, folder: Path) -> None:
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        engine.save_checkpoint(folder)


# -- what is damaged ------------------------------------------------------------------------------------------------


def _flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def _append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


DAMAGES: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "data truncated": (
        lambda at: (at / "__0_0.distcp").write_bytes(b"x" * 100),
        "found 100: the file is truncated",
        False,
    ),
    "data longer": (lambda at: _append(at / "__0_0.distcp"), "the file is altered", False),
    "data missing": (lambda at: (at / "__0_0.distcp").unlink(), "bytes, found: No such file or directory", False),
    "index missing": (lambda at: (at / "rank0.json").unlink(), "bytes, found: No such file or directory", False),
    "metadata missing": (lambda at: (at / ".metadata").unlink(), "bytes, found: No such file or directory", False),
    "description missing": (
        lambda at: (at / MANIFEST).unlink(),
        "lowtide.json: expected the description of a checkpoint, found no such file",
        False,
    ),
    "description altered": (
        lambda at: _flip(at / MANIFEST, 200),
        "lowtide.json: expected the file as written, found it truncated or altered",
        False,
    ),
    "value altered": (lambda at: _flip(at / "__0_0.distcp", 2000), "(the checksum differs): the file is altered", True),
    "index altered": (lambda at: _flip(at / "rank0.json", 50), "found it altered (the CRC-32 differs)", True),
    "metadata altered": (lambda at: _flip(at / ".metadata", 50), "found it altered (the CRC-32 differs)", True),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_names_the_file_and_the_reason(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, reason, needs_verify = DAMAGES[name]
    damage(folder / "global_step2")
    if needs_verify:
        assert show(capsys, folder)[0] == 0, "the checksum of a whole file would have to be read"
    status, out = show(capsys, folder, *["--verify"] * needs_verify)
    intact = "verified" if needs_verify else "complete"
    assert status == 1
    assert health(out) == {"global_step1": intact, "best (latest)": intact, "global_step2": "damaged"}
    line = next(line for line in out.splitlines() if line.startswith("global_step2 is damaged: "))
    assert line.startswith(f"global_step2 is damaged: {folder / 'global_step2'}/") and reason in line


@pytest.mark.parametrize("name", DAMAGES)
def test_the_detail_of_a_damaged_checkpoint(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, reason, _ = DAMAGES[name]
    damage(folder / "best")
    status, out = show(capsys, folder, "--tag", "best", "--verify")
    assert status == 1 and f"best is damaged: {folder / 'best'}/" in out and reason in out
    if "description" not in name:
        assert rows(out)["health"] == ["damaged"]


def test_a_file_that_cannot_be_read_is_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "best" / MANIFEST).unlink()
    (folder / "best" / MANIFEST).mkdir()
    status, out = show(capsys, folder)
    text = "expected the description of a checkpoint: expected a regular file, found a folder"
    assert status == 1 and f"best is damaged: {folder / 'best' / MANIFEST}: {text}" in out


def test_latest_that_names_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder / "best")
    status, out = show(capsys, folder)
    assert status == 1
    assert f"{folder}: `latest` names 'best', which is missing; pass another tag to load it" in out
    assert list(rows(out)) == ["global_step1", "global_step2"]


def test_latest_that_points_elsewhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "latest").write_text("../run/best")
    status, out = show(capsys, folder)
    assert status == 1 and list(rows(out)) == TAGS
    assert f"{folder / 'latest'}: tag: expected a folder name of at most 200 bytes, without slashes" in out


def test_odd_training_and_texts_for_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resign(folder / "global_step1", lambda content: content.update(training={"global_step": "many"}))
    resign(folder / "global_step2", lambda content: content["versions"].update(torch="\x1b[31mred", red="\x07"))
    status, out = show(capsys, folder, "--verify")
    assert status == 1 and health(out)["global_step1"] == "damaged" and health(out)["global_step2"] == "verified"
    assert "global_step1 is damaged: global_step: Input should be a valid integer, found 'many'" in out
    assert show(capsys, folder, "--tag", "global_step1")[0] == 1
    status, out = show(capsys, folder, "--tag", "global_step2")
    assert status == 0 and r"torch \x1b[31mred" in out and "\x1b" not in out and "\x07" not in out


def test_a_pipe_among_the_files_is_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tag, name in (("global_step1", "__0_0.distcp"), ("global_step2", MANIFEST)):
        (folder / tag / name).unlink()
        os.mkfifo(folder / tag / name)
    status, out = show(capsys, folder, "--verify")
    assert status == 1 and health(out) == {
        "best (latest)": "verified",
        "global_step1": "damaged",
        "global_step2": "damaged",
    }
    assert out.count("expected a regular file, found a pipe") == 2


def test_a_folder_without_latest_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "latest").unlink()
    status, out = show(capsys, folder)
    assert status == 0 and f"{folder} has no file `latest`; pass a tag to load a checkpoint" in out


def test_an_unfinished_checkpoint_is_no_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "best", folder / ".saving-global_step3")
    shutil.copytree(folder / "best", folder / ".deleted-global_step0")
    status, out = show(capsys, folder, "--verify")
    assert status == 0 and health(out)["global_step3"] == "unfinished" and "global_step0" not in out


def test_other_folders_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "rank0.log").write_text("")
    assert [entry.tag for entry in find_entries(CheckpointFolder(folder), verifies=False)] == TAGS


# -- the command line -----------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"expected a folder of checkpoints, found no folder {tmp_path / 'none'}"
    assert text in refusal(capsys, tmp_path / "none")


def test_a_folder_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{tmp_path}: expected a folder of checkpoints, found no checkpoint in it"
    assert text in refusal(capsys, tmp_path)


def test_no_path_and_no_tag(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected the path of a folder (\".\" for the working directory), found ''" in refusal(capsys, "")
    assert "tag: expected a folder name" in refusal(capsys, folder, "--tag", "../run")


def test_a_tag_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{folder}: expected a checkpoint with the tag 'better', found {', '.join(TAGS)}"
    assert text in refusal(capsys, folder, "--tag", "better")


def test_without_a_subcommand_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert lowtide_main(["checkpoint"]) == 2
    out = capsys.readouterr().out
    assert "usage: lowtide checkpoint" in out and "lowtide checkpoint show runs/gpt --verify" in out


@pytest.mark.parametrize("arguments", [["checkpoint", "--help"], ["checkpoint", "show", "--help"]])
def test_help_has_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        lowtide_main(arguments)
    assert ended.value.code == 0
    assert "lowtide checkpoint show runs/gpt --tag global_step100" in capsys.readouterr().out
