"""What the ranks get of the user's environment: by itself, from files, and given; and what is not shown."""

from pathlib import Path

import pytest

from lowtide.launch.hosts.environment import OWN_NAMES, is_secret, job_environment, read_env_file, shown_value
from lowtide.launch.hosts.host import LaunchError

HARD = "  two  words\n'single' \"double\" $HOME `id` \\n a=b # no comment\ttab é "


def test_what_is_given_goes_over_files_and_files_over_what_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A=file a\nB=file a\nNCCL_DEBUG=WARN\n")
    (tmp_path / "b").write_text("B=file b\nC=file b\n")
    environ = {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring", "D": "here"}
    files = [tmp_path / "a", tmp_path / "b"]
    assert job_environment(["C=given", "D"], files, environ, inherited=False) == {
        "NCCL_DEBUG": "WARN",
        "NCCL_ALGO": "Ring",
        "A": "file a",
        "B": "file b",
        "C": "given",
        "D": "here",
    }


def test_values_arrive_unchanged() -> None:
    environ = {"OMP_X": HARD, "MINE": HARD}
    assert job_environment([f"GIVEN={HARD}", "MINE"], [], environ, inherited=False) == {
        "OMP_X": HARD,
        "GIVEN": HARD,
        "MINE": HARD,
    }


@pytest.mark.parametrize(
    ("name", "passed"),
    [
        *((name, True) for name in ("PYTHONPATH", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_LOGS", "OMP_NUM_THREADS")),
        *((name, True) for name in ("HF_HOME", "HF_TOKEN", "LOWTIDE_X", "WANDB_PROJECT", "PYTORCH_CUDA_ALLOC_CONF")),
        *((name, False) for name in ("PATH", "HOME", "SSH_AUTH_SOCK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")),
        *((name, False) for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "BASH_FUNC_x%%", *OWN_NAMES)),
    ],
)
def test_what_is_meant_for_every_host_is_passed_on_by_itself(name: str, passed: bool) -> None:
    assert job_environment([], [], {name: "x"}, inherited=False) == ({name: "x"} if passed else {})


def test_ranks_that_inherit_the_environment_are_passed_nothing() -> None:
    assert job_environment([], [], {"NCCL_DEBUG": "INFO"}, inherited=True) == {}


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
        ('A="l1\\nl2\\t\\"q\\" \\\\ \\$X \\q"\n', {"A": 'l1\nl2\t"q" \\ $X \\q'}),
        ('A="one \\\ntwo"\n', {"A": "one two"}),
        ("KEY='first\nsecond # no\n'\nB=2", {"KEY": "first\nsecond # no\n", "B": "2"}),
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
        ("=x", 'line 1: expected NAME=VALUE, found "=x"'),
        ("A=1\n\nB='x\nC=2", "line 3: the value of B starts with an open ': close it"),
        ('B="x\\"', 'the value of B starts with an open "'),
        ("A='x' y", 'expected the end of the line after A, found "y": put the value in quotes'),
        ("A B C", 'expected the end of the line after A, found "B C"'),
        ("NOT_HERE", "line 1: NOT_HERE is not set here, so it cannot be passed on: write NOT_HERE=VALUE"),
        ("RANK=3", "line 1: lowtide sets RANK for every rank: leave it out"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "env").write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_env_file(tmp_path / "env", {})
    assert str(caught.value).startswith(f"{tmp_path / 'env'}, line ") and error in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        read_env_file(tmp_path / "no", {})
    expected = f"cannot read the environment file {tmp_path / 'no'}: No such file or directory. Check --env-file"
    assert str(caught.value) == expected


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
    with pytest.raises(LaunchError) as caught:
        job_environment([given], [], {}, inherited=False)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password", "--api-key", "X_APIKEY"]
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name) and shown_value(name, "abc") == "(hidden)"


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "NCCL_DEBUG", "--max-length"])
def test_other_names_are_no_secrets(name: str) -> None:
    assert not is_secret(name) and shown_value(name, "abc") == "abc"


def test_passwords_in_addresses_are_not_shown() -> None:
    assert shown_value("https_proxy", "http://me:pw@proxy:3128/x") == "http://me:***@proxy:3128/x"
