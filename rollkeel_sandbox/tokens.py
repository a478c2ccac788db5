"""The token of a service, and the form of its refusals: what needs no package beyond Python's own."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from rollkeel_sandbox.errors import BadInput

TOKEN_VARIABLE = "ROLLKEEL_SANDBOX_TOKEN"
SHORTEST_TOKEN = 16


def load_token(file: Path | None, folder: Path | None) -> tuple[str, str]:
    """The token, and where it is in words: of `file`, of the environment, or of `folder`, where it is made once.

    Raises `BadInput` for a file that is missing, open to others or too short.
    """
    if file is None and (given := os.environ.get(TOKEN_VARIABLE)):
        return _checked(given.strip(), f"the environment ({TOKEN_VARIABLE})"), f"in the environment ({TOKEN_VARIABLE})"
    made = (folder / "token") if folder else None
    path = file or made
    if path and path.exists():
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise BadInput(f"{path}: it holds a token and others may read it; chmod 600 it")
        return _checked(path.read_text(encoding="utf-8").strip(), str(path)), f"in {path}"
    if file:
        raise BadInput(f"{file}: no such file; write a token of at least {SHORTEST_TOKEN} characters into it")
    token = secrets.token_urlsafe(32)
    if made is None:
        return token, f"{token} (made for this run, shown once)"
    try:
        made.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
            out.write(token + "\n")
    except OSError as error:
        raise BadInput(f"sandbox: state folder {folder}: {error.strerror}; name another with --state") from None
    return token, f"{token} (shown once; kept in {made})"


def _checked(token: str, where: str) -> str:
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInput(
            f"{where}: expected a token of at least {SHORTEST_TOKEN} printable ASCII characters without spaces"
        )
    return token


def error_body(message: str, code: str, **more: Any) -> bytes:
    """One line of JSON."""
    return json.dumps({"error": " ".join(message.split()), "code": code, **more}).encode()
