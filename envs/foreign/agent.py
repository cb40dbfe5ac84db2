"""The agent whose episodes a framework's program runs. The policy's answers are recorded with their exact tokens."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from envgym.agent import Agent, AgentConfig, Sampler
from envgym.agents.external.conversation import Conversation
from envgym.agents.external.endpoint import Endpoint
from envgym.env import CheckedEnv
from envgym.errors import ConfigError, InvalidOutcome
from envgym.render import Renderer
from envgym.types import Episode, Limit, Outcome, Task

from . import ForeignEnv, verdict


class ForeignAgentConfig(AgentConfig):
    """Settings of every agent of another framework. A subclass adds those that are passed to its worker."""

    listen: str = "127.0.0.1"
    """Address at which the policy answers. A program in a container needs one that it can reach."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum tokens that the policy samples per episode; then the episode is truncated."""
    timeout: float = Field(600.0, gt=0)
    """Seconds per episode; then it ends and fails (`agent`)."""


class ForeignAgent(Agent):
    """Has the framework's program run each episode. Sub-agents and rewritten histories form separate rows; the last
    turn gets the reward."""

    Config: ClassVar[type[AgentConfig]] = ForeignAgentConfig
    steps_are_turns = False
    config: ForeignAgentConfig

    def __init__(self, renderer: Renderer, config: AgentConfig) -> None:
        super().__init__(renderer, config)
        self._endpoint = Endpoint(self.config.listen)

    async def run(self, env: CheckedEnv, task: Task, sampler: Sampler | None, *, seed: int) -> Episode:
        assert sampler is not None, "an agent that uses the policy needs a sampler"
        instance = env.unwrapped
        if not isinstance(instance, ForeignEnv):
            raise ConfigError(f"agent {type(self).__name__} runs its framework's episodes: {env.spec.id} has none")
        await instance.spec.ensure_setup()
        await env.acquire()
        settings = self.config.model_dump(mode="json", exclude=set(ForeignAgentConfig.model_fields))
        conversation = Conversation(self.renderer, sampler, None, self.config.max_tokens, env.spec)
        try:
            async with self._endpoint.session(conversation) as access:
                url = access.session_url
                result = await instance.spec.run(task, settings, url, seed, self.config.timeout)
        except InvalidOutcome:
            if conversation.limit is None:
                raise
            # The program failed because its requests were refused: the episode is over by its limit, without a reward.
            return conversation.episode(task, Outcome.truncate(conversation.limit), None, {}, conversation.messages)
        conversation.check_turns(instance.spec.framework)
        reward, truncated, info = verdict(result)
        outcome = Outcome.truncate(Limit.ENVIRONMENT) if truncated else Outcome.finish()
        return conversation.episode(task, outcome, reward, info, conversation.messages)
