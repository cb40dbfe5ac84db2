"""Agents for OpenRLHF: as documents show them, and in every form that their interface has had."""

import re
import subprocess
import sys

import pytest

from envgym import registry
from envgym.types import Message, Status, StopReason

AGENT = """
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.steps = 0

    async def reset(self, states, **kwargs):
        return {{"observation": states["observation"]}}

    async def step(self, states, **kwargs):
        self.steps += 1
        {step}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
COUNTS = """return {
            "rewards": float(self.steps),
            "scores": self.steps / 3,
            "environment_feedback": f" -> {self.steps}; ",
            "done": self.steps == 3,
            "extra_logs": {"steps": self.steps},
        }"""


@pytest.fixture
def agent_file(write):
    """`agent_file(step)`: a file whose agent does `step`; `executor` replaces its executor."""

    def make(step=COUNTS, executor=None, name="agent_func.py"):
        text = AGENT.format(step=step)
        if executor is not None:
            text = text[: text.index("class AgentExecutor")] + executor
        return write(text, name)

    return make


def turns(episode):
    return [(turn.reward, turn.stop_reason) for row in episode.rows for turn in row.turns]


def text_of(renderer, episode):
    return renderer.tokenizer.decode(episode.rows[0].token_ids)


# -- as documents show them -------------------------------------------------------------------------------


def test_an_agent_of_three_turns(play, ok, shown, task, renderer):
    """Three turns, an asynchronous constructor, raw text as feedback, a reward at the end."""
    groups, engine = play(shown("agent_turns"), [task("Go.")], lambda member, turn: f"try {turn}")
    for episode in ok(groups, engine):
        assert (episode.outcome.status, episode.reward, episode.score) == (Status.COMPLETED, 1.0, 1.0)
        assert [reward for reward, _ in turns(episode)] == [0.0, 0.0, 1.0]
        assert episode.metrics == {"step": 3.0}
        turn = r"try %d<\|im_end\|>"
        feedback = r"\s+[^<>]*%d[^<>]*(?:</s>)?\s+Assistant: "
        pattern = "Go." + turn % 0 + feedback % 1 + turn % 1 + feedback % 2 + turn % 2
        assert re.fullmatch(pattern, text_of(renderer, episode))


def test_an_agent_that_draws_at_random(play, ok, shown, task):
    """One to three steps more, at random, and a random reward at the end."""
    groups, engine = play(shown("agent_random"), [task()], lambda member, turn: "hm", size=8)
    episodes = ok(groups, engine)
    assert {len(turns(episode)) for episode in episodes} <= {2, 3, 4}
    assert all(episode.reward == episode.score == episode.metrics["dummy_scores"] for episode in episodes)
    assert {episode.reward for episode in episodes} <= {0.0, 1.0}


def test_an_agent_with_the_older_constructor_and_an_execute_that_calls_super(play, ok, shown, task, renderer):
    groups, engine = play(
        shown("agent_execute"), [task()], lambda member, turn: "42" if turn == 5 and member else str(turn)
    )
    first, second = ok(groups, engine)
    assert [reward for reward, _ in turns(first)] == [0.0] * 6
    assert [reward for reward, _ in turns(second)] == [0.0] * 5 + [1.0]
    assert (first.score, second.score, second.metrics) == (0.0, 1.0, {"step": 6.0})
    assert second.outcome.status is Status.COMPLETED
    text = text_of(renderer, second)
    assert re.match(r"What is 40 \+ 2\?0<\|im_end\|>\s+Next[^<>]*(?:</s>)?\s+Assistant: 1<\|im_end\|>", text)
    assert [message.role for message in second.messages[:3]] == ["user", "assistant", "user"]


def test_an_agent_with_scores_beyond_one(play, ok, shown, task):
    answers = {
        0: ["no idea", "the answer is 41", "answer: 42"],
        1: ["x", "the answer is: 42"],
        2: ["= 1", "= 2", "= 3"],
    }
    groups, engine = play(shown("agent_math"), [task()], lambda member, turn: answers[member][turn], size=3)
    first, second, third = ok(groups, engine)
    assert [reward for reward, _ in turns(second)] == [0.0, 1.0]
    assert second.metrics == {"step": 2.0, "correct": 1.0, "attempts": 2.0, "invalid_scores": 1.0}
    assert (first.reward, third.reward) == (pytest.approx(-0.5), pytest.approx(-0.3))
    assert third.score == pytest.approx(0.2)
    # The file calls a score of 1.5 for a right answer one of [0, 1]; the one of the turn before it does not stand in.
    assert second.score == 1.0


# -- reset and step ------------------------------------------------------------------------------------------


def test_states_hold_all_text_so_far(play, ok, agent_file, task):
    step = """return {
            "rewards": 0.0, "environment_feedback": f"[{states['observation_text']}|{states['action_text']}]",
            "done": self.steps == 2 or states["label"] != "42",
        }"""
    groups, engine = play(agent_file(step), [task("P:")], lambda member, turn: f"a{turn}", size=1)
    [episode] = ok(groups, engine)
    said = [message.text for message in episode.messages]
    assert said == ["P:", "a0", "[P:|a0]", "a1", "[P:a0[P:|a0]|a1]"]
    assert episode.rows[0].segments[-1].role == "action", "the policy is not shown what is said at the end"


def test_an_observation_of_the_agents_own(play, ok, agent_file, task):
    file = agent_file()
    file.write_text(file.read_text().replace('states["observation"]}', '"Guess: " + states["observation"]}'))
    groups, engine = play(file, [task("P:")], "x", size=1)
    ok(groups, engine)
    assert engine.engine.prompts()[0] == "Guess: P:"


@pytest.mark.parametrize("prompt", ["P:", (Message("system", "Be brief."), Message("user", "P:"))])
def test_prompts_as_chat(play, ok, agent_file, task, prompt):
    groups, engine = play(agent_file(), [task(prompt)], "x", size=1, env={"chat": True})
    ok(groups, engine)
    first, second = engine.engine.prompts()[:2]
    assert first.endswith("<|im_start|>user\nP:<|im_end|>\n<|im_start|>assistant\n")
    assert second == first + "x<|im_end|> -> 1; "


def test_sampling_parameters_are_the_runs_and_may_be_changed(play, ok, agent_file, task):
    step = """params = states["sampling_params"]
        assert (params.max_tokens, params.temperature) == ((256, 0.8), (7, 0.5), (7, 0.5))[self.steps - 1]
        params.max_tokens = 7
        return {"rewards": 0.0, "environment_feedback": " ", "done": self.steps == 3,
                "sampling_params": {"max_tokens": 7, "temperature": 0.5} if 0 else params.__class__(7, 0.5)}"""
    groups, engine = play(agent_file(step), [task()], "x", sampling={"temperature": 0.8}, size=2)
    for episode in ok(groups, engine):
        assert [s.temperature for s in episode.rows[0].segments if s.role == "action"] == [0.8, 0.5, 0.5]
    used = [(r.sampling.max_tokens, r.sampling.temperature) for r in engine.engine.requests]
    assert sorted(set(used)) == [(7, 0.5), (256, 0.8)]
    assert all(request.sampling.stop_token_ids for request in engine.engine.requests)


@pytest.mark.parametrize("given", ["{'max_tokens': 2}", "type('P', (), {'max_tokens': 2, 'top_k': -1, 'stop': []})()"])
def test_sampling_parameters_of_any_kind(play, ok, agent_file, task, given):
    step = (
        f'return {{"rewards": 1.0, "environment_feedback": " ", "done": self.steps == 2, "sampling_params": {given}}}'
    )
    groups, engine = play(agent_file(step), [task()], "quite a long answer", size=1)
    [episode] = ok(groups, engine)
    assert [reason for _, reason in turns(episode)] == [StopReason.STOP, StopReason.LENGTH]
    assert (episode.outcome.status, episode.outcome.reason) == (Status.TRUNCATED, "length")


WRONG = {
    "return None": "step must return a dict",
    'return {"rewards": 1.0}': "step returned no 'done', only rewards",
    'return {"rewards": "1", "done": True}': "step returned the rewards '1'",
    'return {"rewards": float("nan"), "done": True}': "step returned the rewards nan",
    'return {"rewards": 0.0, "done": False}': "with the text 'environment_feedback'",
    'return {"rewards": 1.0, "environment_feedback": "", "done": False, "sampling_params": {"stop": ["END"]}}':
        "sampling parameter stop=['END'], which has no effect here",
}  # fmt: skip


def test_what_step_must_return(play, agent_file, task):
    step = """scope = {}
        exec(f"def it():\\n    {states['label']}", scope)  # does what the label says
        return scope["it"]()"""
    tasks = [task(answer=body, id=f"t{index}") for index, body in enumerate(WRONG)]
    groups, _ = play(agent_file(step), tasks, "x", size=1)
    for group, says in zip(groups, WRONG.values(), strict=True):
        [episode] = group.episodes
        assert (episode.outcome.status, episode.outcome.reason) == (Status.FAILED, "invalid_environment")
        assert says in episode.outcome.message


def test_plain_multi_turn_plays_it_as_well(play, ok, agent_file, task):
    groups, engine = play(agent_file(), [task()], "x", agent="multi_turn", agent_settings={"max_turns": 2})
    for episode in ok(groups, engine):
        assert (episode.reward, episode.outcome.reason) == (3.0, "turns")


def test_several_processes_share_the_episodes(play, ok, agent_file, task):
    step = """import os
        return {"rewards": 1.0, "environment_feedback": "", "done": True, "extra_logs": {"pid": os.getpid()}}"""
    groups, engine = play(agent_file(step), [task()], "x", size=6, env={"processes": 2})
    pids = [episode.metrics["pid"] for episode in ok(groups, engine)]
    assert sorted(pids.count(pid) for pid in set(pids)) == [3, 3]


def test_an_agent_that_is_nothing_but_an_instance(play, ok, agent_file, task):
    groups, engine = play(agent_file(executor=""), [task()], "x", size=1)
    assert ok(groups, engine)[0].reward == 6.0


# -- execute -------------------------------------------------------------------------------------------------

CUSTOM = """
class AgentExecutor(AgentExecutorBase):
    async def execute({signature}):
        {body}
