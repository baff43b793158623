"""`lowtide checkpoint show`: every state in which a folder of checkpoints can be, and what the command says of it."""

import io
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
from tests.kit.training import settings

TAGS = ["global_step1", "global_step2", "best"]
Show = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of one rank; `latest` names the last."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    config = settings(2, optimizer={"type": "adamw", "params": {"lr": 0.25}}, gradient_clipping=0.5)
    with lowtide.initialize(tiny_gpt(), config) as engine:
        for step in range(2):
            engine.train_step(token_batch(step, 2))
            engine.save_checkpoint(folder)
        engine.save_checkpoint(folder, tag="best")
    return folder


@pytest.fixture
def folder(healthy: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(healthy, tmp_path / "run"))


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """The status and what was printed; where it is a usage error, the error."""

    def show(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        try:
            status = lowtide_main(["checkpoint", "show", *map(str, arguments)])
        except SystemExit as left:
            assert isinstance(left.code, int)
            status = left.code
        out, error = capsys.readouterr()
        return status, error if status == 2 else out

    return show


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each row of the list by its first cell."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    return {first: rest for first, *rest in cells}


def health(text: str) -> dict[str, str]:
    return {tag: cells[-1] for tag, cells in rows(text).items()}


# -- all is well ----------------------------------------------------------------------------------------------------


def test_a_healthy_folder_is_listed_oldest_first(healthy: Path, show: Show) -> None:
    status, out = show(healthy)
    assert status == 0 and list(rows(out)) == ["global_step1", "global_step2", "best (latest)"]
    nbytes = sum(file.stat().st_size for file in (healthy / "best").iterdir() if file.name != MANIFEST)
    step, saved, topology, parameters, size, state = rows(out)["best (latest)"]
    assert (step, topology, size, state) == ("2", "1 x stage 2", f"{nbytes / 1e3:.3g} KB", "complete")
    assert parameters == f"{sum(p.numel() for p in tiny_gpt().parameters()) / 1e3:.3g}K"
    assert saved[:2] == "20" and len(saved) == len("2026-01-31 23:59:59")


def test_verify_reads_every_byte_and_shows_a_bar_on_a_terminal_alone(
    healthy: Path, show: Show, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = CheckpointFolder(healthy).open("best")
    counted: list[int] = []
    checkpoint.verify(counted.append)
    tensors = sum(info.nbytes for info in checkpoint.manifest.tensors.values())
    assert tensors <= sum(counted) < checkpoint.manifest.nbytes
    arguments = ["checkpoint", "show", str(healthy), "--verify"]
    assert lowtide_main(arguments) == 0
    out, error = capsys.readouterr()
    assert set(health(out).values()) == {"verified"} and error == ""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert lowtide_main(arguments) == 0 and "verifying" in terminal.getvalue()


def test_one_checkpoint_in_detail(healthy: Path, show: Show) -> None:
    status, out = show(healthy, "--tag", "global_step2")
    facts = rows(out)
    count = sum(p.numel() for p in tiny_gpt().parameters())
    assert status == 0 and facts["step"] == ["2 (2 updates of the optimizer)"]
    assert f"{count:,} in " in facts["parameters"][0] and "computed in float32; 0 buffers" in facts["parameters"][0]
    assert f"torch {torch.__version__}" in facts["written by"][0]
    assert facts["optimizer"] == ["adamw"] and "lr 0.25, betas (0.9, 0.999)" in out
    assert "gradient_clipping: 0.5" in out and "zero_optimization.stage: 2" in out
    assert "steps_per_print: 0" in out and "bf16" not in out  # what is not the default, and no more
    assert facts["health"] == ["complete"]
    assert facts["optim.state.embedding.weight.exp_avg"] == ["301 x 22", "float32", f"{301 * 22 * 4 / 1e3:.3g} KB"]
    files = {path.name for path in (healthy / "global_step2").iterdir()} - {MANIFEST}
    assert files == {"__0_0.distcp", "rank0.json", ".metadata"} <= set(facts)
    status, out = show(healthy, "--tag", "best", "--verify")
    assert status == 0 and "checkpoint best (latest)" in out and rows(out)["health"] == ["verified"]
    status, out = show(healthy / "global_step1")  # its path shows that one
    assert status == 0 and "checkpoint global_step1" in out and "global_step2" not in out


def test_ranks_that_hold_copies_are_told(ranks: RankPool, tmp_path: Path, show: Show) -> None:
    ranks(2, save_two, tmp_path)
    tag = "global_step0 (latest)"
    assert rows(show(tmp_path / "sharded", "--verify")[1])[tag][2] == "2 x stage 3"
    copies = rows(show(tmp_path / "hybrid", "--verify")[1])[tag]
    assert copies[2] == "2 x stage 3 (shard size 1, 2 replicas)" and copies[-1] == "verified"


def save_two(folder: Path) -> None:
    for name, section in (("sharded", {}), ("hybrid", {"shard_size": 1})):
        with lowtide.initialize(tiny_gpt(), settings(3, zero_optimization=section)) as engine:
            engine.save_checkpoint(folder / name)


# -- what is damaged ------------------------------------------------------------------------------------------------


def _flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


DATA = "__0_0.distcp"
# Of each way to find one: tests/checkpoint/test_reader.py damages every file in every way.
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str, bool]] = {
    "data truncated": (DATA, lambda at: at.write_bytes(b"x" * 100), "found 100: the file is truncated", False),
    "description missing": (
        MANIFEST,
        Path.unlink,
        "lowtide.json: expected the description of a checkpoint, found no such file",
        False,
    ),
    "value altered": (DATA, lambda at: _flip(at, 2000), "(the checksum differs): the file is altered", True),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_names_the_file_and_the_reason(name: str, folder: Path, show: Show) -> None:
    file, damage, reason, needs_verify = DAMAGES[name]
    at = folder / "global_step2"
    damage(at / file)
    if needs_verify:
        assert show(folder)[0] == 0, "the checksum of a whole file would have to be read"
    status, out = show(folder, *["--verify"] * needs_verify)
    intact = "verified" if needs_verify else "complete"
    assert status == 1
    assert health(out) == {"global_step1": intact, "best (latest)": intact, "global_step2": "damaged"}
    line = next(line for line in out.splitlines() if line.startswith("global_step2 is damaged: "))
    assert line.startswith(f"global_step2 is damaged: {at}/") and reason in line
    status, out = show(folder, "--tag", "global_step2", "--verify")
    assert status == 1 and f"global_step2 is damaged: {at}/" in out and reason in out
    if "description" not in name:
        assert rows(out)["health"] == ["damaged"]


def test_odd_training_and_texts_for_the_terminal(folder: Path, show: Show) -> None:
    resign(folder / "global_step1", lambda content: content.update(training={"global_step": "many"}))
    resign(folder / "global_step2", lambda content: content["versions"].update(torch="\x1b[31mred", red="\x07"))
    status, out = show(folder, "--verify")
    assert status == 1 and health(out)["global_step1"] == "damaged" and health(out)["global_step2"] == "verified"
    assert "global_step1 is damaged: global_step: Input should be a valid integer, found 'many'" in out
    assert show(folder, "--tag", "global_step1")[0] == 1
    status, out = show(folder, "--tag", "global_step2")
    assert status == 0 and r"torch \x1b[31mred" in out and "\x1b" not in out and "\x07" not in out


# -- other states of a folder ---------------------------------------------------------------------------------------


def test_names_count_and_not_what_is_unfinished_or_else_in_the_folder(folder: Path, show: Show) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "rank0.log").write_text("")
    assert [entry.tag for entry in find_entries(CheckpointFolder(folder), verifies=False)] == TAGS
    shutil.copytree(folder / "best", folder / ".saving-global_step3")
    shutil.copytree(folder / "best", folder / ".deleted-global_step0")
    (folder / "best").rename(folder / ".replaced-best")  # it was being replaced
    (folder / "global_step1").rename(folder / "kept [1]")
    status, out = show(folder, "--verify")
    found = {"kept [1]": "verified", "global_step2": "verified", "best (latest)": "verified"}
    assert status == 0 and health(out) == found | {"global_step3": "unfinished"}


