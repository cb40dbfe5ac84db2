"""Run servers of the real NeMo-Gym, as its own launcher would, but in one process: each one of a config that has an
`entrypoint` and is the package's own, and its head server. For a Python that has the package:
real_servers.py CONFIG.yaml"""

import asyncio
import importlib.util
import inspect
import os
import sys
from pathlib import Path

import uvicorn

os.environ["NEMO_GYM_CONFIG_DICT"] = Path(sys.argv[1]).read_text()

from nemo_gym.global_config import get_global_config_dict
from nemo_gym.server_utils import HeadServer, ServerClient, SimpleServer


def server_class(kind, implementation):
    module = importlib.import_module(f"{kind}.{implementation}.app")
    [found] = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, SimpleServer) and value.__module__ == module.__name__
    ]
    return found


async def main():
    config = get_global_config_dict()
    head = ServerClient.load_head_server_config()
    apps = []
    for name, kinds in config.items():
        for kind in ("resources_servers", "responses_api_agents", "responses_api_models"):
            for implementation, settings in (kinds.get(kind, {}) if hasattr(kinds, "get") else {}).items():
                if "entrypoint" in settings and importlib.util.find_spec(f"{kind}.{implementation}"):
                    os.environ["NEMO_GYM_CONFIG_PATH"] = name
                    found = server_class(kind, implementation)
                    client = ServerClient(head_server_config=head, global_config_dict=config)
                    server = found(config=found.load_config_from_global_config(), server_client=client)
                    app = server.setup_webserver()
                    server.setup_liveness(app)
                    server.setup_exception_middleware(app)
                    apps.append((app, settings.host, settings.port))
    if "run_head_server" in config:
        apps.append((HeadServer(config=head).setup_webserver(), head.host, head.port))
    servers = [uvicorn.Server(uvicorn.Config(app, host=h, port=p, log_level="warning")) for app, h, p in apps]
    await asyncio.gather(*(server.serve() for server in servers))


asyncio.run(main())
