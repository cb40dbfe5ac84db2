"""`envgym serve-reward-model`: from a declaration to a server that runs until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError, RunError
from envgym.remote.listening import listen
from envgym.remote.server import stop_signals
from envgym.workers.local import LocalRuntime

from .declarations import RewardModel
from .reward import RewardModelClient, read_token
from .reward_server import RewardServer

REFUSAL = "without a token: whoever can reach it could use the model; leave --no-token away, or use --host 127.0.0.1"


async def serve_model(
    declared: RewardModel,
    host: str,
    port: int,
    *,
    token_file: str | None,
    open_to_all: bool,
    on_ready: Callable[[str, str], None],
) -> None:
    """Serve a reward model at `host:port` until SIGINT or SIGTERM, then finish what runs and close everything.

    Without `token_file` a token is made, unless the server is `open_to_all`, which only a loopback address may be.
    `on_ready` gets the URL and the token's file (empty where there is none) once the server answers; port 0 picks a
    free one. A second signal ends it at once. Raises `EnvgymError` for what cannot be served.
    """
    token = read_token(token_file) if token_file is not None else None
    stopping = asyncio.Event()
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(host, port, refusal=REFUSAL if open_to_all else None))
        stack.enter_context(stop_signals(stopping))
        logs = tempfile.mkdtemp(prefix="envgym-reward-model-")
        runtime = LocalRuntime(logs)
        stack.push_async_callback(runtime.close)
        client = RewardModelClient(declared, "reward-model", lambda: runtime)
        stack.push_async_callback(client.close)
        if await _first(client.start(), stopping.wait()):
            if token is None and not open_to_all:
                port = listener.getsockname()[1]
                token, token_file = stack.enter_context(made_token(f"reward-model-{port}"))
            server = RewardServer(client, token)
            await stack.enter_async_context(server.running(listener))
            on_ready(f"{_url(listener)}/get_reward", token_file or "")
            if await _first(server.dead.wait(), stopping.wait()):
                raise RunError(
                    f"the reward model's process ended without being asked to (log: {logs}/reward-model.log)"
                )
    shutil.rmtree(logs, ignore_errors=True)


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


async def _first(one: Coroutine[Any, Any, object], other: Coroutine[Any, Any, object]) -> bool:
    """Wait for either, end the other, and say whether it was the first. Raises what the first raised."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    if not tasks[0].done():
        return False
    tasks[0].result()
    return True


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
