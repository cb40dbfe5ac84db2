"""Agent servers of the real NeMo-Gym play, and the policy behind them is ours."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web

from envgym import Env, EnvSpec
from envgym.engine import Generation, SamplingParams
from envgym.envs.nemo_gym.agent import NeMoGym, NeMoGymConfig
from envgym.envs.nemo_gym.protocol import url_of
from envgym.errors import InvalidOutcome, WorkerError
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.transcript import EpisodeSampler
from envgym.types import StopReason, Task, VersionSpan

ENVGYM = Path(sys.executable).with_name("envgym")
ROWS = EnvSpec("Rows-v0")
ROWS.spec = ROWS  # the agent steps no environment
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def renderer(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = TEMPLATE
    return make_renderer("chat", tokenizer)


class Scripted:
    """An engine that says what a function of the prompt tells."""

    def __init__(self, renderer, say):
        self.tokenizer, self.say = renderer.tokenizer, say

    async def generate(self, request):
        text = self.say(self.tokenizer.decode(list(request.token_ids)))
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)
        cut = len(ids) > request.sampling.max_tokens
        ids = ids[: request.sampling.max_tokens]
        stop = StopReason.LENGTH if cut else StopReason.STOP
        return Generation(ids, tuple(-0.5 - 0.001 * t for t in ids), stop, (VersionSpan(0, 0, len(ids)),))


class Rows(Env):
    """Gives rows, and is not stepped."""

    async def reset(self, *, seed=None, options=None):
        raise AssertionError

    async def step(self, action):
        raise AssertionError


def play(renderer, engine, rows, *, size=1, context=4096, max_tokens=200, **settings):
    runner = Runner(
        EnvSpec("Rows-v0", Rows),
        NeMoGym(renderer, NeMoGymConfig(**settings)),
        engine,
        RolloutConfig(retries=0, refills=0),
        max_model_len=context,
        seed=0,
        deterministic=False,
    )
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=renderer.stop_token_ids)
    tasks = [Task(f"row-{number}", fields=row) for number, row in enumerate(rows)]
    groups = asyncio.run(runner.roll_out(tasks, SamplingPlan("p", sampling, size)))
    return [episode for group in groups for episode in group.episodes]


@pytest.fixture(scope="module")
def servers(nemo_gym, free_ports, server_entry, agent_entry, tmp_path_factory):
    """A head server, resources servers, agent servers and a model server of theirs; our policy where they look for it.
    Gives the head server's URL."""
    head, counter, simple, black, gym, plain, on_plain, training, on_training, policy = ports = free_ports(10)
    run = {"entrypoint": "app.py"}
    # The package's own files say so; the head server tells of the config as it was written.
    proxy = {**run, "base_url": "${policy_base_url}", "api_key": "none", "model": "policy"}
    plainly = {"return_token_id_information": False, "uses_reasoning_parser": False}
    with_tokens = {"return_token_id_information": True, "uses_reasoning_parser": True}
    config = {
        "run_head_server": True,
        "head_server": {"host": "127.0.0.1", "port": head},
        "policy_base_url": f"http://127.0.0.1:{policy}/v1",
        "counter": server_entry("resources_servers", "example_session_state_mgmt", counter, domain="agent", **run),
        "counter_agent": agent_entry("simple_agent", simple, "counter"),
        "blackjack": server_entry("resources_servers", "blackjack", black, domain="games", **run),
        "blackjack_agent": agent_entry("gymnasium_agent", gym, "blackjack", max_steps=12),
        "policy_model": server_entry("responses_api_models", "envgym", policy),
        "proxied_agent": agent_entry("simple_agent", on_plain, "counter", model="proxy"),
        "proxy": server_entry("responses_api_models", "vllm_model", plain, **proxy, **plainly),
        "training_agent": agent_entry("simple_agent", on_training, "counter", model="training_proxy"),
        "training_proxy": server_entry("responses_api_models", "vllm_model", training, **proxy, **with_tokens),
    }
    with nemo_gym.running(tmp_path_factory.mktemp("nemo_gym"), config, ports[:-1]):
        yield f"http://127.0.0.1:{head}"


