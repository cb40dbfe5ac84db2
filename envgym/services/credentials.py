"""API keys and tokens: read from a variable or a file, made for a server. None is ever a setting."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envgym.errors import ConfigError


def api_key(variable: str, api: str) -> str:
    """The key that the environment variable holds; empty where none is named. Raises `ConfigError` where it is not
    set or no key; `api` says in the message whose key it is."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise ConfigError(f"{api}: the environment variable {variable}, which should hold its API key, is not set")
    if not _is_token(key):
        raise ConfigError(f"{api}: the environment variable {variable} must hold one API key and nothing else")
    return key


def read_token(file: str) -> str:
    """The token in a file. Raises `ConfigError` where there is none."""
    try:
        token = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"token file {file} cannot be read: {reason}") from None
    if not token or not _is_token(token):
        raise ConfigError(f"token file {file} must hold one token and nothing else")
    return token


@contextmanager
def made_token(name: str) -> Iterator[tuple[str, str]]:
    """A new token, and the file that holds it, which only this user can read; the file goes with the server."""
    folder = Path(os.environ.get("ENVGYM_CACHE", "~/.cache/envgym")).expanduser() / "tokens"
    path = folder / name
    token = secrets.token_urlsafe(32)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)  # what a server that was killed has left; its permissions may be anything
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
    except OSError as error:
        raise ConfigError(
            f"the token cannot be written to {path}: {error.strerror}; give one with --token-file"
        ) from None
    try:
        yield token, str(path)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_token(text: str) -> bool:
    """True for a text that can stand in a header."""
    return text.isascii() and not any(character.isspace() for character in text)
