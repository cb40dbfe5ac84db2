"""What the real launcher makes of a config, without starting anything: launch.py CONFIG.yaml prints the names of the
servers that it would start, and the port at which it looks for each one, as JSON."""

import json
import sys
from types import SimpleNamespace

from nemo_gym.cli import env
from nemo_gym.global_config import GlobalConfigDictParserConfig, get_first_server_config_dict, get_global_config_dict
from nemo_gym.server_utils import HeadServer
from omegaconf import DictConfig

_, path = sys.argv
sys.argv[1:] = [f"+config_paths=[{path}]"]
started = []


class Done(Exception):
    pass


def note(command, folder, server_name):
    started.append(server_name)
    return SimpleNamespace(pid=0)


def done(instances):
    raise Done  # all that are to be started are known


env.initialize_ray = lambda: None
env.setup_env_command = lambda *given: "true"
env.run_command = note
HeadServer.run_webserver = classmethod(lambda _: (None, None, SimpleNamespace(set_server_instances=done)))
try:
    env.RunHelper().start(GlobalConfigDictParserConfig())
except Done:
    config = get_global_config_dict()
    servers = [name for name, kinds in config.items() if isinstance(kinds, DictConfig) and name != "head_server"]
    ports = {name: get_first_server_config_dict(config, name).port for name in servers}
    print(json.dumps({"starts": started, "ports": ports}))