"""
CURRENT = "self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None"
TWO_TURNS = """tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ranges = []
        for _ in range(2):
            said = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
            assert said.finish_reason == "stop"
            assert said.text == "word word word"
            assert len(said.logprobs) == len(said.token_ids)
            assert said.logprobs[0][said.token_ids[0]].logprob == -0.5
            ranges.append((len(tokens), len(tokens) + len(said.token_ids)))
            tokens = tokens + said.token_ids + hf_tokenizer(" and?", add_special_tokens=False)["input_ids"]
        return {"prompt": prompt, "label": label, "observation_tokens": tokens, "action_ranges": ranges,
                "rollout_log_probs": None, "reward": float(label), "scores": 0.25, "truncated": False,
                "extra_logs": {"turns": 2}}"""


@pytest.fixture
def custom(agent_file):
    return lambda body, signature=CURRENT: agent_file(executor=CUSTOM.format(signature=signature, body=body))


@pytest.mark.parametrize(
    "signature",
    [
        CURRENT,
        "self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine",
        "self, prompt, label, sampling_params, **kwargs",
        "self, text, answer, params, hf_tokenizer=None, llm_engine=None",
    ],
)
def test_an_execute_of_its_own(play, ok, custom, task, renderer, signature):
    body = TWO_TURNS
    if "kwargs" in signature:
        body = 'hf_tokenizer, llm_engine = kwargs["hf_tokenizer"], kwargs["llm_engine"]\n        ' + body
    if "text" in signature:
        body = "prompt, label, sampling_params = text, answer, params\n        " + body
    groups, engine = play(custom(body, signature), [task("Go:")], "word word word")
    for episode in ok(groups, engine):
        assert text_of(renderer, episode) == "Go:word word word<|im_end|> and?word word word<|im_end|>"
        assert (episode.outcome.status, episode.reward, episode.score) == (Status.COMPLETED, 42.0, 0.25)
        assert [reward for reward, _ in turns(episode)] == [None, 42.0]
        assert episode.metrics == {"turns": 2.0}


OLDER = """
class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    async def execute(self, prompt, label, sampling_params):
        assert self.max_length == 4096
        tokens = self.hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        {generate}
        action = output.outputs[0].token_ids
        await self.result_queue.put({{
            "prompt": prompt, "label": label, "observation_tokens": tokens + action,
            "action_ranges": [(len(tokens), len(tokens) + len(action))], "reward": 1.0, "scores": 1.0,
        }})
