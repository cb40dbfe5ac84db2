"""Plays agents from files for OpenRLHF: `reset` and `step` as multi-turn, an `execute` of their own by its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from envgym.agent import Sampler
from envgym.agents.multi_turn import MultiTurn
from envgym.env import CheckedEnv
from envgym.errors import ConfigError, InvalidOutcome, PromptTooLong
from envgym.rollout.transcript import OutOfBudget, Transcript
from envgym.types import Episode, Limit, Message, Outcome, Row, Segment, StopReason, Task, float_array

SPEAKERS = {"prompt": "user", "feedback": "user", "action": "assistant"}


class OpenRLHFExecutor(MultiTurn):
    """The multi-turn agent, which tells the environment of the policy, and which lets an `execute` drive the model.

    Whatever an `execute` does with its tokens, trained is what the engine returned after exactly the tokens it was
    given. Where those do not begin with what was there before, the episode goes on in a new row. Of what it returns,
    the rewards count, and `action_ranges` say which of the samples do.
    """

    async def run(self, env: CheckedEnv, task: Task, engine: Sampler | None, *, seed: int) -> Episode:
        assert engine is not None, "a sampling agent is given an engine"
        guest: Any = env.env
        if not hasattr(guest, "policy"):
            raise ConfigError(f"agent openrlhf_executor plays files for OpenRLHF, which {env.spec.id} is not")
        guest.policy = replace(
            guest.policy,
            tokenizer=self.renderer.tokenizer,
            sampling=asdict(engine.sampling),
            max_length=engine.max_model_len,
            max_steps=self.config.max_turns,
        )
        return await super().run(env, task, engine, seed=seed)

    async def play(self, env: CheckedEnv, task: Task, transcript: Transcript, *, seed: int) -> Outcome:
        await env.spec.ensure_setup()
        guest: Any = env.env
        if not guest.spec.executes:
            try:
                return await super().play(env, task, transcript, seed=seed)
            finally:  # a score that is none takes back the one before it
                transcript.score = own_score(guest.score, transcript)
        await env.reset(seed=seed, options={"task": task})
        limit: OutOfBudget | PromptTooLong | None = None

        async def sample(token_ids: list[int], overrides: Mapping[str, Any]) -> dict[str, Any] | None:
            nonlocal limit
            follow(transcript, token_ids)
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
            said = await guest.execute(sample)
        except InvalidOutcome:
            if limit is None:
                raise
            raise limit from None  # it did not expect that it could not go on
        if limit is not None and not any(row.turns for row in transcript.rows):
            raise limit
        transcript.rows = [row for row in transcript.rows if row.turns]
        if not transcript.rows:
            raise InvalidOutcome("invalid_environment", "execute sampled nothing by llm_engine.generate")
        if said["ranges"] is not None and said["tokens"] is not None:
            transcript.rows = declared(transcript.rows, said["tokens"], said["ranges"])
        pay(transcript, said)
        transcript.messages = self.spoken(transcript.rows)
        if isinstance(limit, OutOfBudget):
            return Outcome.truncated(limit.reason)
        return Outcome.truncated(Limit.ENVIRONMENT) if said["truncated"] else Outcome.completed()

    def spoken(self, rows: Sequence[Row]) -> list[Message]:
        """The last row as a conversation, for people."""
        return [
            Message.of(SPEAKERS[segment.role], self.renderer.text(segment.token_ids)) for segment in rows[-1].segments
        ]


def follow(transcript: Transcript, token_ids: list[int]) -> None:
    """Make the transcript's context `token_ids`: the row there is, grown, or else a new one."""
    here = transcript.rows[-1].token_ids if transcript.rows else None
    if here is not None and token_ids[: len(here)] == here and len(token_ids) > len(here):
        transcript.feedback(token_ids[len(here) :])
    elif here != token_ids:
        transcript.begin(token_ids)


def declared(rows: Sequence[Row], tokens: list[int], ranges: Sequence[tuple[int, int]]) -> list[Row]:
    """The rows that hold a declared action, the others' weights zero.

    Raises `InvalidOutcome` for a range that is not what was sampled after the tokens before it.
    """
    found: set[int] = set()
    for number, (start, end) in enumerate(ranges):
        match = next(
            (
                segment
                for row in rows
                for segment in row.segments
                if id(segment) not in found and segment.role == "action"
                if list(segment.token_ids[: end - start]) == tokens[start:end]
                and _before(row, segment) == tokens[:start]
            ),
            None,
        )
        if match is None or end <= start:
            raise InvalidOutcome(
                "invalid_environment",
                f"execute returned action_ranges[{number}] = ({start}, {end}), which is not what was sampled after the "
                "observation_tokens before it",
            )
        found.add(id(match))
        match.loss_weights = float_array([1.0] * (end - start) + [0.0] * (len(match.token_ids) - (end - start)))
    kept = [row for row in rows if any(id(segment) in found for segment in row.segments)]
    for segment in (segment for row in kept for segment in row.segments if segment.role == "action"):
        if id(segment) not in found:
            segment.loss_weights = float_array([0.0] * len(segment.token_ids))
    return kept


def _before(row: Row, segment: Segment) -> list[int]:
    before: list[int] = []
    for other in row.segments:
        if other is segment:
            break
        before += other.token_ids
    return before


def own_score(score: float | None, transcript: Transcript) -> float | None:
    """The score, unless it is the reward once more, as most files have it: whether that is one the other episodes of
    the environment tell (`envgym.rollout.scores`)."""
    paid = [turn.reward for row in transcript.rows for turn in row.turns if turn.reward is not None]
    return None if score == sum(paid) else score


def pay(transcript: Transcript, said: Mapping[str, Any]) -> None:
    """Write down what the episode earned: by turn where that is known and adds up, else at its end."""
    turns = [turn for row in transcript.rows for turn in row.turns]
    by_turn, reward = said["turn_rewards"], said["reward"]
    if by_turn and len(by_turn) == len(turns) and abs(sum(by_turn) - (reward or 0.0)) < 1e-9:
        for turn, paid in zip(turns, by_turn, strict=True):
            turn.reward = paid
    else:
        turns[-1].reward = reward
    transcript.score = own_score(said["score"], transcript)
    transcript.metrics |= said["metrics"]