def counting(start, *counts):
    tools = [
        {"type": "function", "name": name, "description": "", "strict": True, "parameters": parameters}
        for name, parameters in {
            "increment_counter": {
                "type": "object",
                "properties": {"count": {"type": "integer"}},
                "required": ["count"],
                "additionalProperties": False,
            },
            "get_counter_value": {"type": "object", "properties": {}, "additionalProperties": False},
        }.items()
    ]
    question = f"add {' then add '.join(map(str, counts))} then get the count"
    return {
        "responses_create_params": {"input": [{"role": "user", "content": question}], "tools": tools},
        "initial_count": start,
        "expected_count": start + sum(counts),
        "agent_ref": {"type": "responses_api_agents", "name": "counter_agent"},
    }


def counts(prompt):
    """A policy that does as it is told: one call a turn, then both of what is left at once."""
    question = prompt.partition("add ")[2].partition(" then get")[0]
    wanted = [int(number) for number in question.split(" then add ")]
    done = prompt.count('"success":true')
    if done == 0:
        return f"First {wanted[0]}." + call("increment_counter", count=wanted[0])
    if done < len(wanted):
        rest = "".join(call("increment_counter", count=number) for number in wanted[done:])
        return rest
    if '"count":' not in prompt.rpartition('"success":true')[2]:
        return call("get_counter_value")
    return "That is all."


def test_their_simple_agent_plays_one_contiguous_chain_of_our_tokens(servers, renderer, recording, check_episode):
    engine = recording(Scripted(renderer, counts))
    rows = [counting(3, 1, 2), counting(6, 4, 5, 7)]
    episodes = play(renderer, engine, rows, size=4, head=servers)
    for episode in episodes:
        assert not episode.failed, episode.outcome
        check_episode(episode, engine.answers)
        [row] = episode.rows
        assert [turn.reward for turn in row.turns] == [None, None, None, 1.0]
        assert (episode.reward, episode.score, episode.metrics["calls"]) == (1.0, 1.0, 4.0)
    assert len(episodes) == 8
    assert len(engine.answers) == 8 * 4


def test_their_launcher_takes_the_pages_entry_of_the_policy(nemo_gym, server_entry, agent_entry, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "reference" / "nemo_gym.md").read_text()
    [entry] = re.findall(r"^```yaml\n(policy_model:.*?)^```$", page, re.MULTILINE | re.DOTALL)
    resources = server_entry("resources_servers", "blackjack", 21001, domain="games", entrypoint="app.py")
    config = {"game": resources, "player": agent_entry("gymnasium_agent", 21002, "game")}
    path = tmp_path / "config.yaml"
    path.write_text(entry + yaml.safe_dump(config))
    assert nemo_gym.launch(path) == (["game", "player"], {"policy_model": 21090, "game": 21001, "player": 21002})


@pytest.mark.parametrize("thoughts", ["", "<think>\nOne by one.\n</think>\n\n"])
@pytest.mark.parametrize("agent", ["proxied_agent", "training_agent"])
def test_their_vllm_model_may_stand_between(servers, renderer, recording, check_episode, agent, thoughts):
    """It asks in chat completions at its `base_url`, and hands the metadata on. Configured for training it wants the
    tokens of each call, and the answer to /run has them; and it takes thoughts out of the text."""
    engine = recording(Scripted(renderer, lambda prompt: thoughts + counts(prompt)))
    episodes = play(renderer, engine, [counting(3, 1, 2)], size=2, head=servers, server=agent)
    for episode in episodes:
        assert not episode.failed, episode.outcome
        check_episode(episode, engine.answers)
        assert (len(episode.rows), episode.reward, episode.metrics["calls"]) == (1, 1.0, 4.0)


