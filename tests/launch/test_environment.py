"""What the ranks get of the user's environment: by itself, from files, and given; and what is not shown."""

from pathlib import Path

import pytest

from lowtide.launch.hosts.environment import OWN_NAMES, is_secret, job_environment, read_env_file, shown_value
from lowtide.launch.hosts.host import LaunchError
from tests.kit.training import refusal

HARD = "  two  words\n'single' \"double\" $HOME `id` \\n a=b # no comment\ttab é "


def test_what_is_given_goes_over_files_and_files_over_what_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A=file a\nB=file a\nNCCL_DEBUG=WARN\n")
    (tmp_path / "b").write_text("B=file b\nC=file b\n")
    environ = {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring", "D": HARD, "OMP_X": HARD}
    files = [tmp_path / "a", tmp_path / "b"]
    found = job_environment(["C=given", "D", f"GIVEN={HARD}"], files, environ, inherited=False)
    of_files = {"NCCL_DEBUG": "WARN", "A": "file a", "B": "file b"}
    assert found == {**of_files, "NCCL_ALGO": "Ring", "C": "given"} | dict.fromkeys(("D", "OMP_X", "GIVEN"), HARD)


PASSED = ["PYTHONPATH", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_LOGS", "OMP_NUM_THREADS", "HF_HOME", "HF_TOKEN"]
PASSED += ["LOWTIDE_X", "WANDB_PROJECT", "PYTORCH_CUDA_ALLOC_CONF"]
KEPT = ["PATH", "HOME", "SSH_AUTH_SOCK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID"]
KEPT += ["SLURM_JOB_ID", "BASH_FUNC_x%%", *OWN_NAMES]


def test_what_is_meant_for_every_host_is_passed_on_by_itself() -> None:
    environ = dict.fromkeys([*PASSED, *KEPT], "x")
    assert job_environment([], [], environ, inherited=False) == dict.fromkeys(PASSED, "x")
    assert job_environment([], [], environ, inherited=True) == {}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("A=1\n# c\n\nexport B=2\n", {"A": "1", "B": "2"}),
        ("A = two words  # c\n", {"A": "two words"}),
        ("A=http://x/#top\n", {"A": "http://x/#top"}),
        ("A=#no\nB= # c\n", {"A": "#no", "B": ""}),
        ("A=\nB", {"A": "", "B": "from here"}),
        ("A=a=b=c\r\nB='x'\r\n", {"A": "a=b=c", "B": "x"}),
        ("A='it # $HOME \\n \"x\"' # c\n", {"A": 'it # $HOME \\n "x"'}),
        ('A="a \\"q\\" \\\\ $X # b" # c\nB # c=d', {"A": 'a "q" \\ $X # b', "B": "from here"}),
        ("A=1\nA=2", {"A": "2"}),
        ("", {}),
    ],
)
def test_a_file_is_read_as_it_is_meant(tmp_path: Path, text: str, values: dict[str, str]) -> None:
    (tmp_path / "env").write_bytes(text.encode())
    assert read_env_file(tmp_path / "env", {"B": "from here"}) == values


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("A=1\n2B=x", 'line 2: expected a variable name, found "2B". Use letters, digits and "_"'),
        ("A-B=x", 'line 1: expected a variable name, found "A-B"'),
        ("=x", 'line 1: expected a variable name, found ""'),
        ("A=1\n\nB='x\nC=2", "line 3: the value of B starts with an open ': close it in the same line"),
        ('B="x\\"', 'the value of B starts with an open "'),
        ("A='x' y", 'expected the end of the line after A, found "y": put the value in quotes'),
        ("A B C", 'line 1: expected a variable name, found "A B C"'),
        ("NOT_HERE", "line 1: NOT_HERE is not set here, so it cannot be passed on: write NOT_HERE=VALUE"),
        ("RANK=3", "line 1: lowtide sets RANK for every rank: leave it out"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "env"
    absent = refusal(read_env_file, path, {}, kind=LaunchError)
    assert absent == f"cannot read the environment file {path}: No such file or directory. Check --env-file"
    path.write_text(text)
    found = refusal(read_env_file, path, {}, kind=LaunchError)
    assert found.startswith(f"{path}, line ") and error in found


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("A B=1", '--env A B: expected a variable name, found "A B"'),
        ("=1", '--env : expected a variable name, found ""'),
        ("UNSET", "--env UNSET: UNSET is not set here, so it cannot be passed on: write UNSET=VALUE"),
        ("WORLD_SIZE=8", "--env WORLD_SIZE: lowtide sets WORLD_SIZE for every rank: use --nproc"),
        ("MASTER_PORT=1", "lowtide sets MASTER_PORT for every rank: use --master-port"),
        ("A=x\0y", "--env A: the value of A has a zero byte, illegal in an environment: remove it"),
    ],
)
def test_a_mistake_on_the_command_line_is_explained(given: str, error: str) -> None:
    assert error in refusal(job_environment, [given], [], {}, inherited=False, kind=LaunchError)


def test_secrets_are_not_shown() -> None:
    secrets = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password", "--api-key", "X_APIKEY"]
    others = ["TOKENIZERS_PARALLELISM", "KEYBOARD", "NCCL_DEBUG", "--max-length"]
    assert [name for name in (*secrets, *others) if is_secret(name)] == secrets
    assert {shown_value(name, "abc") for name in secrets} == {"(hidden)"}
    assert {shown_value(name, "abc") for name in others} == {"abc"}
    assert shown_value("https_proxy", "http://me:pw@proxy:3128/x") == "http://me:***@proxy:3128/x"
