"""examples/pipeline_zero3.py on four ranks, and again on two with other places of the states."""

import sys
from pathlib import Path
from unittest import mock

from lowtide.checkpoint.folder import CheckpointFolder
from tests.kit.ranks import RankPool

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZE = ["--layers", "2", "--width", "16", "--context", "16", "--rows", "2"]


def example(folder: str, *options: str) -> None:
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        import pipeline_zero3

        pipeline_zero3.main([*SIZE, "--out", f"{folder}/out", "--data", str(EXAMPLES), *options])


def test_stages_are_divided_and_their_states_offloaded(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4, example, str(tmp_path), "--steps", "2", process_group=False)
    ranks(2, example, str(tmp_path), "--steps", "3", "--nvme", f"{tmp_path}/files", process_group=False)
    found = CheckpointFolder(tmp_path / "out").open().manifest
    assert (found.step, found.topology["world_size"]) == (3, 2)
    assert list((tmp_path / "out" / "weights").glob("*.safetensors"))