def test_their_gymnasium_agent_plays_one_contiguous_chain(servers, renderer, recording, check_episode):
    row = {
        "responses_create_params": {"input": [{"role": "system", "content": "Blackjack."}]},
        "agent_ref": {"name": "blackjack_agent"},
    }
    engine = recording(
        Scripted(renderer, lambda prompt: f"<action>{'hit' if prompt.count('hit') < 2 else 'stand'}</action>")
    )
    episodes = play(renderer, engine, [row], size=8, head=servers)
    for episode in episodes:
        assert not episode.failed, episode.outcome
        check_episode(episode, engine.answers)
        assert len(episode.rows) == 1
        assert episode.reward in (-1.0, 0.0, 1.0, 1.5)
        assert episode.metrics["terminated"] == 1.0


def test_a_context_that_is_full_truncates_the_episode(servers, renderer):
    def endless(prompt):
        return call("increment_counter", count=1)

    [episode] = play(renderer, Scripted(renderer, endless), [counting(0, 1)], context=400, head=servers)
    assert (episode.outcome.status, episode.outcome.reason) == ("truncated", "context")
    assert episode.reward == 0.0  # what their server verified
    assert len(episode.rows[0].token_ids) <= 400


def test_a_turn_that_is_cut_truncates_the_episode(servers, renderer):
    [episode] = play(renderer, Scripted(renderer, lambda _: "long " * 50), [counting(0, 1)], max_tokens=8, head=servers)
    assert (episode.outcome.status, episode.outcome.reason, episode.reward) == ("truncated", "length", 0.0)


def test_a_first_prompt_that_does_not_fit_is_said_to_be_the_cause(servers, renderer):
    [episode] = play(renderer, Scripted(renderer, counts), [counting(0, 1)], context=20, head=servers)
    assert (episode.outcome.reason, episode.reward) == ("prompt_too_long", None)


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({"no": "row"}, {}, "no 'responses_create_params'"),
        (counting(0, 1) | {"agent_ref": None}, {}, "set agent.server"),
        (counting(0, 1), {"server": "counter"}, "it has blackjack_agent, counter_agent, proxied"),
        (counting(0, 1) | {"initial_count": "none"}, {}, "/run answers with 500"),
        (counting(0, 1), {"head": "http://127.0.0.1:9"}, "cannot be reached"),
        (counting(0, 1), {"listen": "192.0.2.1:80"}, "the policy cannot be served at 192.0.2.1:80"),
        (counting(0, 1), {"timeout": 0.5}, "longer than 0.5 s"),
    ],
)
def test_what_goes_wrong_is_a_failed_episode(servers, renderer, row, settings, says):
    class Slow(Scripted):
        async def generate(self, request):
            await asyncio.sleep(2 if "timeout" in settings else 0)
            return await super().generate(request)

    [episode] = play(renderer, Slow(renderer, counts), [row], **{"head": servers, **settings})
    assert (episode.outcome.reason, episode.reward, episode.rows) == ("agent", None, [])
    assert says in episode.outcome.message


@pytest.fixture
def own_agent(renderer, serving, free_ports):
    """`own_agent(answer)`: the episode of a row that an agent server of our own has played, head server and all.
    `answer(row, ask)` is its /run; `ask(items)` asks the policy for a turn, and gives the status and the answer."""
    [policy] = free_ports(1)
    own = {"host": "127.0.0.1", "model_server": {"name": "policy_model"}}
    config = {
        "an_agent": {"responses_api_agents": {"own": own}},
        "policy_model": {"responses_api_models": {"own": {"host": "127.0.0.1", "port": policy}}},
    }

    def own_agent(answer, engine=None, then=None):
        async def server(request):
            if request.path == "/global_config_dict_yaml":
                return web.json_response(json.dumps(config))
            row = await request.json()

            async def ask(items):
                body = row["responses_create_params"] | {"input": items}
                url = f"http://127.0.0.1:{policy}/v1/responses"
                async with aiohttp.ClientSession() as client, client.post(url, json=body) as answered:
                    return answered.status, await answered.json() if answered.status != 500 else None

            answered = await answer(row, ask)
            return answered if isinstance(answered, web.Response) else web.json_response(answered)

        async def main():
            async with serving(server) as url:
                own["port"] = int(url.rpartition(":")[2])
                agent = NeMoGym(renderer, NeMoGymConfig(head=url, server="an_agent"))
                chosen = engine or Scripted(renderer, lambda _: "yes")
                sampler = EpisodeSampler(chosen, "e", SamplingParams(max_tokens=8), 512)
                task = Task("t", fields=counting(0, 1))
                if then is not None:
                    return await then(agent, task, sampler, own)
                return await agent.run(ROWS, task, sampler, seed=0)

        return asyncio.run(main())

    return own_agent


