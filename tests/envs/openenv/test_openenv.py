"""Environments on OpenEnv's own SDK, played over its wire: rewards, errors, and connections that fail."""

import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import envgym
from envgym.errors import CallTimeout, InvalidOutcome
from envgym.rollout.episode import run_episode
from envgym.rollout.scripted import ScriptedEpisode, script_of
from envgym.types import Action, ToolCall

pytestmark = pytest.mark.timeout(900)  # the package may have to be installed first

WORDS = ("alder", "birch", "cedar", "dogwood")
COLUMNS = {
    "text": lambda text: {"message": text},
    "integer": lambda text: {"move": int(text)},
    "pair": lambda call: call[1],
    "tools": lambda call: {"type": "call_tool", "tool_name": call[0], "arguments": call[1]},
}
"""An action of each environment as OpenEnv's client sends it."""


def act(said):
    """The policy's turn: a text, or a call (name, arguments)."""
    if isinstance(said, str):
        return Action(said)
    return Action("", (), (ToolCall("call0", *said),), content="")


async def task_of(spec, seed=0):
    """The task with this seed, or the first row."""
    tasks = spec.tasks("train")
    return await tasks.get(seed if tasks.size is None else 0)


async def play(spec, seed, turns):
    """The first observation of an episode, and the results of its steps."""
    async with spec.make() as env:
        observation, _ = await env.reset(seed=seed, options={"task": await task_of(spec, seed)})
        steps = []
        for said in turns:
            steps.append(await env.step(act(said)))
            if steps[-1][2] or steps[-1][3]:
                break
        return observation, steps


def play_at(url, seed, turns, **settings):
    async def main():
        async with envgym.spec(f"openenv:{url}", **settings) as spec:
            return await play(spec, seed, turns)

    return asyncio.run(main())


@contextlib.asynccontextmanager
async def env_at(url, **settings):
    async with envgym.spec(f"openenv:{url}", **settings) as spec, spec.make() as env:
        yield spec, env


def texts(step):
    return [message.text for message in step[0].messages]


# -- actions and rewards ----------------------------------------------------------------------------------


TURNS = {
    "text": [[f"I say {word}" for word in turn] for turn in itertools.product(WORDS, repeat=3)][:20],
    "integer": [["1", "1", "1"], ["3"], ["1", "1", "2", "-1"], ["4", "4", "0", "-5"]],
    "pair": [[("act", {"side": side, "amount": amount})] for side in ("left", "right") for amount in (1, 2)],
    "tools": [[("add", {"a": n, "b": 10}), ("answer", {"value": n + 10})] for n in range(10)],
}


@pytest.mark.parametrize("name", TURNS)
def test_rewards_are_those_that_their_client_sees(peers, their_clients, name):
    """52 episodes in all. The reward of a reset, 0.5 in `text`, is in none."""

    async def main():
        async with envgym.spec(f"openenv:{peers.urls[name]}") as spec:
            return await asyncio.gather(*(play(spec, seed, turns) for seed, turns in enumerate(TURNS[name] * repeats)))

    repeats = 2 if name in ("integer", "pair") else 1
    episodes = asyncio.run(main())
    jobs = [
        {"reset": {"seed": seed}, "actions": [COLUMNS[name](said) for said in turns]}
        for seed, turns in enumerate(TURNS[name] * repeats)
    ]
    rewards = [[step[1] for step in steps] for _, steps in episodes]
    assert rewards == [[reward for _, reward, _ in job["steps"]] for job in their_clients(peers.urls[name], jobs)]
    assert len({tuple(each) for each in rewards}) > 1
    assert all(steps[-1][2] and not steps[-1][3] for _, steps in episodes)


def test_a_text_and_its_seed(peers):
    observation, [step] = play_at(peers.urls["text"], 0, ["dogwood"])
    assert [message.text for message in observation.messages] == ["Say dogwood."]
    assert observation.tools == ()
    assert (step[1], step[4]["metrics"]) == (0.75, {"turn": 1.0})
    assert peers.logged("reset")[-1] == [0, {}]


