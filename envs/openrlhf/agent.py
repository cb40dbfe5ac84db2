"""The agent for OpenRLHF's agent files: plays `reset` and `step` as multi-turn, an `execute` by its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from envgym.agent import OutOfBudget, Sampler
from envgym.agents.multi_turn import MultiTurn
from envgym.agents.token_level import actions_of
from envgym.env import CheckedEnv
from envgym.errors import ConfigError, InvalidOutcome, PromptTooLong
from envgym.rollout.transcript import Transcript
from envgym.types import Episode, Limit, Message, Outcome, Row, StopReason, Task, float_array

ROLES = {"prompt": "user", "feedback": "user", "action": "assistant"}


class OpenRLHFExecutor(MultiTurn):
    """The multi-turn agent, which shows the environment the policy, and lets an `execute` drive the model.

    Whatever an `execute` does with its tokens, trained is what the engine returned after exactly the tokens it was
    given. Where those do not begin with the tokens before, the episode goes on in a new row. Of its result the rewards
    count, and `action_ranges` select the samples that do.
    """

    async def run(self, env: CheckedEnv, task: Task, engine: Sampler | None, *, seed: int) -> Episode:
        assert engine is not None, "a sampling agent is given an engine"
        file_env: Any = env.env
        if not hasattr(file_env, "policy"):
            raise ConfigError(f"agent openrlhf_executor plays files for OpenRLHF, which {env.spec.id} is not")
        file_env.policy = replace(
            file_env.policy,
            tokenizer=self.renderer.tokenizer,
            sampling=asdict(engine.sampling),
            max_length=engine.max_model_len,
            max_steps=self.config.max_turns,
        )
        return await super().run(env, task, engine, seed=seed)

    async def play(self, env: CheckedEnv, task: Task, transcript: Transcript, *, seed: int) -> Outcome:
        await env.spec.ensure_setup()
        file_env: Any = env.env
        if not file_env.spec.executes:
            try:
                return await super().play(env, task, transcript, seed=seed)
            finally:  # a later score outside [0, 1] takes back an earlier one
                transcript.score = own_score(file_env.score, transcript)
        await env.reset(seed=seed, options={"task": task})
        limit: OutOfBudget | PromptTooLong | None = None

        async def sample(token_ids: list[int], overrides: Mapping[str, Any]) -> dict[str, Any] | None:
            nonlocal limit
            set_context(transcript, token_ids)
            try:
                generation = await transcript.sample(overrides)
            except (OutOfBudget, PromptTooLong) as reached:
                limit = reached
                return None
            return {
                "token_ids": list(generation.token_ids),
                "logprobs": list(generation.logprobs),
                "finish_reason": "length" if generation.stop_reason is StopReason.LENGTH else "stop",
            }

        try:
            result = await file_env.execute(sample)
        except InvalidOutcome:
            if limit is None:
                raise
            raise limit from None  # it did not expect that it could not go on
        transcript.rows = [row for row in transcript.rows if row.turns]
        if not transcript.rows:
            raise limit or InvalidOutcome("invalid_environment", "execute sampled nothing by llm_engine.generate")
        if result["ranges"] is not None and result["tokens"] is not None:
            transcript.rows = declared_rows(transcript.rows, result["tokens"], result["ranges"])
        set_rewards(transcript, result)
        transcript.messages = [
            Message.of(ROLES[segment.role], self.renderer.text(segment.token_ids))
            for segment in transcript.rows[-1].segments
        ]
        if isinstance(limit, OutOfBudget):
            return Outcome.truncated(limit.reason)
        return Outcome.truncated(Limit.ENVIRONMENT) if result["truncated"] else Outcome.completed()


def set_context(transcript: Transcript, token_ids: list[int]) -> None:
    """Make the transcript's context `token_ids`: the last row, grown, or else a new one."""
    known = transcript.context.tolist()
    if known and token_ids[: len(known)] == known:
        transcript.feedback(token_ids[len(known) :])
    else:
        transcript.begin(token_ids)


def declared_rows(rows: Sequence[Row], tokens: list[int], ranges: Sequence[tuple[int, int]]) -> list[Row]:
    """The rows that hold a declared action, the others' weights zero.

    Raises `InvalidOutcome` for a range whose tokens were not sampled after the tokens before it.
    """
    actions = [(segment, before) for row in rows for segment, before in actions_of(row)]
    found: set[int] = set()
    for number, (start, end) in enumerate(ranges):
        action, context = tokens[start:end], tokens[:start]
        matches = (
            segment
            for segment, before in actions
            if id(segment) not in found and list(segment.token_ids[: len(action)]) == action and before == context
        )
        match = next(matches, None)
        if match is None or end <= start:
            raise InvalidOutcome(
                "invalid_environment",
                f"execute returned action_ranges[{number}] = ({start}, {end}), which is not what was sampled after the "
                "observation_tokens before it",
            )
        found.add(id(match))
        match.loss_weights = float_array([1.0] * (end - start) + [0.0] * (len(match) - (end - start)))
    for segment, _ in actions:
        if id(segment) not in found:
            segment.loss_weights = float_array([0.0] * len(segment))
    return [row for row in rows if any(id(segment) in found for segment in row.segments)]


def own_score(score: float | None, transcript: Transcript) -> float | None:
    """The score, unless it is the reward once more, as most files have it: then the other episodes of the environment
    show whether the reward is one (`envgym.episodes.scores`)."""
    rewards = [turn.reward for row in transcript.rows for turn in row.turns if turn.reward is not None]
    return None if score == sum(rewards) else score


def set_rewards(transcript: Transcript, result: Mapping[str, Any]) -> None:
    """Record the episode's rewards: by turn where they are known and add up, else at its end."""
    turns = [turn for row in transcript.rows for turn in row.turns]
    by_turn, reward = result["turn_rewards"], result["reward"]
    if by_turn and len(by_turn) == len(turns) and abs(sum(by_turn) - (reward or 0.0)) < 1e-9:
        for turn, own in zip(turns, by_turn, strict=True):
            turn.reward = own
    else:
        turns[-1].reward = reward
    transcript.score = own_score(result["score"], transcript)
    transcript.metrics |= result["metrics"]
