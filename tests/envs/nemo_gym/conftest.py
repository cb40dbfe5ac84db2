"""The real NeMo-Gym, its servers in a process of its own."""

import contextlib
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.running import wait_until_listening

HERE = Path(__file__).parent


class RealGym:
    """Runs servers and the rollout collector of the package that `nemo_gym_package` installs."""

    def __init__(self, package):
        self.python, self.environment = package

    @contextlib.contextmanager
    def running(self, folder, config, ports):
        """Run the servers of `config` until they answer at all of `ports`."""
        path = folder / "their_config.yaml"
        path.write_text(yaml.safe_dump({"dry_run": False, "ray_head_node_address": "none", **config}))
        with process(
            [self.python, HERE / "real_servers.py", path], folder / "their_servers.log", ports, self.environment
        ):
            yield

    def launch(self, path):
        """What the launcher makes of the config at `path`: the names of the servers it would start, and where (at which
        port) it looks for each."""
        command = [self.python, HERE / "launch.py", path]
        run = subprocess.run(
            command, env=self.environment, cwd=path.parent, capture_output=True, text=True, timeout=60, check=False
        )
        assert run.returncode == 0, run.stderr[-3000:]
        found = json.loads(run.stdout.splitlines()[-1])
        return found["starts"], found["ports"]

    def collect(self, head, jobs):
        """Play rows with the collector, in one process: `jobs` are (name, file of rows, repeats). Returns for each name
        the rollouts, the failures and the metrics it has written, which lie beside the rows."""
        outs = {name: path.with_name(f"rollouts_{name}.jsonl") for name, path, _ in jobs}
        words = [str(word) for name, path, repeats in jobs for word in (path, outs[name], repeats)]
        command = [self.python, HERE / "collect.py", str(head), *words]
        run = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=200, check=False)
        assert run.returncode == 0, run.stderr[-3000:]
        return {
            name: (
                lines(out),
                lines(out.with_name(f"{out.stem}_failures.jsonl")),
                json.loads(out.with_name(f"{out.stem}_aggregate_metrics.json").read_text()),
            )
            for name, out in outs.items()
        }


@contextlib.contextmanager
def process(command, log, ports, environment=None):
    """Run a program until it answers at all of `ports`, and end it."""
    with log.open("wb") as out:
        running = subprocess.Popen(command, env=environment or os.environ, cwd=log.parent, stdout=out, stderr=out)
    try:
        wait_until_listening(running, ports, log)
        yield running
    finally:
        running.kill()
        running.wait()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def documented():
    """`documented(words)`: the words after `envgym` of the command on the page that holds them."""
    page = (HERE.parents[2] / "docs" / "reference" / "nemo_gym.md").read_text()
    commands = re.findall(r"^```console\nenvgym (.*?)^```$", page, re.MULTILINE | re.DOTALL)

    def documented(words):
        [command] = [command for command in commands if words in command]
        return shlex.split(command.replace("\\\n", " "))

    return documented


@pytest.fixture(scope="session")
def nemo_gym(nemo_gym_package):
    return RealGym(nemo_gym_package)


@pytest.fixture(scope="session")
def server_process():
    return process


@pytest.fixture(scope="session")
def server_entry():
    """A server's entry in a config of theirs; one that is to be run has an `entrypoint`."""

    def entry(kind, implementation, port, **settings):
        return {kind: {implementation: {"host": "127.0.0.1", "port": port, "num_workers": 1, **settings}}}

    return entry


@pytest.fixture(scope="session")
def agent_entry(server_entry):
    """The entry of an agent server of theirs that is to be run, on a resources server and on a model server."""

    def entry(implementation, port, resources, model="policy_model", **settings):
        references = {
            "resources_server": {"type": "resources_servers", "name": resources},
            "model_server": {"type": "responses_api_models", "name": model},
        }
        return server_entry("responses_api_agents", implementation, port, entrypoint="app.py", **references, **settings)

    return entry
