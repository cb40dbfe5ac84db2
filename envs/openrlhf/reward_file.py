"""A file that defines `reward_func(queries, prompts, labels)` as an environment, called once for each group."""

from __future__ import annotations

from collections.abc import Sequence

from envgym.env.rewards import Reward, prompt_text
from envgym.env.rewards.environments import GroupRewardEnv, answer_of, seed_of
from envgym.errors import InvalidStep
from envgym.types import Episode, Task

from .foreign_file import ForeignFile, ForeignFileConfig


class RewardFileConfig(ForeignFileConfig):
    """Settings of a reward function from a file for OpenRLHF."""

    chat: bool = True
    """Pose prompts as chat messages, through the model's template; false: as raw text, for base models."""


class RewardFile(ForeignFile):
    """Poses the tasks; the rewards of a group come from one call of the file's function.

    `queries` are prompt and answer as one text each and begin with the text in `prompts`, which is the task's own,
    without the chat template. `labels` are the tasks' answers. A call has `call_timeout` seconds; then its process is
    killed and the group fails.
    """

    env = GroupRewardEnv
    Config = RewardFileConfig
    config: RewardFileConfig
    host = "envgym.envs.openrlhf.host:RewardHost"

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Reward | InvalidStep]:
        prompt = prompt_text(task)
        queries = [prompt + answer_of(episode).text for episode in episodes]
        prompts, labels = [prompt] * len(queries), [task.answer] * len(queries)
        said: list[Reward | InvalidStep] = await self.processes.call(
            "group", queries, prompts, labels, seed_of(episodes), timeout=self.config.call_timeout
        )
        return said
