"""The environment variables that ranks get from the user: passed on automatically, from files, and by --env."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from .host import LaunchError

# Variables that a user sets here for every rank. The rest of this environment (PATH, HOME, SSH_...) belongs to this
# machine. Sources: DeepSpeed's EXPORT_ENVS, Open MPI's OMPI_*.
PASSED_NAMES = (
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "PYTHONWARNINGS",
    "PYTHONHASHSEED",
    "LD_LIBRARY_PATH",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_ORDER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "TOKENIZERS_PARALLELISM",
)
PASSED_PREFIXES = (
    "LOWTIDE_",
    "TORCH_",
    "PYTORCH_",
    "TRITON_",
    "NCCL_",
    "RCCL_",
    "GLOO_",
    "TP_SOCKET_",
    "UCX_",
    "FI_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "HF_",
    "TRANSFORMERS_",
    "WANDB_",
    "MLFLOW_",
)
# Set by lowtide for each rank, job or agent: never passed on, and refused if the user gives them.
OWN_NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOWTIDE_JOB_ID",
    "LOWTIDE_TOKEN",
    "LOWTIDE_PROGRESS_FILE",
    "LOWTIDE_RESTART_COUNT",
    "LOWTIDE_FIRST_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_COMMENT = re.compile(r"\s#.*")
_SECRET_WORDS = {"TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "KEY", "KEYS", "CREDENTIALS", "COOKIE"}
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")


def job_environment(
    given: Sequence[str], files: Sequence[Path], environ: Mapping[str, str], inherited: bool
) -> dict[str, str]:
    """Return the variables of every rank: passed on, then from files, then `given` (`K=V`, or `K` from `environ`).

    inherited: ranks inherit this process's environment (transport "local"), so that nothing needs passing on. Raises
    LaunchError for bad names, unset names and unreadable lines.
    """
    # On the launcher's host the agent is a fork and has all of this environment.
    result = {} if inherited else passed_on(environ)
    for file in files:
        result |= read_env_file(file, environ)
    for text in given:
        name, equals, value = text.partition("=")
        result[name] = _checked(name, value if equals else None, environ, f"--env {name}")
    return result


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that go to all hosts: PASSED_NAMES and PASSED_PREFIXES, without OWN_NAMES."""
    return {
        name: value
        for name, value in environ.items()
        if (name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)) and name not in OWN_NAMES
    }


def read_env_file(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Read the variables of a file for --env-file.

    Lines are `K=V`, `export K=V`, or `K` (from `environ`); `#` starts a comment at the start of a line or after a
    space. A value is stripped, and may have quotes as in a shell. Nothing is expanded. Raises LaunchError with file and
    line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"cannot read the environment file {path}: {reason}. Check --env-file") from None
    result: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where, line = f"{path}, line {number}", line.strip().removeprefix("export ").lstrip()
        if line and not line.startswith("#"):
            # An "=" in a comment does not make a value: `NAME  # a=b` is a name alone.
            bare = _COMMENT.sub("", line)
            name, equals, value = line.partition("=") if "=" in bare else (bare, "", "")
            name = name.rstrip()
            result[name] = _checked(name, _unquoted(name, value, where) if equals else None, environ, where)
    return result


def is_secret(name: str) -> bool:
    """Return whether a variable or option is secret, by its name."""
    # By whole words: MONKEY_PATH has no secret.
    return bool(set(re.split(r"[^A-Z0-9]+", name.upper())) & _SECRET_WORDS) or name.upper().endswith("APIKEY")


def shown_value(name: str, value: str) -> str:
    """Return `value` without secrets and passwords in URLs, for printing."""
    return "(hidden)" if is_secret(name) and value else _URL_PASSWORD.sub(r"\1***@", value)


def _unquoted(name: str, text: str, where: str) -> str:
    """Return a value without its quotes, and without a comment after it."""
    if not text.lstrip().startswith(("'", '"')):
        return _COMMENT.sub("", text).strip()
    try:
        value, *rest = shlex.split(text, comments=True)
    except ValueError:
        raise LaunchError(
            f"{where}: the value of {name} starts with an open {text.lstrip()[0]}: close it in the same line"
        ) from None
    if rest:
        raise LaunchError(
            f'{where}: expected the end of the line after {name}, found "{rest[0]}": put the value in quotes'
        )
    return value


def _checked(name: str, value: str | None, environ: Mapping[str, str], where: str) -> str:
    """Return the checked value of a variable, from `environ` if it is None."""
    if not _NAME.fullmatch(name):
        raise LaunchError(
            f'{where}: expected a variable name, found "{name}". Use letters, digits and "_", and no digit first'
        )
    if name in OWN_NAMES:
        option = {"MASTER_PORT": ": use --master-port", "WORLD_SIZE": ": use --nproc"}.get(name, ": leave it out")
        raise LaunchError(f"{where}: lowtide sets {name} for every rank{option}")
    if value is None:
        if name not in environ:
            raise LaunchError(f"{where}: {name} is not set here, so it cannot be passed on: write {name}=VALUE")
        value = environ[name]
    if "\0" in value:
        raise LaunchError(f"{where}: the value of {name} has a zero byte, illegal in an environment: remove it")
    return value
