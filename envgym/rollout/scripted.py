"""Episodes with actions from a script instead of a policy: a list of actions, a function, or a person."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envgym.agent import Agent, AgentConfig, Sampler
from envgym.env import CheckedEnv, Info
from envgym.render import NoRenderer
from envgym.transcript import Transcript
from envgym.types import Action, Episode, Limit, Message, Observation, Outcome, Task, observed_messages

Script = Callable[[int, Observation], Action | None]
"""A function of the turn's number (from 0) and the last observation. Returns an action, or None at the end of the
script."""


def script_of(actions: Sequence[Action]) -> Script:
    """A script of these actions, one per turn, for any observations."""
    return lambda turn, observation: actions[turn] if turn < len(actions) else None


NO_ACTIONS = script_of(())
OUT_OF_TURNS = Outcome.truncate(Limit.TURNS)


def action_of(turn: str | Message, token_ids: Sequence[int]) -> Action:
    """The action of an assistant's turn."""
    message = turn if isinstance(turn, Message) else Message("assistant", turn)
    return Action(message.text, token_ids, message.tool_calls)


@dataclass(slots=True)
class PlayedTurn:
    """An action and the environment's response to it."""

    action: Action
    observation: Observation
    reward: float | None
    terminated: bool
    truncated: bool
    info: Info


class ScriptedEpisode:
    """An episode of `task`, reset with `seed`, with actions from `script`; it records all responses of the environment.

    If the script ends before the environment ends the episode, the outcome is `unfinished`. Subclasses may extend
    `reset` and `step`.
    """

    def __init__(self, task: Task, seed: int, script: Script, unfinished: Outcome = OUT_OF_TURNS) -> None:
        self.task = task
        self.seed = seed
        self.opening: Observation | None = None
        self.info: Info = {}
        """The info that `reset` returned."""
        self.turns: list[PlayedTurn] = []
        self.error: BaseException | None = None
        """The exception that ended the episode, if any."""
        self._script = script
        self._unfinished = unfinished

    async def play(self, env: CheckedEnv) -> Episode:
        """Run the episode on an instance. An exception of the environment is stored in `error` and raised again."""
        try:
            observation = await self.reset(env)
            while not self.has_ended and (action := self._script(len(self.turns), observation)) is not None:
                observation = (await self.step(env, action)).observation
        except BaseException as error:
            self.error = error
            raise
        return self.episode()

    async def reset(self, env: CheckedEnv) -> Observation:
        self.opening, self.info = await env.reset(seed=self.seed, options={"task": self.task})
        return self.opening

    async def step(self, env: CheckedEnv, action: Action) -> PlayedTurn:
        self.turns.append(PlayedTurn(action, *await env.step(action)))
        return self.turns[-1]

    @property
    def has_ended(self) -> bool:
        """True if the environment has ended the episode."""
        return bool(self.turns) and (self.turns[-1].terminated or self.turns[-1].truncated)

    def episode(self) -> Episode:
        """The episode so far, as other agents record it: one token sequence of the actions' token ids."""
        transcript = Transcript(None)
        transcript.start_row([])
        transcript.messages += observed_messages(self.opening or Observation())
        outcome = self._unfinished
        for turn in self.turns:
            transcript.add_demonstration(turn.action.token_ids, turn.action.stop_reason)
            transcript.add_reward(turn.reward, turn.info)
            answer = Message("assistant", turn.action.text, tool_calls=turn.action.tool_calls)
            transcript.messages += [answer, *observed_messages(turn.observation)]
            if turn.terminated or turn.truncated:
                outcome = Outcome.from_step(turn.terminated, turn.truncated)
        return transcript.episode(self.task, outcome)


class Scripted(Agent):
    """An agent that runs scripts instead of a policy: for each task the episode from `episode_of`."""

    uses_policy = False

    def __init__(self, episode_of: Callable[[Task], ScriptedEpisode]) -> None:
        super().__init__(NoRenderer(), AgentConfig())
        self._episode_of = episode_of

    async def run(self, env: CheckedEnv, task: Task, sampler: Sampler | None, *, seed: int) -> Episode:
        return await self._episode_of(task).play(env)
