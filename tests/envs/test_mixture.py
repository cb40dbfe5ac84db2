"""The mixture: whose task comes when, who plays it, and what each member keeps of its own."""

import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envgym
from envgym.agent import Agent, AgentConfig
from envgym.config.resolve import resolve
from envgym.config.words import parse_overrides
from envgym.engine import SamplingParams
from envgym.env import EnvConfig, EnvSpec, TaskList
from envgym.errors import ConfigError, DataError, EnvgymError, NameNotFound, ResetNeeded
from envgym.evaluation.result import result_of
from envgym.monitoring.metrics import rollout_metrics
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.types import Action, Episode, Outcome, Task

PLAYERS = '''
import asyncio
import envgym
from envgym.env import EnvConfig, TaskList, SeededTasks
from envgym.services import Chat
from envgym.types import Message, Task

LOG = []

class Finite(envgym.Env):
    """Pays 1 for the task's own number."""

    async def reset(self, *, seed=None, options=None):
        self.task = options["task"]
        LOG.append(("reset", self.spec.config.name, self.task.key, seed))
        return [Message("user", self.task.prompt)], {}

    async def step(self, action):
        right = float(action.text == str(self.task.answer))
        return None, right, True, False, {"score": right, "metrics": {"length": len(action.text)}}

    async def close(self):
        LOG.append(("close", self.spec.config.name))

class FiniteConfig(EnvConfig):
    name: str = "finite"
    size: int = 5
    test_size: int = 3
    fails: bool = False

class FiniteSpec(envgym.EnvSpec):
    env_class = Finite
    Config = FiniteConfig

    async def setup(self):
        LOG.append(("setup", self.config.name))
        await asyncio.sleep(0.01)
        if self.config.fails:
            raise envgym.errors.DataError("no such index")

    async def teardown(self):
        LOG.append(("teardown", self.config.name))

    def tasks(self, split):
        count = self.config.size if split == "train" else self.config.test_size
        return TaskList([Task(f"{split}-{n}", prompt=f"{n}?", answer=n) for n in range(count)])

    def demonstrations(self, task, seed):
        return [str(task.answer)]

class Breaks(FiniteSpec):
    """Tool calls, and every step fails."""

    agent = "tool_calling"

    class Env(Finite):
        async def step(self, action):
            raise RuntimeError("broken")

    env_class = Env

class Endless(FiniteSpec):
    agent = "single_turn"

    def tasks(self, split):
        return SeededTasks(split)

    async def score_group(self, task, episodes):
        return [0.25 for _ in episodes]

class Judged(FiniteSpec):
    services = {"judge": Chat(base_url="http://127.0.0.1:1/v1", model="m")}

class Odd(FiniteSpec):
    agent = "somebody_elses"
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "players.py"
    path.write_text(PLAYERS)
    return str(path)


def mixture(file, **members):
    """A mixture of the file's classes: `a="Finite"`, or with settings `a={"env": "Finite", "weight": 2}`."""
    members = {name: {"env": member} if isinstance(member, str) else dict(member) for name, member in members.items()}
    return envgym.spec(
        "mixture", members={name: {**member, "env": f"{file}:{member['env']}"} for name, member in members.items()}
    )


def log_of(spec):
    """What happened to the members, as their file wrote it down."""
    import sys

    return sys.modules[type(next(iter(spec.members.values()))).__module__].LOG


def read(tasks, count=None):
    async def get():
        return [await tasks.get(index) for index in range(tasks.size if count is None else count)]

    return asyncio.run(get())


# -- tasks ------------------------------------------------------------------------------------------------


def test_training_is_in_exact_proportion_and_each_member_goes_epoch_by_epoch(file):
    spec = mixture(file, a={"env": "FiniteSpec", "weight": 3}, b={"env": "Endless"})
    tasks = read(spec.tasks("train"), 40)
    assert spec.tasks("train").size is None
    for start in range(0, 40, 4):
        assert Counter(task.env for task in tasks[start : start + 4]) == {"a": 3, "b": 1}
    own = [task.id for task in tasks if task.env == "a"]
    for start in range(0, 30, 5):
        assert sorted(own[start : start + 5]) == [f"train-{n}" for n in range(5)]
    assert len({tuple(own[start : start + 5]) for start in range(0, 30, 5)}) > 1
    assert [task.id for task in tasks if task.env == "b"] == [f"seed-{n}" for n in range(10)]


@given(weights=st.lists(st.integers(1, 5), min_size=2, max_size=3), index=st.integers(0, 200))
@settings(deadline=None, max_examples=25)
def test_a_task_is_a_function_of_its_index_and_its_key_is_its_own(tmp_path_factory, weights, index):
    path = tmp_path_factory.getbasetemp() / "players_of_all.py"
    if not path.exists():
        path.write_text(PLAYERS)
    members = {f"m{n}": {"env": "FiniteSpec", "weight": weight} for n, weight in enumerate(weights)}
    first, second = mixture(str(path), **members), mixture(str(path), **members)
    drawn = read(first.tasks("train"), index + 1)
    assert asyncio.run(second.tasks("train").get(index)) == drawn[index]
    assert len({task.key for task in drawn}) == len({(task.env, task.id) for task in drawn})


def test_evaluation_has_every_test_task_once_in_proportion(file):
    spec = mixture(file, a={"env": "FiniteSpec", "weight": 2, "test_size": 6}, b={"env": "FiniteSpec", "test_size": 9})
    tasks = read(spec.tasks("test"))
    assert len({task.key for task in tasks}) == 15
    assert Counter(task.env for task in tasks[:9]) == {"a": 6, "b": 3}
    endless = mixture(file, a="FiniteSpec", b="Endless").tasks("test")
    assert endless.size is None
    assert Counter(task.env for task in read(endless, 30)) == {"a": 3, "b": 27}


def test_a_member_without_training_tasks_is_named(file):
    with pytest.raises(ConfigError, match="member 'a' of environment mixture-v0 has no training tasks"):
        mixture(file, a={"env": "FiniteSpec", "size": 0}, b="Endless").tasks("train")


# -- settings ---------------------------------------------------------------------------------------------


def test_a_mixture_is_json_and_its_members_are_written_out(file):
    spec = mixture(file, a={"env": "FiniteSpec", "weight": 2, "size": 7}, b="Endless")
    rebuilt = envgym.registry.spec_from_json(spec.to_json())
    assert rebuilt == spec
    assert rebuilt.members["a"].config.size == 7
    assert json.loads(spec.to_json())["kwargs"]["members"]["a"]["test_size"] == 3
    assert mixture(file, a={"env": "FiniteSpec", "weight": 2, "size": 7}, b={"env": "Endless", "weight": 1}) == spec
    assert spec.fingerprint()["spec"] != mixture(file, a="FiniteSpec", b="Endless").fingerprint()["spec"]


def test_from_words_a_file_and_back(file, tmp_path):
    words = ["env.members.easy.env=math_verify", "env.members.easy.weight=2", "env.members.hard.env=math_verify"]
    words += ["env.members.hard.digits=4", "agent=single_turn"]
    config = resolve({"env": "mixture", **parse_overrides(["env.name=mixture", *words])})
    spec = config.stages[0].make_spec()
    assert spec.members["hard"].config.digits == 4
    assert spec.config.members["easy"].weight == 2
    (tmp_path / "saved.yaml").write_text(config.to_yaml())
    again = resolve(parse_overrides(["env.members.easy.digits=3"]), file=tmp_path / "saved.yaml")
    assert again.stages[0].make_spec().members["easy"].config.digits == 3
    assert again.stages[0].make_spec().members["hard"] == spec.members["hard"]  # laid over, not replaced


def test_data_of_a_member_survives_being_written_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "x", "answer": 1}\n{"q": "y", "answer": 2}\n')
    data = {"sources": {"one": {"path": str(tmp_path / "a.jsonl")}}, "prompt": "q", "template": "Say {}"}
    spec = envgym.spec("mixture", members={"m": {"env": "math_verify", "data": data}})
    rebuilt = envgym.registry.spec_from_json(spec.to_json())

    async def prompts():
        async with rebuilt:
            return [(await rebuilt.tasks("train").get(index)).prompt for index in range(4)]

    assert set(asyncio.run(prompts())) < {"Say x", "Say y"}
    config = {"env": "mixture", "agent": "single_turn"}
    data["sources"]["one"]["path"] = "none.jsonl"
    with pytest.raises(DataError, match=r"none\.jsonl"):
        resolve({**config, "env": {"name": "mixture", "members": {"m": {"env": "math_verify", "data": data}}}})


@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        ({"math": "math_verify", "mth": {}}, ConfigError, r"'members.mth.env' is required"),
        ({"x": {"weight": 2}}, ConfigError, r"'members.x.env' is required"),
        ({"math": "math_verfy"}, NameNotFound, r"member 'math' .* no environment 'math_verfy'. Did you mean"),
        ({"math": {"env": "math_verify", "digts": 3}}, ConfigError, r"member 'math' .*'digts'. Did you mean 'digits'"),
        ({"math": {"env": "math_verify", "weight": 0}}, ConfigError, r"members.math.weight.*more than 0"),
        ({"a/b": "math_verify"}, ConfigError, r"members"),
        ({"in": {"env": "mixture", "members": {"math": "math_verify"}}}, ConfigError, "is a mixture itself"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_member_is_told_in_one_line(members, error, message):
    with pytest.raises(error, match=message) as raised:
        envgym.spec("mixture", members=members)
    assert "\n" not in str(raised.value)


def test_what_a_mixture_has_not_of_its_own():
    members = {"math": "math_verify"}
    with pytest.raises(ConfigError, match=r"env\.members\.NAME\.concurrency"):
        envgym.spec("mixture", members=members, concurrency=3)
    with pytest.raises(ConfigError, match=r"env\.members\.NAME\.data\.path"):
        envgym.spec("mixture", members=members, data={"path": "x"})
    with pytest.raises(ConfigError, match=r"has no members: give it some with env\.members\.NAME\.env=ID"):
        asyncio.run(envgym.spec("mixture").ensure_setup())
    with pytest.raises(ConfigError, match="has no members"):
        resolve({"env": "mixture"})


@pytest.mark.parametrize(
    ("members", "agent"),
    [
        ({"a": "FiniteSpec", "b": "FiniteSpec"}, "multi_turn"),
        ({"a": "Endless", "b": "Endless"}, "single_turn"),
        ({"a": "FiniteSpec", "b": "Endless"}, "multi_turn"),
        ({"a": "FiniteSpec", "b": "Endless", "c": "Breaks"}, "tool_calling"),
        ({"a": "Odd", "b": "Odd"}, "somebody_elses"),
    ],
)
def test_the_agent_is_one_that_plays_all_members(file, members, agent):
    assert mixture(file, **members).agent == agent


def test_members_that_no_one_agent_plays_are_named(file):
    with pytest.raises(ConfigError, match=r"\(a by multi_turn, b by somebody_elses\): name one with agent="):
        _ = mixture(file, a="FiniteSpec", b="Odd").agent


# -- members keep what is theirs --------------------------------------------------------------------------


def test_members_are_set_up_and_torn_down_once(file):
    spec = mixture(file, a={"env": "FiniteSpec", "name": "a"}, b={"env": "Endless", "name": "b"})
    log_of(spec).clear()

    async def main():
        async with spec:
            await asyncio.gather(spec.ensure_setup(), *(member.ensure_setup() for member in spec.parts()))

    asyncio.run(main())
    assert Counter(log_of(spec)) == {(what, name): 1 for what in ("setup", "teardown") for name in "ab"}


def test_a_member_that_cannot_be_set_up_takes_the_others_down(file):
    spec = mixture(file, a={"env": "FiniteSpec", "name": "a"}, b={"env": "FiniteSpec", "name": "b", "fails": True})
    log_of(spec).clear()
    with pytest.raises(EnvgymError, match="no such index"):
        asyncio.run(spec.ensure_setup())
    assert ("teardown", "a") in log_of(spec)


def test_demonstrations_and_group_scores_are_the_members(file):
    spec = mixture(file, a="FiniteSpec", b="Endless")
    assert spec.demonstrations(Task("t", answer=5, env="a"), 0) == ["5"]
    assert asyncio.run(spec.score_group(Task("t", env="a"), [1, 2])) is None
    assert asyncio.run(spec.score_group(Task("t", env="b"), [1, 2])) == [0.25, 0.25]
    with pytest.raises(ConfigError, match=r"no member 'c' for task 't'"):
        spec.spec_for(Task("t", env="c"))


def test_services_of_members_reach_the_members(file):
    from envgym.services import start_services

    spec = mixture(file, a="Judged", b="Judged", c="FiniteSpec")
    assert set(spec.services) == {"a-judge", "b-judge"}

    async def clients():
        async with start_services(spec, eager=False):
            return [set(member.clients) for member in spec.parts()]

    assert asyncio.run(clients()) == [{"judge"}, {"judge"}, set()]


def test_the_bound_on_concurrency_is_the_smallest_of_the_members(file):
    assert mixture(file, a="FiniteSpec", b="Endless").concurrency_bound() is None
    limited = mixture(file, a={"env": "FiniteSpec", "concurrency": 3}, b={"env": "Endless", "concurrency": 8}, c="Odd")
    assert limited.concurrency_bound() == 3


# -- playing ----------------------------------------------------------------------------------------------


def test_an_instance_plays_whichever_member_poses_the_task(file):
    spec = mixture(file, a={"env": "FiniteSpec", "name": "a"}, b={"env": "FiniteSpec", "name": "b"})
    env = spec.make()

    async def main():
        with pytest.raises(ResetNeeded):
            await env.step(Action("1"))
        observation, _ = await env.reset(seed=0)
        assert observation.messages[0].text == env.task.prompt
        for name in "aab":
            await env.reset(seed=4, options={"task": Task("t", prompt="7?", answer=7, env=name)})
            _, reward, terminated, _, info = await env.step(Action("7"))
            assert (reward, terminated, info["score"]) == (1.0, True, 1.0)
        await env.close()
        await spec.close()

    asyncio.run(main())
    played = [entry[:2] for entry in log_of(spec) if entry[0] in ("reset", "close")]
    assert played[-5:] == [("reset", "a"), ("reset", "a"), ("close", "a"), ("reset", "b"), ("close", "b")]


def test_without_a_task_the_seed_draws_one_of_all_members(file):
    spec = mixture(file, a="FiniteSpec", b="FiniteSpec")

    async def drawn(seed):
        env = spec.make()
        await env.reset(seed=seed)
        await env.close()
        return env.task.key

    keys = [asyncio.run(drawn(seed)) for seed in [*range(12), 0]]
    assert keys[0] == keys[-1]
    assert {key[0] for key in keys} == {"a", "b"}


class Answers(Agent):
    """Answers with the task's number, and wrongly on odd ones."""

    async def run(self, env, task, engine, *, seed):
        await env.reset(seed=seed, options={"task": task})
        text = str(task.answer) if task.answer is not None and task.answer % 2 == 0 else "wrong"
        _, reward, _, _, info = await env.step(Action(text))
        return Episode("", task, Outcome.finish(), reward=reward, score=info["score"], metrics=info["metrics"])


@pytest.fixture
def played(file):
    spec = mixture(
        file, even={"env": "FiniteSpec", "weight": 2, "size": 4}, judged="Endless", broken={"env": "Breaks", "size": 4}
    )
    runner = Runner(
        spec, Answers(None, AgentConfig()), None, RolloutConfig(retries=0, refills=0),
        max_model_len=64, seed=0, deterministic=False,
    )  # fmt: skip

    async def play():
        async with spec:
            tasks = [await spec.tasks("train").get(n) for n in range(8)]
            return await runner.roll_out(tasks, SamplingPlan("p", SamplingParams(max_tokens=4), 2))

    return asyncio.run(asyncio.wait_for(play(), 30))


def test_a_run_tells_each_member_apart(played):
    record = rollout_metrics(played)
    assert record["episodes"] == 16
    assert record["failures/environment"] == 4
    assert {name: record[f"env/{name}/episodes"] for name in ("even", "judged", "broken")} == {
        "even": 8, "judged": 4, "broken": 4,
    }  # fmt: skip
    assert record["env/even/score/mean"] == record["env/even/reward/mean"] == 0.5
    assert record["env/judged/reward/mean"] == 0.25
    assert record["env/broken/failures/environment"] == 4
    assert "env/broken/reward/mean" not in record
    assert record["env/even/length"] == pytest.approx((1 + 5) / 2)
    assert {episode.env for group in played for episode in group.episodes} == {"even", "judged", "broken"}


def test_an_evaluation_tells_each_member_apart(played):
    result = result_of(played)
    assert (result["n_tasks"], result["envs"]["even"]["n_tasks"], result["envs"]["broken"]["n_tasks"]) == (6, 4, 0)
    assert result["envs"]["even"]["score"] == 0.5
    low, high = result["envs"]["even"]["ci95"]
    assert low < 0.5 < high
    assert result["envs"]["broken"]["failures"] == {"environment": 4}
    assert result["envs"]["judged"]["score"] == 0.25


def test_one_environment_alone_is_not_told_apart():
    class Plain(EnvSpec):
        Config = EnvConfig

        def tasks(self, split):
            return TaskList([Task("t")])

    groups = [envgym.types.Group("g", Task("t"), [Episode("e", Task("t"), Outcome.finish(), reward=1.0, score=1.0)])]
    assert "envs" not in result_of(groups)
    assert not [key for key in rollout_metrics(groups) if key.startswith("env/")]


def test_other_code_of_a_member_is_another_fingerprint():
    spec = envgym.registry.spec("mixture", members={"one": "math_verify", "two": "math_verify"})
    before = spec.fingerprint()
    own = spec.members["two"].fingerprint()
    spec.members["two"].fingerprint = lambda: {**own, "code": "changed"}
    after = spec.fingerprint()
    assert (after["code"] == before["code"], after["spec"] == before["spec"]) == (False, True)
