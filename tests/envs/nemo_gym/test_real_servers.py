"""Resources servers of the real NeMo-Gym, played and trained on: puzzles, a server that keeps sessions, and a game."""

import asyncio
import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import envgym
from envgym.agents.token_level import ToolCalling
from envgym.engine import Generation, SamplingParams
from envgym.errors import ConfigError, InvalidOutcome
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import Action, StopReason, ToolCall, VersionSpan
from tests.running import wait_until_listening

ENVGYM = Path(sys.executable).with_name("envgym")
LAUNCHER = Path(__file__).parent / "real_servers.py"
SERVERS = {"reasoning_gym": "math", "example_session_state_mgmt": "agent", "blackjack": "games"}
"""Implementations that are started, and the domain each must name."""

pytestmark = pytest.mark.timeout(900)  # the package may have to be installed first


@contextlib.contextmanager
def running(package, folder, free_ports, names):
    """The real servers called `names`, in one process, and their head server, until the context ends.

    Its `rows` are files of the rows that come with each server.
    """
    python, variables = package
    head, *ports = free_ports(1 + len(names))
    config = {"run_head_server": True, "head_server": {"host": "127.0.0.1", "port": head}}
    for name, port in zip(names, ports, strict=True):
        settings = {"entrypoint": "app.py", "domain": SERVERS[name], "host": "127.0.0.1", "port": port}
        config[f"my_{name}"] = {"resources_servers": {name: settings}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"dry_run": False, "ray_head_node_address": "none", **config}))
    with (folder / "servers.log").open("w") as log:
        process = subprocess.Popen([python, LAUNCHER, folder / "config.yaml"], env=variables, stdout=log, stderr=log)
    try:
        wait_until_listening(process, [head, *ports], folder / "servers.log", seconds=120)
        installed = python.parents[1] / "lib" / "python3.12" / "site-packages" / "resources_servers"
        yield SimpleNamespace(
            head=f"http://127.0.0.1:{head}",
            urls={name: f"http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)},
            rows={name: installed / name / "data" / "example.jsonl" for name in names},
            process=process,
        )
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def servers(nemo_gym_package, tmp_path_factory, free_ports):
    with running(nemo_gym_package, tmp_path_factory.mktemp("nemo_gym"), free_ports, list(SERVERS)) as found:
        yield found


def spec(servers, name, **settings):
    """The environment, found by the server's name at the head server."""
    data = {"path": str(servers.rows[name]), "test_fraction": 0}
    return envgym.spec("nemo_gym", head=servers.head, server=f"my_{name}", data=data, **settings)


def says(text, *calls):
    return Action(text, (), tuple(ToolCall(f"call{i:05d}", name, given) for i, (name, given) in enumerate(calls)))


# -- played -----------------------------------------------------------------------------------------------


def test_a_puzzle_is_scored_by_the_real_scorer(servers):
    async def main():
        rewards, numbers = [], {}
        async with spec(servers, "reasoning_gym") as puzzles:
            task = await puzzles.tasks("train").get(0)
            for answer in (f"<answer>{task.answer}</answer>", "<answer>nobody knows</answer>"):
                async with puzzles.make() as env:
                    await env.reset(options={"task": task})
                    _, reward, terminated, _, info = await env.step(says(answer))
                    assert terminated
                    rewards.append(reward)
                    numbers = info["metrics"]
        return rewards, numbers

    rewards, numbers = asyncio.run(main())
    assert rewards[0] == 1.0
    assert rewards[1] < 0.5
    assert numbers["score"] == rewards[1]


def test_two_sessions_at_once_do_not_see_each_others_state(servers):
    """Their counters begin at the row's number, each adds its own, and each is verified by what it added alone."""

    async def one(counters, added):
        task = await counters.tasks("train").get(0)
        async with counters.make() as env:
            await env.reset(options={"task": task})
            for count in added:
                await env.step(says("", ("increment_counter", {"count": count})))
                await asyncio.sleep(0.05)
            observation, *_ = await env.step(says("", ("get_counter_value", {})))
            *_, reward, _, _, _ = await env.step(says("done"))
            return json.loads(observation.messages[0].text)["count"] - task.fields["initial_count"], reward

    async def main():
        async with spec(servers, "example_session_state_mgmt") as counters:
            return await asyncio.gather(*(one(counters, added) for added in ([1, 2], [2, 2], [1, 2], [])))

    assert asyncio.run(main()) == [(3, 1.0), (4, 0.0), (3, 1.0), (0, 0.0)]


def test_what_a_real_tool_refuses_is_told_to_the_policy(servers):
    async def main():
        async with spec(servers, "example_session_state_mgmt") as counters, counters.make() as env:
            await env.reset(options={"task": await counters.tasks("train").get(0)})
            return await env.step(says("", ("increment_counter", {"count": "many"}), ("no_such_tool", {})))

    observation, _, _, _, info = asyncio.run(main())
    refused, unknown = [message.text for message in observation.messages]
    assert "valid integer" in refused
    assert "there is no tool 'no_such_tool'" in unknown
    assert (info["metrics"]["tool_errors"], info["metrics"]["tool_malformed"]) == (1.0, 1.0)


def test_a_game_is_played_to_its_end(servers):
    """Hitting on anything below 17, as the dealer does, ends in a win, a draw or a loss."""

    async def game(table):
        async with table.make() as env:
            observation, _ = await env.reset(options={"task": await table.tasks("train").get(0)})
            total, ended = 0.0, False
            while not ended:
                hand = int(re.findall(r"= (\d+)\n", observation.messages[-1].text)[-1])
                said = says(f"<action>{'hit' if hand < 17 else 'stand'}</action>")
                observation, reward, ended, _, _ = await env.step(said)
                total += reward
            return total

    async def main():
        async with spec(servers, "blackjack") as table:
            return await asyncio.gather(*(game(table) for _ in range(40)))

    totals = asyncio.run(main())
    assert set(totals) <= {-1.0, 0.0, 1.0}
    assert {-1.0, 1.0} <= set(totals)


def test_a_real_head_server_names_its_servers(servers):
    with pytest.raises(ConfigError, match=r"set env\.server to one of my_blackjack, my_example_session"):
        asyncio.run(
            envgym.spec("nemo_gym", head=servers.head, data={"path": str(servers.rows["reasoning_gym"])}).ensure_setup()
        )


def test_a_head_server_is_no_resources_server(servers):
    with pytest.raises(ConfigError, match="not a resources server"):
        asyncio.run(
            envgym.spec("nemo_gym", url=servers.head, data={"path": str(servers.rows["reasoning_gym"])}).ensure_setup()
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "kinds"), [(signal.SIGKILL, {"server_lost", "server_unreachable"}), (signal.SIGSTOP, {"server_timeout"})]
)
def test_a_real_server_that_is_killed_or_frozen_fails_its_episodes(nemo_gym_package, tmp_path, does, kinds, free_ports):
    async def main(found):
        failures = []
        async with spec(found, "example_session_state_mgmt", request_timeout=2) as counters:
            task = await counters.tasks("train").get(0)
            episodes = [counters.make() for _ in range(8)]
            for env in episodes:
                await env.reset(options={"task": task})
            found.process.send_signal(does)
            if does is signal.SIGKILL:
                found.process.wait()
            for env in episodes:
                with pytest.raises(InvalidOutcome) as failure:
                    await env.step(says("", ("increment_counter", {"count": 1})))
                failures.append(failure.value)
                await env.close()
        return failures

    with running(nemo_gym_package, tmp_path, free_ports, ["example_session_state_mgmt"]) as found:
        failures = asyncio.run(main(found))
    assert {failure.kind for failure in failures} <= kinds
    assert all(failure.retryable for failure in failures)