def test_an_instruction_begins_each_episode(peers):
    observation, _ = play_at(peers.urls["text"], 0, [], instruction="Do as you are told.")
    assert [(m.role, m.text) for m in observation.messages] == [
        ("system", "Do as you are told."), ("user", "Say dogwood."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("show", "says"),
    [(None, '{"row": 1, "walls": [4]}'), ("row", "1"), ("metadata.size", ""), ("walls", "[4]")],
)
def test_the_policy_reads_what_show_names(peers, show, says):
    _, [step] = play_at(peers.urls["integer"], 0, ["1"], show=show)
    assert texts(step) == [says]


def test_the_metadata_is_shown_if_asked_for(peers):
    observation, _ = play_at(peers.urls["integer"], 0, [], show="metadata.size")
    assert observation.messages[0].text == "4"


def test_a_wrong_action_is_told_to_the_policy(peers):
    _, [step] = play_at(peers.urls["integer"], 0, ["two"])
    assert texts(step)[0].startswith("Error: move: Input should be a valid integer")
    assert step[1:4] == (None, False, False)
    _, [step, last] = play_at(peers.urls["pair"], 0, [("act", {"side": "left"}), TURNS["pair"][1][0]])
    assert texts(step) == ["Error: act: amount: Field required"]
    assert last[1:3] == (1.0, True)


def test_tools_are_those_that_the_server_lists_and_calls_are_steps(peers):
    taken = len(peers.logged("step"))
    turns = [("add", {"a": 2, "b": 3}), ("add", {"a": "x"}), ("no_such_tool", {}), ("answer", {"value": 0})]
    observation, steps = play_at(peers.urls["tools"], 1, turns)
    assert [tool.name for tool in observation.tools] == ["add", "answer"]
    assert observation.tools[0].description == "Add two numbers."
    assert observation.tools[0].parameters["required"] == ["a", "b"]
    assert [texts(step)[0][:30] for step in (steps[0], steps[3])] == ["5", "thank you"]
    assert texts(steps[1])[0].startswith("Error: ")
    assert "no tool 'no_such_tool'" in texts(steps[2])[0]
    assert [step[1] for step in steps] == [None, None, None, 0.0]
    assert len(peers.logged("step")) == taken + 3


def test_a_turn_without_a_call_ends_an_episode_with_tools_unfinished(peers):
    _, [step] = play_at(peers.urls["tools"], 0, ["I give up"])
    assert step[1:4] == (None, False, True)


def test_an_end_without_a_reward_is_no_reward(peers):
    async def main():
        async with envgym.spec(f"openenv:{peers.urls['silent']}") as spec:
            task = await task_of(spec)
            script = ScriptedEpisode(task, 0, script_of([act("anything")]))
            return await run_episode(spec, task, script.play, 60.0)

    episode = asyncio.run(main())
    assert (episode.outcome.status, episode.reward) == ("completed", None)
    _, [step] = play_at(peers.urls["silent"], 0, ["anything"])
    assert step[1:4] == (None, True, False)


def test_an_error_of_the_environment_fails_the_episode_or_is_read(peers):
    with pytest.raises(InvalidOutcome, match=r"step failed \(EXECUTION_ERROR\): the environment failed") as failure:
        play_at(peers.urls["text"], 0, ["fail"])
    assert failure.value.kind == "server_error"
    _, [step, after] = play_at(peers.urls["text"], 0, ["fail", "dogwood"], execution_error="observation")
    assert texts(step) == ["Error: the environment failed"]
    assert after[1] == 0.5  # the second turn


def test_rows_and_settings_are_arguments_of_reset(peers, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"level": 2, "question": "q"}) + "\n")
    data = {"path": str(tmp_path / "rows.jsonl"), "test_fraction": 0}
    play_at(peers.urls["text"], 5, [], data=data, reset={"level": 1, "mode": "hard"})
    assert peers.logged("reset")[-1] == [5, {"level": 2, "question": "q", "mode": "hard"}]


# -- sessions ---------------------------------------------------------------------------------------------


def test_three_hundred_episodes_leave_nothing_behind(running_peers):
    async def main(peers):
        async with envgym.spec(f"openenv:{peers.urls['text']}") as spec:
            await asyncio.gather(*(play(spec, seed, ["a", "b", "c"]) for seed in range(300)))
        await peers.until_closed()
        return asyncio.all_tasks()

    with running_peers(("text", 16)) as peers:
        assert len(asyncio.run(main(peers))) == 1
        assert len(peers.logged("step")) == 900
        assert len(set(map(str, peers.logged("reset")))) == 300


def test_a_full_server_is_waited_for(running_peers):
    async def main(url):
        async with envgym.spec(f"openenv:{url}") as spec:
            episodes = await asyncio.gather(*(play(spec, seed, ["a", "b", "c"]) for seed in range(8)))
        async with envgym.spec(f"openenv:{url}", wait=0.5) as spec, spec.make() as env:
            options = {"task": await task_of(spec)}
            await env.reset(options=options)
            with pytest.raises(InvalidOutcome) as failure:
                await spec.make().reset(options=options)
        return episodes, failure.value

    with running_peers(("text", 1)) as peers:
        episodes, failure = asyncio.run(main(peers.urls["text"]))
    assert [steps[-1][2] for _, steps in episodes] == [True] * 8
    assert (failure.kind, failure.retryable) == ("capacity", True)


