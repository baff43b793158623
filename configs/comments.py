"""Comments in JSON: a config may have them, and JSON itself knows none."""

import re

_TEXT = r'"(?:[^"\\\n]|\\.)*"'
# The first alternative takes a whole string, so `//` in a URL or a path begins no comment.
_COMMENTS = re.compile(rf"{_TEXT}|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_LAST_COMMAS = re.compile(rf"{_TEXT}|,(?=\s*[}}\]])")


def without_comments(text: str) -> str:
    """Return JSON text with its comments and last commas blanked out."""
    return _LAST_COMMAS.sub(_blank, _COMMENTS.sub(_blank, text))


def _blank(match: re.Match[str]) -> str:
    piece = match[0]
    # An unclosed comment is kept, so that the parser reports its place.
    is_kept = piece.startswith('"') or (piece.startswith("/*") and not piece.endswith("*/"))
    # Blanks instead of nothing: line and column of a later fault are those of the file.
    return piece if is_kept else re.sub(r"[^\n]", " ", piece)