"""


@pytest.mark.parametrize(
    "generate",
    [
        "output = await self.generate(tokens, sampling_params)",
        'async for output in self.llm_engine.generate({"prompt_token_ids": tokens}, sampling_params, "id"): pass',
    ],
)
def test_an_execute_of_the_older_interface_that_hands_its_result_to_a_queue(play, ok, agent_file, task, generate):
    groups, engine = play(agent_file(executor=OLDER.format(generate=generate)), [task()], lambda m, t: f"x{m}", size=3)
    assert [episode.reward for episode in ok(groups, engine)] == [1.0] * 3


SINGLE = """
from openrlhf.utils.agent import SingleTurnAgentExecutor

class AgentExecutor(SingleTurnAgentExecutor):
    def __init__(self):
        super().__init__({rewards!r})
"""


def test_a_single_turn_executor_with_a_reward_file(play, ok, agent_file, task, tmp_path):
    rewards = tmp_path / "their_rewards.py"
    rewards.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    assert queries[0].startswith(prompts[0])\n"
        "    return {'rewards': [0.5 + ('yes' in queries[0])], 'extra_logs': {'length': [len(queries[0])]}}\n"
    )
    file = agent_file(executor=SINGLE.format(rewards=str(rewards)))
    groups, engine = play(file, [task()], lambda member, turn: "yes" if member else "no", size=2)
    assert [episode.reward for episode in ok(groups, engine)] == [0.5, 1.5]


def test_a_single_turn_executor_asks_no_server(play, agent_file, task):
    file = agent_file(executor=SINGLE.format(rewards="http://127.0.0.1:1/reward"))
    groups, _ = play(file, [task()], "x", size=1)
    assert "give a Python file with a reward_func" in groups[0].episodes[0].outcome.message


def test_an_execute_changes_what_super_returns(play, ok, agent_file, task):
    executor = """
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)

    async def execute(self, prompt, label, sampling_params, *args, **kwargs):
        result = await super().execute("Well: " + prompt, label, sampling_params, *args, **kwargs)
        return {**result, "reward": result["reward"] / 2, "extra_logs": {"halved": True}}