# -- by a whole rollout -----------------------------------------------------------------------------------


TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Scripted:
    """An engine that says the next of its lines, by how often the prompt holds the assistant's turn."""

    def __init__(self, tokenizer, lines, before=lambda turn: None):
        self.tokenizer, self.lines, self.before = tokenizer, lines, before

    async def generate(self, request):
        turn = self.tokenizer.decode(list(request.token_ids)).count("<|im_start|>assistant") - 1
        self.before(turn)
        ids = (*self.tokenizer.encode(self.lines[turn], add_special_tokens=False), self.tokenizer.eos_token_id)
        return Generation(ids, (-0.5,) * len(ids), StopReason.STOP, (VersionSpan(0, 0, len(ids)),))


def rollout(tiny_model, environment, lines, *, before=lambda turn: None, size=4):
    """A group of episodes of the first row, through the tool-calling agent and a real tokenizer."""
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = TEMPLATE
    renderer = make_renderer("chat", tokenizer)
    engine = Scripted(tokenizer, lines, before)
    agent = ToolCalling(renderer, ToolCalling.Config())
    config = RolloutConfig(retries=0, refills=0)
    runner = Runner(environment, agent, engine, config, max_model_len=4096, seed=0, deterministic=False)
    sampling = SamplingParams(max_tokens=200, stop_token_ids=renderer.stop_token_ids)

    async def main():
        async with environment:
            task = await environment.tasks("train").get(0)
            [group] = await runner.roll_out([task], SamplingPlan("p", sampling, size))
            return group.episodes

    return asyncio.run(main())


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_rollout_calls_real_tools_and_every_episode_is_its_own(servers, tiny_model):
    lines = ["First 1." + call("increment_counter", count=1), call("increment_counter", count=2), "Done."]
    episodes = rollout(tiny_model, spec(servers, "example_session_state_mgmt"), lines)
    assert [(episode.outcome.status, episode.reward) for episode in episodes] == [("completed", 1.0)] * 4
    for episode in episodes:
        [row] = episode.rows
        assert [segment.role for segment in row.segments] == ["prompt", *["action", "feedback"] * 2, "action"]
        assert [m.text for m in episode.messages if m.role == "tool"] == ['{"success":true}'] * 2
        assert episode.metrics["tool_calls"] == 2.0


