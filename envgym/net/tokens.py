"""Tokens and keys: read from files and variables, never from settings, and in no message; servers store hashes only."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import html
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from envgym.disk import cache_folder
from envgym.errors import ConfigError, reported_as

from .problems import Problem

MIN_LENGTH = 16
"""Minimum length of a token: a shorter one can be guessed."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""The characters that RFC 6750 allows in a bearer token."""
_QUOTA = re.compile(r"max_sessions=([1-9][0-9]{0,8})")
PART = 8
"""Letters and digits of a secret in a row that no message may hold."""
_ESCAPE = re.compile(r"(?<!\\)\\+(?:u00|x)([0-9a-fA-F]{2})")
"""A character that is escaped as in JSON or Python."""


@dataclass(frozen=True, slots=True)
class ServerClient:
    """A client, which sees its own sessions only; `max_sessions` is its maximum of open sessions (None: no limit)."""

    name: str
    max_sessions: int | None = None


ANYONE = ServerClient("anyone")
"""The only client of a server without tokens."""


class Tokens:
    """The clients of a token file."""

    def __init__(self, clients: Sequence[tuple[bytes, ServerClient]]) -> None:
        self._clients = tuple(clients)

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Read the clients of a file: lines `NAME TOKEN [max_sessions=N]`, or a single token; `#` begins a comment.

        Raises `ConfigError` for a file that is missing or malformed, or that other users can open. No message quotes
        the file.
        """
        clients: dict[str, tuple[bytes, ServerClient]] = {}
        for number, words in _lines(path):
            client, token = _client(words, f"token file {path}, line {number}")
            digest = _digest(token)
            if client.name in clients or any(digest == stored for stored, _ in clients.values()):
                raise ConfigError(f"token file {path}, line {number}: a name or a token appears twice")
            clients[client.name] = digest, client
        return cls(list(clients.values()))

    def client(self, authorization: str | None) -> ServerClient:
        """The client of a header `Authorization`. Raises a 401 `Problem` if there is none."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Problem(401, "unauthorized", "this server asks for a token: Authorization: Bearer TOKEN")
        # All hashes are compared, each in constant time, so that the duration reveals nothing about a token.
        digest, sender = _digest(token.strip()), None
        for stored, client in self._clients:
            if hmac.compare_digest(stored, digest):
                sender = client
        if sender is None:
            raise Problem(401, "unauthorized", "the token is not known here")
        return sender


def read_token(path: Path) -> str:
    """Read a client's token from a file with exactly one, alone or in a line of the server's format.

    Raises `ConfigError` as `Tokens.read` does, and for a file with several tokens.
    """
    lines = _lines(path)
    if len(lines) > 1:
        raise ConfigError(f"token file {path} holds {len(lines)} tokens; a client's file holds its own token only")
    [(number, words)] = lines
    return _client(words, f"token file {path}, line {number}")[1]


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """The lines of a token file, numbered and split into words; a token alone gets the name `default`."""
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"token file {path} can be read by others on this machine: chmod 600 {path}")
    split_lines = ((number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), 1))
    lines = [(number, words) for number, words in split_lines if words]
    if not lines:
        raise ConfigError(f"token file {path} holds no token; write one of at least {MIN_LENGTH} characters into it")
    if len(lines) == 1 and len(lines[0][1]) == 1:
        lines = [(lines[0][0], ["default", *lines[0][1]])]
    return lines


def _client(words: list[str], context: str) -> tuple[ServerClient, str]:
    quota = _QUOTA.fullmatch(words[2]) if len(words) == 3 else None
    if not 2 <= len(words) <= 3 or (len(words) == 3 and quota is None) or not _NAME.fullmatch(words[0]):
        raise ConfigError(f"{context}: a line is NAME TOKEN [max_sessions=N]")
    if len(words[1]) < MIN_LENGTH or not _TOKEN.fullmatch(words[1]):
        raise ConfigError(
            f"{context}: a token has at least {MIN_LENGTH} characters, letters, digits and -._~+/=; make one with: "
            "openssl rand -hex 32"
        )
    return ServerClient(words[0], None if quota is None else int(quota.group(1))), words[1]


def _digest(token: str) -> bytes:
    # Tokens are long and random, so a plain hash cannot be inverted by guessing.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@contextlib.contextmanager
def new_token_file(name: str) -> Iterator[Path]:
    """A file with a new token that only this user can read; it is deleted at the end."""
    folder = cache_folder("tokens")
    path = folder / name
    advice = "give one with --token-file, or name a folder that can be with ENVGYM_CACHE=FOLDER"
    with reported_as(ConfigError, f"the token cannot be written to {path}", advice):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)  # a killed server may have left one, with any permissions
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


# ---------------------------------------------------------------------------------------------------------
# Keys of clients


def api_key(variable: str, api: str) -> str:
    """The key in an environment variable; "" without a variable. Raises `ConfigError` if it is unset or not a key;
    `api` names the key's owner in the message."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise ConfigError(f"{api}: the environment variable {variable}, which should hold its API key, is not set")
    if not key.isascii() or any(map(str.isspace, key)):
        raise ConfigError(f"{api}: the environment variable {variable} must hold one API key and nothing else")
    return key


def hide_secret(text: str, secret: str) -> str:
    """`[secret]` in place of a secret in a text that its server wrote, and of the whole text if it holds the secret in
    another shape (escaped, encoded, wrapped) or `PART` characters of it."""
    text = text.replace(secret, "[secret]") if secret else text
    letters, views = _letters(secret), [_letters(view) for view in _views(text)]
    parts = {letters[start : start + PART] for start in range(len(letters) - PART + 1)}
    return "[left out: it holds the secret]" if any(part in view for view in views for part in parts) else text


def _views(text: str) -> Iterator[str]:
    """A text as it is, unescaped, and decoded from base64 and hexadecimal digits."""
    yield text
    for _ in range(3):  # one escape may be in another
        text = html.unescape(unquote(_ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)))
    yield text
    for digits, size, decode in ((r"[\w+/-]+", 4, base64.urlsafe_b64decode), (r"[\da-fA-F]+", 2, bytes.fromhex)):
        for run in re.findall(digits, "".join(text.split()), re.ASCII):
            for start in range(size):  # other digits may precede it
                yield decode(run[start : start + (len(run) - start) // size * size]).decode("latin-1")


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text)).casefold()
