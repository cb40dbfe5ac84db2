"""OpenEnv's side of `openenv.py`, for a Python that has the package: its server, or episodes with its own client.

    python openenv_side.py serve PORT
    python openenv_side.py play URL EPISODES CONCURRENCY TURNS

An episode is the one of `echo_game.py`. `play` prints the episodes per second, and the CPU milliseconds of each.
"""

import asyncio
import sys
import time

from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Say(Action):
    message: str


class Echo(Observation):
    text: str = ""


class EchoGame(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self._state = State(episode_id=episode_id or "", step_count=0)
        return Echo(text="Say something.")

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        is_over = self._state.step_count == 4
        return Echo(text=f"You said {action.message}", reward=float(is_over), done=is_over)

    @property
    def state(self):
        return self._state


async def play(url, n_episodes, concurrency, turns):
    """Each of the concurrent clients has one connection, and resets it for each of its episodes."""

    async def episodes(count):
        async with GenericEnvClient(base_url=url) as client:
            for number in range(count):
                await client.reset(seed=number)
                for turn in range(turns):
                    result = await client.step({"message": f"turn {turn}"})
                assert (result.reward, result.done) == (1.0, True)

    await episodes(concurrency)
    start, cpu_start = time.perf_counter(), time.process_time()
    await asyncio.gather(*(episodes(n_episodes // concurrency) for _ in range(concurrency)))
    return n_episodes / (time.perf_counter() - start), 1000 * (time.process_time() - cpu_start) / n_episodes


if sys.argv[1] == "serve":
    import uvicorn

    app = create_app(EchoGame, Say, Echo, env_name="echo", max_concurrent_envs=1000)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
else:
    print(*asyncio.run(play(sys.argv[2], *map(int, sys.argv[3:]))))