def test_a_killed_server_fails_its_episodes_and_a_restarted_one_is_used(running_peers):
    async def main(peers):
        async with envgym.spec(f"openenv:{peers.urls['text']}", reconnect=5) as spec, spec.make() as env:
            options = {"task": await task_of(spec)}
            await env.reset(options=options)
            peers.kill()
            await asyncio.to_thread(peers.start)
            with pytest.raises(InvalidOutcome) as forgotten:
                await env.step(act("a"))
            _, steps = await play(spec, 0, ["a", "b", "c"])
            await env.close()
            await env.reset(options=options)
            peers.kill()
            await asyncio.wait([env.unwrapped._session._next])
            with pytest.raises(InvalidOutcome) as lost:
                await env.step(act("a"))
        return forgotten.value, lost.value, steps

    with running_peers(("text", 4)) as peers:
        forgotten, lost, steps = asyncio.run(main(peers))
    assert (forgotten.kind, lost.kind) == ("session_lost", "connection")
    assert forgotten.retryable
    assert lost.retryable
    assert steps[-1][2]


def test_a_frozen_server_is_a_timeout(running_peers):
    async def main(peers):
        async with envgym.spec(f"openenv:{peers.urls['text']}", call_timeout=1.5) as spec, spec.make() as env:
            await env.reset(options={"task": await task_of(spec)})
            peers.process.send_signal(signal.SIGSTOP)
            with pytest.raises(CallTimeout):
                await env.step(act("a"))
            peers.process.send_signal(signal.SIGCONT)
            observation, _ = await env.reset(options={"task": await task_of(spec)})  # not the late answer to the step
            assert observation.messages[0].text == "Say dogwood."
        await peers.until_closed()
        return asyncio.all_tasks()

    with running_peers(("text", 4)) as peers:
        assert len(asyncio.run(main(peers))) == 1


# -- connections that drop ----------------------------------------------------------------------------------


def test_a_step_whose_answer_was_lost_is_not_taken_again(peers, proxy):
    async def main():
        async with proxy(port_of(peers, "text")) as cutting, env_at(cutting.url) as (spec, env):
            await env.reset(options={"task": await task_of(spec)})
            taken = len(peers.logged("step"))
            cutting.cut_answers = True
            with pytest.raises(InvalidOutcome) as failure:
                await env.step(act("a"))
            return failure.value, len(peers.logged("step")) - taken

    failure, taken = asyncio.run(main())
    assert (failure.kind, failure.retryable, taken) == ("session_lost", True, 1)


def test_a_session_outlives_its_socket(peers, proxy):
    async def main():
        async with proxy(port_of(peers, "text")) as cutting, env_at(cutting.url) as (spec, env):
            await env.reset(options={"task": await task_of(spec)})
            turns = []
            for said in ("a", "b", "c"):
                cutting.cut()
                await asyncio.wait([env.unwrapped._session._next])
                turns.append(await env.step(act(said)))
            return turns, cutting.connections

    turns, connections = asyncio.run(main())
    assert [turn[4]["metrics"]["turn"] for turn in turns] == [1.0, 2.0, 3.0]
    assert turns[-1][2]
    assert connections > 3


def test_a_server_without_ids_ends_a_session_with_its_socket(running_peers, proxy):
    """OpenEnv's older servers, which have no `openenv/session/create`."""

    def older(data):
        return data.replace(b"POST /mcp ", b"POST /old ")

    async def main(peers):
        async with proxy(port_of(peers, "text"), older) as cutting, env_at(cutting.url, wait=20) as (spec, env):
            episodes = await asyncio.gather(*(play(spec, seed, ["a", "b", "c"]) for seed in range(4)))
            await env.reset(options={"task": await task_of(spec)})
            cutting.cut()
            with pytest.raises(InvalidOutcome) as failure:
                await env.step(act("a"))
            await env.reset(options={"task": await task_of(spec)})  # in a new session
        await peers.until_closed()
        return episodes, failure.value

    with running_peers(("text", 1)) as peers:
        episodes, failure = asyncio.run(main(peers))
    assert [steps[-1][2] for _, steps in episodes] == [True] * 4
    assert failure.kind == "session_lost"


def port_of(peers, name):
    return int(peers.urls[name].rpartition(":")[2])


# -- at the command line ------------------------------------------------------------------------------------


