"""Failed episodes with a reward (`rollout.failed_reward`), and what is recorded of failed ones."""

import asyncio

import pytest

from envgym.agents.token_level import MultiTurn, MultiTurnConfig
from envgym.config.words import parse_overrides
from envgym.engine import Generation, SamplingParams
from envgym.env import Env, EnvSpec
from envgym.errors import ConfigError, InvalidOutcome, WorkerError
from envgym.evaluation.result import result_of
from envgym.monitoring.metrics import check_failures, rollout_metrics
from envgym.processes import event_loop
from envgym.render import load_tokenizer, make_renderer
from envgym.rollout.buffer import Buffer
from envgym.rollout.config import RolloutConfig
from envgym.rollout.runner import Runner, SamplingPlan
from envgym.settings import validate_settings
from envgym.types import StopReason, Task

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def renderer(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = TEMPLATE
    return make_renderer("chat", tokenizer)


class Sixes:
    """Samples two tokens; `error` is raised at the second turn instead."""

    def __init__(self, error=None):
        self.error = error

    async def generate(self, request):
        await asyncio.sleep(0)
        if self.error and request.id.endswith("1"):
            raise self.error
        return Generation((66, 66), (-1.0, -2.0), StopReason.STOP, ())


class Breaks(Env):
    """Rewards the first turn with 0.25 and raises an error after the second; task `sound` ends with 1 there."""

    error: Exception = ValueError("no such answer")

    async def reset(self, *, seed=None, options=None):
        self.turns = 0
        if self.task.id == "never":
            raise self.error
        return "Say something.", {}

    async def step(self, action):
        self.turns += 1
        if self.turns == 1:
            return "Go on.", 0.25, False, False, {}
        if self.task.id == "sound":
            return "", 0.75, True, False, {}
        raise self.error


class BreaksSpec(EnvSpec):
    env_class = Breaks


def roll_out(renderer, *tasks, engine=None, size=2, **settings):
    config = RolloutConfig(**settings)
    agent = MultiTurn(renderer, MultiTurnConfig())
    runner = Runner(
        BreaksSpec("Breaks"), agent, engine or Sixes(), config, max_model_len=512, seed=0, deterministic=False
    )
    plan = SamplingPlan("p", SamplingParams(max_tokens=4), size)
    return event_loop.run(asyncio.wait_for(runner.roll_out([Task(name, prompt="") for name in tasks], plan), 30))


def test_the_answers_of_a_failed_episode_are_recorded(renderer):
    [group] = roll_out(renderer, "breaks", size=1, refills=0)
    [episode] = group.episodes
    assert (episode.failed, episode.reward, episode.score, episode.is_counted) == (True, None, None, False)
    assert [turn.reward for row in episode.rows for turn in row.turns] == [0.25, None]
    assert [message.role for message in episode.messages] == ["user", "assistant", "user", "assistant"]


def test_a_reward_takes_the_place_of_those_of_earlier_turns_and_the_episode_is_final(renderer):
    [group] = roll_out(renderer, "breaks", failed_reward=0)
    assert (group.superseded, group.refills) == ([], 0)
    for episode in group.episodes:
        assert (episode.outcome.reason, episode.is_counted) == ("environment", True)
        assert (episode.reward, episode.score) == (0, 0)
        assert [turn.reward for row in episode.rows for turn in row.turns] == [None, 0]


def test_it_counts_in_groups_metrics_and_scores_and_is_still_a_failure(renderer):
    groups = roll_out(renderer, "breaks", "sound", failed_reward=0.5)
    buffer = Buffer(2, needs_reward=True)
    assert buffer.add(groups) == 2
    metrics = rollout_metrics(groups)
    assert (metrics["reward/mean"], metrics["score/mean"], metrics["failures/share"]) == (0.75, 0.75, 0.5)
    result = result_of(groups)
    assert (result["score"], result["failures"], result["rewarded_failures"]) == (0.75, {"environment": 2}, 2)
    check_failures(groups, 0.1)  # they are not left out


@pytest.mark.parametrize(
    ("error", "settings", "reward"),
    [
        (InvalidOutcome("judge", "no grade"), 0, 0),
        (InvalidOutcome("judge", "no grade"), {"judge": -1}, -1),
        (InvalidOutcome("judge", "no grade"), {"environment": 0}, None),
        (WorkerError("cuda"), 0, None),
        (WorkerError("cuda"), {"engine": 0}, 0),
    ],
)
def test_kinds(renderer, monkeypatch, error, settings, reward):
    engine = Sixes(error) if isinstance(error, WorkerError) else None
    monkeypatch.setattr(Breaks, "error", error)
    [group] = roll_out(renderer, "breaks", size=1, refills=0, engine=engine, failed_reward=settings)
    assert group.episodes[0].reward == reward
    assert group.episodes[0].score == (None if reward is None else max(0, reward))


def test_a_reward_outside_the_range_of_scores_leaves_the_environment_its_scores(renderer):
    groups = roll_out(renderer, "breaks", "sound", failed_reward=-1)
    assert [[(e.reward, e.score) for e in group.episodes] for group in groups] == [[(-1, 0)] * 2, [(1.0, 1.0)] * 2]


def test_an_episode_that_failed_before_the_first_turn_has_none(renderer):
    [group] = roll_out(renderer, "never", failed_reward=0)
    assert [episode.reward for episode in group.episodes] == [None, None]
    assert group.refills == 1


@pytest.mark.parametrize("word", ["rollout.failed_reward=-0.5", "rollout.failed_reward.environment=-0.5"])
def test_as_words_of_the_command_line(word):
    setting = RolloutConfig(**parse_overrides([word])["rollout"]).failed_reward
    assert setting in (-0.5, {"environment": -0.5})


@pytest.mark.parametrize("value", ["zero", True, {"environment": "x"}, [0]])
def test_a_reward_that_is_none(value):
    with pytest.raises(ConfigError, match=r"key 'failed_reward': must be a number, or numbers by kind of failure"):
        validate_settings(RolloutConfig, {"failed_reward": value})