def user(*texts):
    return [{"role": "user", "content": text} for text in texts]


def test_what_an_agent_server_may_answer(own_agent):
    """Among it calls that are not one sequence, which none of NeMo-Gym's servers that are run here makes."""

    async def answer(row, ask):
        output = []
        for question in asks:
            status, answered = await ask(user(*question))
            assert status == 200, answered
            output += answered["output"]
        if changed:
            output[0]["generation_token_ids"][0] += 1
        return {**row, "response": {"output": output}, "reward": 1.0, "steps": 3, **more}

    def main():
        return own_agent(answer)

    def fails(kind, says):
        with pytest.raises(InvalidOutcome, match=says) as raised:
            main()
        assert raised.value.kind == kind

    asks, changed, more = [["a"], ["b"]], False, {}
    fails("not_contiguous", r"2 sequences \(1 \+ 1 calls\)")
    asks, changed = [["a"]], True
    fails("not_contiguous", "not those that we sampled")
    changed = False
    episode = main()
    assert (episode.reward, episode.metrics) == (1.0, {"calls": 1.0, "steps": 3.0})
    more = {"truncated": True}
    assert main().outcome.reason == "environment"
    more = {"mask_sample": False, "failure_kind": "a remark"}
    assert main().metrics == {"calls": 1.0, "steps": 3.0}
    for answers, kind, says in (
        ({"_ng_failure_class": "transient", "error_message": "out of luck"}, "agent", "out of luck"),
        ({"mask_sample": True, "failure_kind": "judge_failed"}, "judge_failed", "invalid"),
        ({"mask_sample": True, "failure_kind": "mine:no disk", "failure_reason": "full"}, "mine_no_disk", "full"),
        ({"reward": 0.0, "failure_kind": "judge_failed"}, "judge_failed", "invalid"),
        ({"reward": 10**400}, "agent", "as reward"),
        ({"reward": None}, "agent", "None as reward"),
        ({"reward": float("nan")}, "agent", "nan as reward"),
    ):
        more = answers
        fails(kind, says)
    asks, more = [], {}
    fails("agent", "made no call to the policy")


def test_brackets_without_end_are_no_answer(own_agent):
    async def answer(row, ask):
        return web.Response(text="[" * 100_000)

    with pytest.raises(InvalidOutcome, match="no JSON object"):
        own_agent(answer)


class Halting(Scripted):
    """Says yes, but does something else before at one of its turns."""

    def __init__(self, renderer, turn, instead):
        super().__init__(renderer, lambda _: "yes")
        self.turns, self.turn, self.instead = 0, turn, instead

    async def generate(self, request):
        self.turns += 1
        if self.turns == self.turn:
            await self.instead()
        return await super().generate(request)