def test_a_name_stands_for_the_address(peers, run, documented):
    """Also in suites and mixtures, which take names."""
    url = peers.urls["text"]
    added = run(*documented("envs add", {"http://127.0.0.1:8000": url}))
    assert (added.returncode, added.stdout.splitlines()[0]) == (0, "words: Text environment")
    shown = run("envs", "show", "words").stdout
    assert shown.startswith(f"openenv:{url}  Text environment\n")
    assert "user: Say " in shown
    assert f"remote: openenv:{url}" in run("envs", "list").stdout
    two = run("envs", "add", "two", f"openenv:{url}", f"openenv:{url}", "--project")
    assert two.returncode == 2


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9 cannot be reached (connection refused)"),
        ("127.0.0.1:9", "127.0.0.1:9: not a usable URL"),
        ("{url}/nothing", "/nothing/schema answers 404; is it an OpenEnv server?"),
    ],
)
def test_an_address_without_a_server_is_one_line(peers, run, url, says):
    tried = run("envs", "show", f"openenv:{url.format(url=peers.urls['text'])}")
    assert (tried.returncode, tried.stderr.count("\n")) == (2, 1)
    assert says in tried.stderr


def test_an_environment_that_cannot_be_made_is_the_servers_matter(run, serving):
    async def main(request):
        from aiohttp import web

        return web.Response(status=500)

    async def tried():
        async with serving(main) as url:
            return await asyncio.to_thread(run, "envs", "show", f"openenv:{url}")

    failed = asyncio.run(tried())
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)
    assert "/schema answers 500; its log says why" in failed.stderr


def test_a_wrong_token_is_one_line(run, serving, tmp_path):
    async def main(request):
        from aiohttp import web

        is_known = request.headers.get("Authorization") == "Bearer 0123456789abcdef"
        return web.json_response({"action": {}}, status=200 if is_known else 401)

    async def tried(token):
        (tmp_path / "token").write_text(token)
        (tmp_path / "token").chmod(0o600)
        async with serving(main) as url:
            return await asyncio.to_thread(
                run, "envs", "show", f"openenv:{url}", f"env.token_file={tmp_path / 'token'}"
            )

    refused = asyncio.run(tried("another-token-of-16"))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "answers 401; set env.token_file to the file with its token" in refused.stderr
    assert "does not describe actions" in asyncio.run(tried("0123456789abcdef")).stderr


def test_every_check_passes(peers, run):
    checked = run("envs", "check", f"openenv:{peers.urls['text']}")
    assert checked.returncode == 0, checked.stdout
    assert "server " in checked.stdout  # its description is in the fingerprints


# -- trained on ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_policy_is_trained_over_a_socket_that_is_cut_at_random(running_peers, proxy, documented, tmp_path):
    """Three steps of the page's command. No step of an episode is taken twice, and what was lost is retried."""
    settings = (
        "engine.kind=transformers", "steps=3", "rollout.tasks_per_step=4", "rollout.group_size=4",
        "rollout.max_tokens=24", "eval.every=0", "checkpoint.every=0", "--name", "short",
    )  # fmt: skip

    async def main(peers):
        has_sessions = asyncio.Event()

        def watch(data):
            if data.startswith(b"GET /ws"):
                has_sessions.set()
            return data

        async with proxy(port_of(peers, "text"), watch) as cutting:
            words = documented("train", {"http://127.0.0.1:8000": cutting.url, "path/or/hub-id": "starter"})
            program = (Path(sys.executable).with_name("envgym"), *words, *settings)
            with (tmp_path / "out").open("wb") as out:
                process = await asyncio.create_subprocess_exec(*program, cwd=tmp_path, stdout=out, stderr=out)
            ending = asyncio.create_task(process.wait())
            await asyncio.wait([ending, asyncio.create_task(has_sessions.wait())], return_when="FIRST_COMPLETED")
            n_cuts = 0
            while not (await asyncio.wait([ending], timeout=0.1))[0]:
                cutting.cut(0.1)
                n_cuts += 1
            return ending.result(), n_cuts

    with running_peers(("text", 32)) as peers:
        status, n_cuts = asyncio.run(main(peers))
        lines = [json.loads(line) for line in peers.log.read_text().splitlines()]
    assert status == 0, (tmp_path / "out").read_text()[-3000:]
    summary = json.loads((tmp_path / "runs" / "short" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 3)
    assert set(summary["failures"]) <= {"session_lost"}
    assert n_cuts > 5
    steps = [episode for kind, episode, _ in lines if kind == "step"]
    assert max(map(steps.count, set(steps))) == 3


def test_nothing_of_openenv_is_imported():
    code = "import sys, envgym, envgym.envs.openenv, envgym.envs.openenv.serve; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert {"openenv", "fastmcp", "websockets", "fastapi", "mcp"}.isdisjoint(name.split(".")[0] for name in modules)
