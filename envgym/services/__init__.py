"""Models that environments use: reward models, judges, user simulators, opponents.

An environment declares its models in `EnvSpec.services` and calls their clients in `EnvSpec.clients`:

    @property
    def services(self):
        return {"reward": RewardModel(model="path/or/hub-id")}
    ...
    reward = await self.spec.clients["reward"].score_one(messages)

The code that runs the environment starts them with `start_services`. Environments never load a model themselves.
"""

from .client import Assessment, ChatClient, Client, Conversation, RewardClient, preference
from .declarations import Chat, ChatOrPolicy, Policy, RewardEndpoint, RewardModel, Service
from .start import Services, check_servable, start_services

__all__ = [
    "Assessment", "Chat", "ChatClient", "ChatOrPolicy", "Client", "Conversation", "Policy", "RewardClient",
    "RewardEndpoint", "RewardModel", "Service", "Services", "check_servable", "preference", "start_services",
]  # fmt: skip
