"""`envgym serve --dialect nemo_gym`: environments as NeMo-Gym's servers, each at its own port.

The first is also the head server.
"""

from __future__ import annotations

import contextlib
import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from aiohttp import web
from aiohttp.typedefs import Handler

from envgym.env import EnvSpec
from envgym.errors import ConfigError, EnvgymError
from envgym.net.listening import listen, stop_signals, url_of
from envgym.net.problems import Problem
from envgym.net.server import MAX_BODY, authenticate, serve_requests
from envgym.services import check_servable, start_services

from .protocol import host_and_port
from .served_tasks import UnknownRow, write_rows
from .servers import AgentServer, ResourcesServer, with_cookie

SERVED = "served"
"""The kind of an entry for a server that is already running."""
REFUSAL = "with NeMo-Gym's protocol, which has no tokens: use --host 127.0.0.1 and an SSH tunnel from other machines"

logger = logging.getLogger(__name__)


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this dialect."""
    parser.add_argument("--host", metavar="H", default="127.0.0.1", help="loopback address to listen on (127.0.0.1)")
    parser.add_argument("--port", metavar="P", type=int, default=8000, help="port of the first environment (8000)")
    parser.add_argument("--max-sessions", metavar="N", type=int, default=10_000, help="concurrent sessions (10000)")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder for NeMo-Gym's config and rows")
    parser.add_argument("--model-server", metavar="URL", help="NeMo-Gym's model server, for /run")
    parser.add_argument("--rows", metavar="N", type=int, default=1000, help="maximum rows per split (1000)")


async def serve(specs: Mapping[str, EnvSpec], options: Namespace) -> None:
    """Serve environments as NeMo-Gym would, until SIGINT or SIGTERM: the first at `port`, the others at the ports after
    it (all at free ports if it is 0). Each is a resources server and an agent server, the first also the head server.

    The folder `out` gets `config.yaml`, and the rows of each environment as `NAME_train.jsonl` and
    `NAME_validation.jsonl`. Each environment's URL is printed once all answer.

    NeMo-Gym's protocol has no tokens, so only loopback addresses are accepted. Raises `ConfigError`.
    """
    if min(options.rows, options.max_sessions) < 1:
        raise ConfigError("--rows and --max-sessions are at least 1")
    host, port, folder, model_server = options.host, options.port, options.out, options.model_server
    for spec in specs.values():
        check_servable(spec)
        if spec.scores_groups:
            raise ConfigError(f"environment {spec.id} judges groups of episodes, and NeMo-Gym verifies each by itself")
    if reserved := specs.keys() & {"head_server", "policy_model", *(f"{name}_agent" for name in specs)}:
        raise ConfigError(f"the name {min(reserved)!r} is another server's in NeMo-Gym's config: give another, NAME=E")
    model = None if model_server is None else model_address(model_server)
    async with contextlib.AsyncExitStack() as stack:
        listeners = {
            name: stack.enter_context(listen(host, port + number if port else 0, refusal=REFUSAL))
            for number, name in enumerate(specs)
        }
        addresses = {name: listener.getsockname()[:2] for name, listener in listeners.items()}
        stopping = stack.enter_context(stop_signals())
        for spec in specs.values():
            await stack.enter_async_context(start_services(spec))
        folder.mkdir(parents=True, exist_ok=True)
        files = {name: await write_rows(spec, name, folder, options.rows) for name, spec in specs.items()}
        config = config_of(addresses, files, model)
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        for number, (name, spec) in enumerate(specs.items()):
            app = application(name, spec, model_server, options.max_sessions, config if number == 0 else None)
            await stack.enter_async_context(serve_requests(app, listeners[name], drain=2.0))
        for name, listener in listeners.items():
            served = f"serving {specs[name].id} as {name} and {name}_agent"
            print(f"{served} at {url_of(listener)} (Ctrl-C ends it)", flush=True)
        await stopping.wait()


def model_address(url: str) -> tuple[str, int]:
    """Host and port of NeMo-Gym's model server. Raises `ConfigError`."""
    address, parts = host_and_port(url), urlsplit(url)
    if parts.scheme != "http" or address is None or parts.path not in ("", "/"):
        raise ConfigError(f"--model-server is http://HOST:PORT, without /v1, not {url!r}")
    return address


def config_of(
    addresses: Mapping[str, tuple[str, int]], files: Mapping[str, list[tuple[str, Path]]], model: tuple[str, int] | None
) -> dict[str, Any]:
    """NeMo-Gym's config of these servers: for each environment NAME a resources server of that name, and an agent
    server NAME_agent."""
    head, head_port = next(iter(addresses.values()))
    config: dict[str, Any] = {"head_server": {"host": head, "port": head_port}}
    for name, address in addresses.items():
        datasets = [
            {"name": word, "type": word, "jsonl_fpath": str(path), "license": "TBD"} for word, path in files[name]
        ]
        references: dict[str, Any] = {"resources_server": {"type": "resources_servers", "name": name}}
        if model is not None:
            references["model_server"] = {"type": "responses_api_models", "name": "policy_model"}
        config[name] = _entry("resources_servers", address, domain="other")
        config[f"{name}_agent"] = _entry("responses_api_agents", address, **references, datasets=datasets)
    if model is not None:
        config["policy_model"] = _entry("responses_api_models", model)
    return config


def _entry(kind: str, address: tuple[str, int], **settings: Any) -> dict[str, Any]:
    """A server's entry. NeMo-Gym rejects references to an entry without an `entrypoint`, and reads the address from the
    first kind of an entry; if that has an `entrypoint`, it starts the server. So `SERVED` comes first, without one."""
    host, port = address
    location = {"host": host, "port": port}
    return {SERVED: {"envgym": location}, kind: {"envgym": {"entrypoint": "app.py", **location, **settings}}}


def application(
    name: str, spec: EnvSpec, model_server: str | None, max_sessions: int, config: Mapping[str, Any] | None = None
) -> web.Application:
    """One environment's routes; with a `config` those of the head server as well."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[with_cookie, _plain_errors])

    async def alive(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app.router.add_get("/", alive)
    if config is not None:

        async def global_config(_: web.Request) -> web.Response:
            return web.json_response(yaml.safe_dump(config, sort_keys=False))  # YAML within a JSON string

        app.router.add_get("/global_config_dict_yaml", global_config)
    AgentServer(name, spec, model_server, max_sessions).add_to(app)
    ResourcesServer(name, spec, max_sessions).add_to(app)
    return app


@web.middleware
async def _plain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors with a status and a line. An environment's exception is a 500: NeMo-Gym then fails the rollout."""
    try:
        authenticate(request, None)
        return await handler(request)
    except Problem as problem:
        return web.Response(status=problem.status, text=str(problem))
    except web.HTTPException as error:
        headers = {name: value for name, value in error.headers.items() if name in ("Retry-After", "Allow")}
        return web.Response(status=error.status, text=error.text, headers=headers)
    except Exception as error:  # an environment may raise anything at all
        if not isinstance(error, EnvgymError):
            logger.error("%s failed", request.path, exc_info=error)
        status = 422 if isinstance(error, UnknownRow) else 500
        return web.json_response({"error": type(error).__name__, "detail": str(error)}, status=status)
