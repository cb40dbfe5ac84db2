"""The replay agent: plays an environment's demonstrations instead of sampling, for supervised training."""

from __future__ import annotations

from envgym.agent import Agent, Sampler
from envgym.env import CheckedEnv
from envgym.errors import InvalidOutcome
from envgym.rollout.transcript import Transcript
from envgym.types import Action, Episode, Message, Outcome, Task

from .token_level import extend


class Replay(Agent):
    """Plays the demonstrated turns of a task. It needs no engine, and steps the environment only for the observations
    between two turns: a demonstration is taught as it stands, whatever its reward would be."""

    uses_policy = False

    async def run(self, env: CheckedEnv, task: Task, engine: Sampler | None, *, seed: int) -> Episode:
        observation, _ = await env.reset(seed=seed, options={"task": task})
        turns = env.spec.demonstrations(task, seed)
        dialogue, transcript = self.renderer.dialogue(), Transcript(None)
        transcript.begin(dialogue.begin(observation))
        for number, turn in enumerate(turns, start=1):
            token_ids = dialogue.add_demonstration(turn)
            transcript.demonstrate(token_ids)
            if number == len(turns):
                break
            observation, _, terminated, truncated, _ = await env.step(demonstrated(turn, token_ids))
            if terminated or truncated:
                raise InvalidOutcome("demonstration", f"{task.key}: it goes on after the episode has ended")
            extend(transcript, dialogue.add_observation(observation))
        transcript.messages = dialogue.messages
        return transcript.episode(task, Outcome.completed())


def demonstrated(turn: str | Message, token_ids: list[int]) -> Action:
    """A recorded turn as the action it stands for."""
    if isinstance(turn, str):
        return Action(turn, tuple(token_ids))
    return Action(turn.text, tuple(token_ids), turn.tool_calls)
