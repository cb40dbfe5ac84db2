"""The agent for OpenRLHF's agent files: multi-turn for `reset` and `step`; for an `execute`, it answers requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from envgym.agent import OutOfBudget, Sampler
from envgym.agents.token_level import MultiTurn, actions_of
from envgym.env import CheckedEnv
from envgym.errors import ConfigError, InvalidOutcome, PromptTooLong
from envgym.transcript import Transcript
from envgym.types import Episode, Limit, Message, Outcome, Row, StopReason, Task, float_array

from . import PolicyView

ROLES = {"prompt": "user", "feedback": "user", "action": "assistant"}


class OpenRLHFExecutor(MultiTurn):
    """The agent `multi_turn` for files of OpenRLHF. The environment sees the policy's tokenizer and sampling
    parameters, and a file's own `execute` drives the model.

    The run trains on what the engine sampled after exactly the tokens of a request, whatever an `execute` does with
    them. A request that does not extend the previous tokens begins a new row. The result of `execute` gives the
    rewards, and its `action_ranges` select the samples in the loss.
    """

    async def run(self, env: CheckedEnv, task: Task, sampler: Sampler | None, *, seed: int) -> Episode:
        assert sampler is not None, "an agent that uses the policy needs a sampler"
        file_env: Any = env.unwrapped
        if not hasattr(file_env, "policy"):
            raise ConfigError(f"agent openrlhf_executor runs files for OpenRLHF, which {env.spec.id} is not")
        tokenizer, sampling, limit = self.renderer.tokenizer, asdict(sampler.sampling), sampler.max_model_len
        file_env.policy = PolicyView(tokenizer, sampling, max_length=limit, max_steps=self.config.max_turns)
        return await super().run(env, task, sampler, seed=seed)

    async def play(self, env: CheckedEnv, task: Task, transcript: Transcript, *, seed: int) -> Outcome:
        await env.spec.ensure_setup()
        file_env: Any = env.unwrapped
        if not file_env.spec.executes:
            try:
                return await super().play(env, task, transcript, seed=seed)
            finally:  # a later score outside [0, 1] clears an earlier one
                transcript.score = score_unless_reward(file_env.score, transcript)
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
            raise limit from None  # the file's error follows from the limit
        transcript.rows = [row for row in transcript.rows if row.turns]
        if not transcript.rows:
            raise limit or InvalidOutcome("invalid_environment", "execute sampled nothing by llm_engine.generate")
        if result["ranges"] is not None and result["tokens"] is not None:
            transcript.rows = declared_rows(transcript.rows, result["tokens"], result["ranges"])
        set_rewards(transcript, result)
        texts = [(segment.role, self.renderer.text(segment.token_ids)) for segment in transcript.rows[-1].segments]
        transcript.messages = [Message(ROLES[role], text) for role, text in texts]
        if isinstance(limit, OutOfBudget):
            return Outcome.truncate(limit.reason)
        return Outcome.truncate(Limit.ENVIRONMENT) if result["truncated"] else Outcome.finish()


def set_context(transcript: Transcript, token_ids: list[int]) -> None:
    """Set the transcript's context to `token_ids`: they extend the last row if they begin with it, else they begin a
    new row."""
    context = transcript.context.tolist()
    if context and token_ids[: len(context)] == context:
        transcript.add_feedback(token_ids[len(context) :])
    else:
        transcript.start_row(token_ids)


def declared_rows(rows: Sequence[Row], tokens: list[int], ranges: Sequence[tuple[int, int]]) -> list[Row]:
    """The rows with a declared action; the loss weights of all other actions become 0.

    Raises `InvalidOutcome` for a range whose tokens were not sampled after the tokens before it.
    """
    actions = [(segment, prefix) for row in rows for segment, prefix in actions_of(row)]
    declared: set[int] = set()
    for number, (start, end) in enumerate(ranges):
        action, context = tokens[start:end], tokens[:start]
        matches = (
            segment
            for segment, prefix in actions
            if id(segment) not in declared and list(segment.token_ids[: len(action)]) == action and prefix == context
        )
        match = next(matches, None)
        if match is None or end <= start:
            raise InvalidOutcome(
                "invalid_environment",
                f"execute returned action_ranges[{number}] = ({start}, {end}), which is not what was sampled after the "
                "observation_tokens before it",
            )
        declared.add(id(match))
        match.loss_weights = float_array([1.0] * (end - start) + [0.0] * (len(match) - (end - start)))
    for segment, _ in actions:
        if id(segment) not in declared:
            segment.loss_weights = float_array([0.0] * len(segment))
    return [row for row in rows if any(id(segment) in declared for segment in row.segments)]


def score_unless_reward(score: float | None, transcript: Transcript) -> float | None:
    """The score, or None if it only repeats the reward, as in most files: then `Runner.withdraw_scores` decides,
    over all episodes, whether rewards are scores."""
    rewards = [turn.reward for row in transcript.rows for turn in row.turns if turn.reward is not None]
    return None if score == sum(rewards) else score


def set_rewards(transcript: Transcript, result: Mapping[str, Any]) -> None:
    """Record the episode's rewards: per turn if they are given and add up, else at its end."""
    turns = [turn for row in transcript.rows for turn in row.turns]
    by_turn, reward = result["turn_rewards"], result["reward"]
    if by_turn and len(by_turn) == len(turns) and abs(sum(by_turn) - (reward or 0.0)) < 1e-9:
        for turn, turn_reward in zip(turns, by_turn, strict=True):
            turn.reward = turn_reward
    else:
        turns[-1].reward = reward
    transcript.score = score_unless_reward(result["score"], transcript)
    transcript.metrics |= result["metrics"]
