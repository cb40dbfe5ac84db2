"""Episodes that a script plays in place of a policy: a list of actions, a function, or a person."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envgym.agent import Agent, AgentConfig, Sampler
from envgym.env import CheckedEnv, Info
from envgym.render import NoRenderer
from envgym.types import Action, Episode, Limit, Message, Observation, Outcome, Task, observed_messages

from .transcript import Transcript

Script = Callable[[int, Observation], Action | None]
"""The action of turn k (from 0) given what was just observed; None where the script is over."""


def in_order(actions: Sequence[Action]) -> Script:
    """These actions, one a turn, whatever is observed."""
    return lambda turn, observation: actions[turn] if turn < len(actions) else None


NO_ACTIONS = in_order(())
OUT_OF_TURNS = Outcome.truncate(Limit.TURNS)


def action_of(turn: str | Message, token_ids: Sequence[int]) -> Action:
    """A turn of the assistant as an action."""
    message = turn if isinstance(turn, Message) else Message.of("assistant", turn)
    return Action(message.text, token_ids, message.tool_calls)


@dataclass(slots=True)
class PlayedTurn:
    """An action and the environment's answer to it."""

    action: Action
    observation: Observation
    reward: float | None
    terminated: bool
    truncated: bool
    info: Info


class ScriptedEpisode:
    """An episode of `task`, reset with `seed`, whose actions come from `script`, and all that the environment answers.

    Where the script is over before the environment has ended it, its outcome is `unfinished`. A subclass may do more at
    each `reset` and `step`.
    """

    def __init__(self, task: Task, seed: int, script: Script, unfinished: Outcome = OUT_OF_TURNS) -> None:
        self.task = task
        self.seed = seed
        self.first: Observation | None = None
        self.info: Info = {}
        """The info of the reset."""
        self.turns: list[PlayedTurn] = []
        self.error: BaseException | None = None
        """The exception that ended it, if one did."""
        self._script = script
        self._unfinished = unfinished

    async def play(self, env: CheckedEnv) -> Episode:
        """Play it on an instance. An exception of the environment is kept in `error`, and passes."""
        try:
            observation = await self.reset(env)
            while not self.has_ended and (action := self._script(len(self.turns), observation)) is not None:
                observation = (await self.step(env, action)).observation
        except BaseException as error:
            self.error = error
            raise
        return self.episode()

    async def reset(self, env: CheckedEnv) -> Observation:
        self.first, self.info = await env.reset(seed=self.seed, options={"task": self.task})
        return self.first

    async def step(self, env: CheckedEnv, action: Action) -> PlayedTurn:
        self.turns.append(PlayedTurn(action, *await env.step(action)))
        return self.turns[-1]

    @property
    def has_ended(self) -> bool:
        """True if the environment has ended it."""
        return bool(self.turns) and (self.turns[-1].terminated or self.turns[-1].truncated)

    def episode(self) -> Episode:
        """The episode so far as other agents write it down: one row, with what the actions have for tokens."""
        transcript = Transcript(None)
        transcript.begin([])
        transcript.messages += observed_messages(self.first or Observation())
        outcome = self._unfinished
        for turn in self.turns:
            transcript.demonstrate(turn.action.token_ids, turn.action.stop_reason)
            transcript.add_reward(turn.reward, turn.info)
            transcript.messages += [Message.of("assistant", turn.action.text), *observed_messages(turn.observation)]
            if turn.terminated or turn.truncated:
                outcome = Outcome.of(turn.terminated, turn.truncated)
        return transcript.episode(self.task, outcome)


class Scripted(Agent):
    """Plays scripts in place of a policy: for a task, the episode that `episode_of` gives."""

    uses_policy = False

    def __init__(self, episode_of: Callable[[Task], ScriptedEpisode]) -> None:
        super().__init__(NoRenderer(), AgentConfig())
        self._episode_of = episode_of

    async def run(self, env: CheckedEnv, task: Task, sampler: Sampler | None, *, seed: int) -> Episode:
        return await self._episode_of(task).play(env)