@pytest.mark.slow
def test_a_server_killed_in_mid_episode_leaves_failed_episodes_and_no_rewards(
    nemo_gym_package, tmp_path, tiny_model, free_ports
):
    with running(nemo_gym_package, tmp_path, free_ports, ["example_session_state_mgmt"]) as found:

        def kill(turn):
            if turn == 1:
                found.process.kill()
                found.process.wait()

        lines = [call("increment_counter", count=1), call("increment_counter", count=2), "Done."]
        episodes = rollout(tiny_model, spec(found, "example_session_state_mgmt"), lines, before=kill)
    assert [episode.reward for episode in episodes] == [None] * 4
    assert all(episode.failed for episode in episodes)
    assert {episode.outcome.reason for episode in episodes} <= {"server_lost", "server_unreachable"}


# -- trained on -------------------------------------------------------------------------------------------


def documented(number):
    """The words after `envgym` of a command on the page."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "nemo_gym.md").read_text()
    commands = re.findall(r"^```console\nenvgym (.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return shlex.split(commands[number].replace("\\\n", " "))


def train(folder, words):
    """A run of two steps: its metrics and its summary."""
    short = [
        "engine.kind=transformers",
        "steps=2",
        "rollout.tasks_per_step=2",
        "rollout.group_size=4",
        "rollout.max_tokens=24",
    ]
    words = [*words, *short, "data.test_fraction=0", "eval.every=0", "--name", "short"]
    done = subprocess.run([ENVGYM, *words], cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    run = folder / "runs" / "short"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in metrics if line["step"] > 0], json.loads((run / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SERVERS))
def test_a_policy_is_trained_on_a_real_server(servers, tmp_path, tiny_model, name):
    by_url, by_name = documented(0), documented(1)
    words = by_url if name == "blackjack" else by_name
    known = {
        "http://127.0.0.1:21051": servers.urls[name],
        "http://127.0.0.1:11000": servers.head,
        "my_server": f"my_{name}",
        "rows.jsonl": str(servers.rows[name]),
        "path/or/hub-id": str(tiny_model),
    }
    for shown, real in known.items():
        words = [word.replace(shown, real) for word in words]
    steps, summary = train(tmp_path, words)
    assert (summary["status"], summary["steps"], summary["failures"]) == ("completed", 2, {})
    assert summary["tokens"]["trained"] > 0
    assert all("reward/mean" in step for step in steps)
    if name == "blackjack":  # hands differ, so rewards do
        assert any(step["grad_norm"] > 0 for step in steps)