"""
    groups, engine = play(agent_file(executor=executor), [task("P:")], "x", size=1)
    [episode] = ok(groups, engine)
    assert engine.engine.prompts()[0] == "Well: P:"
    assert [reward for reward, _ in turns(episode)] == [None, None, 3.0], "the rewards by turn no longer add up"
    assert episode.metrics == {"halved": 1.0}


def test_executors_are_shared_and_their_state_too(play, ok, custom, task):
    body = """count = self.count = getattr(self, "count", 0) + 1
        out = (await llm_engine.generate([5, 6], sampling_params)).outputs[0]
        return {"reward": float(count)}"""
    groups, engine = play(custom(body), [task()], "x", size=3)
    assert sorted(episode.reward for episode in ok(groups, engine)) == [1.0, 2.0, 3.0]


def test_a_context_of_its_own_making_is_a_row_of_its_own(play, ok, custom, task):
    """Context that is compacted, or a sub-agent: what was sampled after other tokens is never patched together."""
    body = """a = (await llm_engine.generate([5, 6, 7], sampling_params)).outputs[0].token_ids
        b = (await llm_engine.generate([5, 6, 7, *a, 8], sampling_params)).outputs[0].token_ids
        c = (await llm_engine.generate([9, *b], sampling_params)).outputs[0].token_ids
        return {"reward": 1.0}"""
    groups, engine = play(custom(body), [task()], lambda member, turn: f"word {turn}", size=1)
    [episode] = ok(groups, engine)
    roles = [[segment.role for segment in row.segments] for row in episode.rows]
    assert roles == [["prompt", "action", "feedback", "action"], ["prompt", "action"]]


def test_only_what_is_declared_is_trained(play, custom, task):
    """Two drafts, of which one is taken: the other is sampled, but not what the episode did."""
    body = """drafts = [(await llm_engine.generate([5, 6, 7], sampling_params)).outputs[0].token_ids for _ in range(2)]
        cut = drafts[1][:2]
        return {"reward": 1.0, "observation_tokens": [5, 6, 7, *cut, 9], "action_ranges": [(3, 5)]}"""
    groups, _ = play(custom(body), [task()], lambda member, turn: f"draft number {turn}", size=1)
    [episode] = groups[0].episodes
    [row] = episode.rows
    action = row.segments[1]
    assert list(action.loss_weights) == [1.0, 1.0] + [0.0] * (len(action.token_ids) - 2)
    assert episode.reward == 1.0


UNTRAINABLE = {
    "return {'reward': 1.0}": "execute sampled nothing",
    "return 1.0": "execute must return a dict with 'reward'",
    "raise RuntimeError('lost')": "RuntimeError: lost",
    "await llm_engine.generate('text', sampling_params)": "token ids, not text",
    "x = await llm_engine.generate([5], sampling_params)\n"
    "    return {'reward': 1.0, 'observation_tokens': [5, 1, 2, 3], 'action_ranges': [(1, 4)]}":
        "action_ranges[0] = (1, 4), which is not what was sampled",
    "x = (await llm_engine.generate([5], sampling_params)).outputs[0].token_ids\n"
    "    return {'reward': 1.0, 'observation_tokens': [6, *x], 'action_ranges': [(1, 1 + len(x))]}":
        "which is not what was sampled",
}  # fmt: skip


def test_an_execute_that_cannot_be_trained_on_fails(play, custom, task):
    body = """scope = {"llm_engine": llm_engine, "sampling_params": sampling_params}
        exec("async def it():\\n    " + label, scope)  # does what the label says
        return await scope["it"]()"""
    tasks = [task(answer=body, id=f"t{index}") for index, body in enumerate(UNTRAINABLE)]
    groups, _ = play(custom(body), tasks, "word word", size=1)
    for group, says in zip(groups, UNTRAINABLE.values(), strict=True):
        [episode] = group.episodes
        assert episode.outcome.status is Status.FAILED
        assert says in episode.outcome.message


@pytest.mark.parametrize("expects", [True, False])
def test_a_full_context_truncates(play, ok, custom, task, expects):
    body = """tokens, paid = [5, 6, 7], 0.0
        while True:
            try:
                out = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
            except ValueError:
                if EXPECTS:
                    return {"reward": paid}
                raise
            tokens, paid = tokens + out.token_ids, paid + 1.0""".replace("EXPECTS", str(expects))
    groups, engine = play(custom(body), [task()], "word word word", size=1, context=32)
    [episode] = ok(groups, engine)
    assert (episode.outcome.status, episode.outcome.reason) == (Status.TRUNCATED, "context")
    assert (episode.reward is not None) == expects


def test_another_agent_leaves_an_execute_out(play, ok, custom, task):
    """So that the environment can be tried and checked; with nothing but an `execute` there is nothing to play."""
    file = custom(TWO_TURNS)
    groups, engine = play(file, [task()], "x", agent="multi_turn", size=1)
    assert ok(groups, engine)[0].reward == 6.0
    text = file.read_text()
    file.write_text("from openrlhf.utils.agent import *\n" + text[text.index("class AgentExecutor") :])
    groups, engine = play(file, [task()], "x", agent="multi_turn", size=1)
    assert "no AgentInstance: its execute is run by agent=openrlhf_executor" in groups[0].episodes[0].outcome.message


ASKS_ELSEWHERE = """
import asyncio, threading
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        async def sampled():
            return (await llm_engine.generate([5, 6, 7], sampling_params)).outputs[0].token_ids

        try:
            await {where}(lambda: asyncio.run(sampled()))
        except RuntimeError:
            raise ValueError("500 Internal Server Error") from None  # as a server of the file's own would put it
        return {{"reward": 1.0}}
