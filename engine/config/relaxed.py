"""JSON as people write it: what Hjson lets pass, and DeepSpeed with it, taken out of a text before it is read.

Comments (`// ...`, `# ...`, `/* ... */`), and commas before a closing bracket. Each becomes blanks, so that lines and
columns stay what they were. Text within quotes is left alone.
"""

import base64
import binascii
import re

_TEXT = r'"(?:[^"\\\n]|\\.)*"'
_COMMENTS = re.compile(rf"{_TEXT}|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_LAST_COMMAS = re.compile(rf"{_TEXT}|,(?=\s*[}}\]])")


def without_comments(text: str) -> str:
    """The same text as plain JSON, if it was that but for comments and commas."""
    return _LAST_COMMAS.sub(_blank, _COMMENTS.sub(_blank, text))


def _blank(match: re.Match[str]) -> str:
    piece = match[0]
    is_kept = piece.startswith('"') or (piece.startswith("/*") and not piece.endswith("*/"))
    return piece if is_kept else re.sub(r"[^\n]", " ", piece)


def decoded(text: str) -> str | None:
    """The text of a JSON object that was passed in (URL-safe) base64, as a command line takes it; None: it is none."""
    if len(text) < 4 or len(text) % 4 or not re.fullmatch(r"[A-Za-z0-9+/_-]+={0,2}", text):
        return None
    try:
        found = base64.b64decode(text.replace("-", "+").replace("_", "/")).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return found if found.lstrip().startswith(("{", "/", "#")) else None
