"""The environment variables that a job's ranks get from the user: passed on by themselves, from files, and given."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .host import LaunchError

# What a user sets here and means for every rank. The rest of this environment (PATH, HOME, SSH_...) belongs to this
# machine. Lists of what others pass on: DeepSpeed's EXPORT_ENVS, Open MPI's OMPI_*.
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
# What lowtide sets for each rank, job or agent: never passed on, and refused where a user gives it.
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
_ASSIGNMENT = re.compile(r"[ \t]*(?:export[ \t]+)?([^=\s#]+)[ \t]*(=)?[ \t]*")
_DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_SINGLE_QUOTED = re.compile(r"'([^']*)'")
_UNQUOTED = re.compile(r"(?:(?<![ \t])#|[^\n#])*")
_REST_OF_LINE = re.compile(r"[ \t\r]*(?:#[^\n]*)?(?:\n|\Z)")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "$": "$", "\n": ""}
_SECRET_WORDS = {"TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "KEY", "KEYS", "CREDENTIALS", "COOKIE"}
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")


def job_environment(
    given: Sequence[str], files: Sequence[Path], environ: Mapping[str, str], inherited: bool
) -> dict[str, str]:
    """What every rank gets: passed on by itself, then the files in order, then `given` (`K=V`, or `K`: from `environ`).

    inherited: the ranks are descendants of this process and have its environment anyway (transport "local"), so that
    nothing is passed on by itself. Raises LaunchError for bad names, unset names and lines that cannot be read.
    """
    result = {} if inherited else passed_on(environ)
    for file in files:
        result |= read_env_file(file, environ)
    for text in given:
        name, equals, value = text.partition("=")
        result[name] = _checked(name, value if equals else None, environ, f"--env {name}")
    return result


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """What of `environ` goes to other hosts by itself: PASSED_NAMES and PASSED_PREFIXES, but not OWN_NAMES."""
    return {
        name: value
        for name, value in environ.items()
        if (name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)) and name not in OWN_NAMES
    }


def read_env_file(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a file for --env-file.

    Lines are `K=V`, `export K=V`, or `K` (taken from `environ`); `#` starts a comment at the start of a line or after a
    space. A value is taken as it is, without spaces at its ends; in '...' everything is; in "..." \\n, \\t, \\r, \\",
    \\\\, \\$ and a backslash at the end of a line mean what they mean in a shell's $'...'. Both may go over several
    lines. Nothing is expanded. Raises LaunchError with file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"cannot read the environment file {path}: {reason}; check --env-file") from None
    result: dict[str, str] = {}
    position = 0
    while position < len(text):
        where = f"{path}, line {text.count(chr(10), 0, position) + 1}"
        if blank := _REST_OF_LINE.match(text, position):
            position = blank.end()
            continue
        name, value, position = _assignment(text, position, where)
        result[name] = _checked(name, value, environ, where)
    return result


def is_secret(name: str) -> bool:
    """Whether the name of a variable or an option tells that its value is not to be shown."""
    return bool(set(re.split(r"[^A-Z0-9]+", name.upper())) & _SECRET_WORDS) or name.upper().endswith("APIKEY")


def shown_value(name: str, value: str) -> str:
    """`value` as a plan may print it: no secrets, no passwords in URLs."""
    return "(hidden)" if is_secret(name) and value else _URL_PASSWORD.sub(r"\1***@", value)


def _assignment(text: str, position: int, where: str) -> tuple[str, str | None, int]:
    """Name, value (None: `K` alone) and where the next line starts."""
    start = _ASSIGNMENT.match(text, position)
    if start is None:
        line = text[position:].splitlines()[0]
        raise LaunchError(f'{where}: expected NAME=VALUE, found "{line.strip()}"')
    name, value, end = start[1], None, start.end()
    if start[2]:
        quote = text[end : end + 1]
        if quote in ('"', "'"):
            match = (_DOUBLE_QUOTED if quote == '"' else _SINGLE_QUOTED).match(text, end)
            if match is None:
                raise LaunchError(f"{where}: the value of {name} starts with {quote}, which is not closed; close it")
            value = _ESCAPE.sub(_unescaped, match[1]) if quote == '"' else match[1]
        else:
            match = _UNQUOTED.match(text, end)
            assert match is not None  # it may be empty
            value = match[0].strip()
        end = match.end()
    rest = _REST_OF_LINE.match(text, end)
    if rest is None:
        found = text[end:].splitlines()[0].strip()
        raise LaunchError(
            f'{where}: expected the end of the line after {name}, found "{found}"; put the value in quotes'
        )
    return name, value, rest.end()


def _unescaped(match: re.Match[str]) -> str:
    return _ESCAPED.get(match[1], match[0])


def _checked(name: str, value: str | None, environ: Mapping[str, str], where: str) -> str:
    """The value of a variable, from `environ` where it is None."""
    if not _NAME.fullmatch(name):
        raise LaunchError(
            f'{where}: expected the name of a variable, found "{name}"; letters, digits and "_" make one, the first is '
            "no digit"
        )
    if name in OWN_NAMES:
        option = {"MASTER_PORT": "; use --master-port", "WORLD_SIZE": "; use --nproc"}.get(name, "; leave it out")
        raise LaunchError(f"{where}: {name} is set by lowtide for every rank{option}")
    if value is None:
        if name not in environ:
            raise LaunchError(f"{where}: {name} is not set here, so it cannot be passed on; write {name}=VALUE")
        value = environ[name]
    if "\0" in value:
        raise LaunchError(f"{where}: the value of {name} holds a zero byte, which no environment can; take it out")
    return value