def test_latest_that_names_nothing_or_points_elsewhere(folder: Path, show: Show) -> None:
    (folder / "latest").write_text("../run/best")
    status, out = show(folder)
    assert status == 1 and list(rows(out)) == TAGS
    assert f"{folder / 'latest'}: tag: expected a folder name of at most 200 bytes, without slashes" in out
    (folder / "latest").write_text("gone")
    status, out = show(folder)
    assert status == 1 and list(rows(out)) == TAGS
    assert f"{folder}: `latest` names 'gone', which is missing; pass another tag to load it" in out
    (folder / "latest").unlink()
    status, out = show(folder)
    assert status == 0 and f"{folder} has no file `latest`; pass a tag to load a checkpoint" in out


# -- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{empty}/none"], "expected a folder of checkpoints, found no folder {empty}/none"),
        (["{empty}"], "{empty}: expected a folder of checkpoints, found no checkpoint in it"),
        ([""], "expected the path of a folder (\".\" for the working directory), found ''"),
        (["{folder}", "--tag", "../run"], "tag: expected a folder name"),
        (
            ["{folder}", "--tag", "better"],
            "{folder}: expected a checkpoint with the tag 'better', found " + ", ".join(TAGS),
        ),
    ],
)
def test_what_is_not_there_is_a_usage_error(
    healthy: Path, tmp_path: Path, show: Show, arguments: list[str], text: str
) -> None:
    places = {"empty": tmp_path, "folder": healthy}
    status, error = show(*(argument.format(**places) for argument in arguments))
    assert status == 2 and text.format(**places) in error