@pytest.mark.parametrize(("error", "status"), [(WorkerError, 400), (RuntimeError, 500)])
def test_what_a_server_makes_of_an_engine_that_broke_is_no_reward(own_agent, renderer, error, status):
    """Unless it asked again, and was answered."""

    async def breaks():
        raise error("the engine broke")

    async def answer(row, ask):
        statuses = [(await ask(user("a")))[0] for _ in range(2)]
        assert statuses == [status if turn == broken else 200 for turn in (1, 2)]
        return {**row, "response": {"output": []}, "reward": 0.0}

    broken = 1
    assert own_agent(answer, Halting(renderer, broken, breaks)).reward == 0.0
    broken = 2
    with pytest.raises(error, match="the engine broke"):
        own_agent(answer, Halting(renderer, broken, breaks))


def test_an_episode_that_is_over_does_not_grow(own_agent, renderer):
    """Of a call that nobody waited for nothing is recorded, though other episodes keep the endpoint open."""
    late, ended = [], []
    begun, sampling, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow():
        sampling.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def answer(row, ask):
        _, first = await ask(user("a"))
        if row["number"] == 1:
            late.append(asyncio.ensure_future(ask([*user("a"), *first["output"], *user("b")])))
            await sampling.wait()
        else:
            begun.set()
            await over.wait()
        return {**row, "response": {"output": first["output"]}, "reward": 1.0}

    async def both(agent, task, sampler, own):
        tasks = [Task("t", fields={**task.fields, "number": number}) for number in (0, 1)]
        other = asyncio.ensure_future(agent.run(ROWS, tasks[0], sampler, seed=0))
        await begun.wait()
        engine = EpisodeSampler(Halting(renderer, 2, slow), "late", SamplingParams(max_tokens=8), 512)
        episode = await agent.run(ROWS, tasks[1], engine, seed=0)
        turns = [len(row.turns) for row in episode.rows]
        async with asyncio.timeout(10):
            status, said = await late[0]
        assert (turns, ended) == ([1], [True])
        over.set()
        await other
        assert [len(row.turns) for row in episode.rows] == [1]
        return status, said

    status, said = own_agent(answer, then=both)
    assert status == 401
    assert "has ended" in said["error"]["message"]


def test_servers_that_came_back_elsewhere_are_found_again(own_agent):
    async def answer(row, ask):
        _, first = await ask(user("a"))
        return {**row, "response": {"output": first["output"]}, "reward": 1.0}

    async def moved(agent, task, sampler, own):
        port, own["port"] = own["port"], 9
        with pytest.raises(InvalidOutcome, match="cannot be reached") as failure:
            await agent.run(ROWS, task, sampler, seed=0)
        assert failure.value.retryable
        own["port"] = port
        return await agent.run(ROWS, task, sampler, seed=0)

    assert own_agent(answer, then=moved).reward == 1.0


def test_a_server_that_listens_everywhere_is_where_its_head_server_is():
    for host, url in (("0.0.0.0", "http://10.1.2.3:80"), ("::1", "http://[::1]:80"), ("b", "http://b:80")):
        assert url_of(host, 80, "http://10.1.2.3:11000") == url


@pytest.mark.slow
def test_a_policy_is_trained_that_their_simple_agent_plays(servers, tiny_model, tmp_path, documented):
    rows = [counting(start, 1) | {"expected_count": start} for start in range(8)]  # right where nothing is called
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = {"http://127.0.0.1:11000": servers, "my_server": "counter", "my_agent": "counter_agent"}
    words = documented("agent=nemo_gym")
    for word, real in {**shown, "path/or/hub-id": str(tiny_model)}.items():
        words = [given.replace(word, real) for given in words]
    words += [
        "data.test_fraction=0",
        "--name",
        "simple",
        "engine.kind=transformers",
        "steps=2",
        "rollout.tasks_per_step=2",
    ]
    words += ["rollout.group_size=4", "rollout.max_tokens=24", "eval.every=0"]
    done = subprocess.run([ENVGYM, *words], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    summary = json.loads((tmp_path / "runs" / "simple" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["failures"]) == ("completed", 2, {})
    assert summary["tokens"]["trained"] > 0
    assert summary["mismatch"]["max_abs_logprob"] < 1e-3  # the very tokens that were sampled
