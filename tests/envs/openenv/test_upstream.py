"""OpenEnv's own examples, which are in its repository and not in its package: `ENVGYM_OPENENV` is a checkout."""

import asyncio
import os
import random
import subprocess
from pathlib import Path

import pytest

import envgym
from tests.acceptance.conftest import store  # noqa: F401  # a fixture
from tests.running import wait_until_listening

from .test_openenv import play

CHECKOUT = os.environ.get("ENVGYM_OPENENV")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHECKOUT, reason="ENVGYM_OPENENV names no checkout of OpenEnv"),
]


def moves(number, choices, length=12):
    draws = random.Random(number)
    return [draws.choice(choices) for _ in range(length)]


ENVIRONMENTS = {
    "echo_env": (
        lambda n: [("echo_message", {"message": f"hello {n}"}), ("echo_with_length", {"message": "abc"})],
        lambda call: {"type": "call_tool", "tool_name": call[0], "arguments": call[1]},
    ),
    "maze_env": (lambda n: moves(n, "0123"), lambda text: {"action": int(text)}),
    "grid_world_env": (lambda n: moves(n, ["UP", "DOWN", "LEFT", "RIGHT"]), lambda text: {"action": text}),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_example_of_openenv_gives_the_rewards_that_its_client_sees(
    openenv_package,
    their_clients,
    free_ports,
    tmp_path,
    name,
    store,  # noqa: F811
):
    turns_of, column = ENVIRONMENTS[name]
    python, variables = openenv_package
    [port] = free_ports(1)
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    command = [python, "-m", "uvicorn", f"{name}.server.app:app", "--port", str(port)]
    with log.open("wb") as out:
        server = subprocess.Popen(command, cwd=Path(CHECKOUT) / "envs", env=variables, stdout=out, stderr=out)
    try:
        wait_until_listening(server, [port], log)

        async def main():
            async with envgym.spec(f"openenv:{url}") as spec:
                return await asyncio.gather(*(play(spec, n, turns_of(n)) for n in range(50)))

        ours = [[step[1] for step in steps] for _, steps in asyncio.run(main())]
        jobs = [{"reset": {"seed": n}, "actions": [column(said) for said in turns_of(n)]} for n in range(50)]
        theirs = [[reward for _, reward, _ in job["steps"]] for job in their_clients(url, jobs)]
    finally:
        server.kill()
        server.wait()
    assert ours == theirs
    totals = [sum(reward for reward in rewards if reward is not None) for rewards in ours]
    store(f"openenv_{name}", episodes=50, steps=sum(map(len, ours)), rewards_equal=True, mean_reward=sum(totals) / 50)
