"""The replay agent: plays an environment's demonstrations instead of sampling. All that makes data offline."""

from __future__ import annotations

from envgym.agent import Agent, Sampler
from envgym.env import CheckedEnv
from envgym.types import Episode, Message, Objective, Outcome, Row, Segment, StopReason, Task, Turn


class Replay(Agent):
    """Plays one demonstration of the task as the assistant's answer. It needs no engine and asks no grader:
    a demonstration is taught as it stands, whatever it would have earned."""

    samples = False

    async def run(self, env: CheckedEnv, task: Task, engine: Sampler | None, *, seed: int) -> Episode:
        observation, _ = await env.reset(seed=seed, options={"task": task})
        answer = env.spec.demonstrations(task, seed)[0]
        prompt, tokens = self.renderer.prompt(observation), self.renderer.answer(answer)
        row = Row(
            [Segment("prompt", prompt), Segment("action", tokens)],
            objective=Objective.CROSS_ENTROPY,
            turns=[Turn(None, StopReason.STOP)],
        )
        return Episode(
            id="",
            task=task,
            outcome=Outcome.completed(),
            rows=[row],
            messages=[*observation.messages, Message.of("assistant", answer)],
        )