"""
A_THREAD = "asyncio.get_running_loop().run_in_executor"


def test_an_execute_may_ask_from_a_thread_that_the_context_is_carried_to(play, ok, write, task):
    groups, engine = play(write(ASKS_ELSEWHERE.format(where="asyncio.to_thread")), [task()], "word", size=2)
    assert [episode.reward for episode in ok(groups, engine)] == [1.0, 1.0]


def test_an_execute_that_asks_where_its_episode_is_not_known_is_told_so(play, write, task):
    """As a server of the file's own does: that the file passes on no more than a number is no matter."""
    file = write(ASKS_ELSEWHERE.format(where=f"({A_THREAD})").replace("run_in_executor)(", "run_in_executor)(None, "))
    groups, _ = play(file, [task()], "word", size=1)
    [episode] = groups[0].episodes
    assert episode.failed
    assert "outside its episode's context" in episode.outcome.message
    assert "agent=external" in episode.outcome.message


# -- standing in ---------------------------------------------------------------------------------------------


def test_an_installed_openrlhf_is_not_shadowed(play, ok, agent_file, task, tmp_path, monkeypatch):
    """The real base classes are used, whose loop is their own; ours lacks modules that theirs has."""
    package = tmp_path / "site" / "openrlhf" / "utils"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "agent.py").write_text(
        "class AgentInstanceBase: real = 1\n"
        "class AgentExecutorBase:\n    async def execute(self): ...\n"
        "class MultiTurnAgentExecutor(AgentExecutorBase):\n"
        "    def __init__(self, cls): self.agent_instance_cls = cls\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    step = 'return {"rewards": float(self.real), "environment_feedback": "", "done": True}'
    groups, engine = play(agent_file(step), [task()], "x", size=1)
    assert ok(groups, engine)[0].reward == 1.0
    missing = agent_file(step, name="missing.py")
    missing.write_text("import openrlhf.utils.logging_utils\n" + missing.read_text())
    with pytest.raises(Exception, match=r"No module named 'openrlhf\.utils\.logging_utils'"):
        play(missing, [task()], "x", size=1)


def test_nothing_stands_in_where_no_such_file_is_imported():
    code = "import importlib.util, envgym.envs.openrlhf.package\nprint(importlib.util.find_spec('openrlhf'))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "None"


def test_a_named_executor_and_the_spec_as_json(play, ok, agent_file, task):
    executor = """
class Own(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
    file = agent_file(executor=executor)
    groups, engine = play(f"{file}:Own", [task()], "x", size=1)
    assert ok(groups, engine)[0].reward == 6.0
    spec = registry.spec(f"{file}:Own", chat=True)
    assert registry.spec_from_json(spec.to_json()) == spec
