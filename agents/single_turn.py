"""The single-turn agent: one observation, one answer, one reward."""

from __future__ import annotations

from typing import Any

from envgym.agent import Agent, Sampler
from envgym.env import CheckedEnv
from envgym.types import Action, Episode, Message, Observation, Outcome, Row, Segment, StopReason, Task, Turn


class SingleTurn(Agent):
    """Samples one answer to the first observation. An environment that wants more turns truncates the episode."""

    async def run(self, env: CheckedEnv, task: Task, engine: Sampler | None, *, seed: int) -> Episode:
        assert engine is not None, "a sampling agent is given an engine"
        observation, _ = await env.reset(seed=seed, options={"task": task})
        prompt = self.renderer.prompt(observation)
        generation = await engine.generate(prompt, observation.sampling)
        action = Action(
            self.renderer.text(generation.token_ids), generation.token_ids, stop_reason=generation.stop_reason
        )
        row = Row(
            [
                Segment("prompt", prompt),
                Segment(
                    "action",
                    list(generation.token_ids),
                    logprobs=list(generation.logprobs),
                    versions=generation.versions,
                ),
            ],
            temperature=(observation.sampling or {}).get("temperature", engine.sampling.temperature),
        )
        return await finish_turn(env, task, observation, action, row)


async def finish_turn(env: CheckedEnv, task: Task, observation: Observation, action: Action, row: Row) -> Episode:
    """Hand the one action to the environment and write down what it said."""
    _, reward, terminated, _, info = await env.step(action)
    row.turns.append(Turn(reward, action.stop_reason))
    if action.stop_reason is StopReason.LENGTH:
        outcome = Outcome.truncated("length")
    elif terminated:
        outcome = Outcome.completed()
    else:
        outcome = Outcome.truncated("turns")
    return Episode(
        id="",
        task=task,
        outcome=outcome,
        rows=[row],
        reward=reward,
        score=score_of(reward, info),
        metrics={name: float(value) for name, value in info.get("metrics", {}).items()},
        messages=[*observation_messages(observation), Message.of("assistant", action.text)],
    )


def score_of(reward: float | None, info: dict[str, Any]) -> float | None:
    """The environment's own score, or the reward where that lies in [0, 1], else None."""
    score = info.get("score")
    if score is not None:
        return float(score)
    return reward if reward is not None and 0.0 <= reward <= 1.0 else None


def observation_messages(observation: Observation) -> list[Message]:
    """An observation as messages, for people to read."""
    if observation.text is not None:
        return [Message.of("user", observation.text)]
    return list(observation.messages)
