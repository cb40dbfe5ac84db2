"""Models that environments use: reward models, judges, user simulators, opponents.

An environment declares what it needs in `EnvSpec.services` and calls the client it is handed in `EnvSpec.clients`:

    @property
    def services(self):
        return {"reward": RewardModel(model="path/or/hub-id")}
    ...
    reward = await self.spec.clients["reward"].score_one(messages)

Whoever plays the environment starts them with `start_services`. Environments never load a model themselves.
"""

from .client import Assessment, ChatClient, Client, Conversation, RewardClient, preference
from .declarations import Chat, ChatOrPolicy, Policy, RewardEndpoint, RewardModel, Service
from .start import Services, check_servable, start_services

__all__ = [
    "Assessment", "Chat", "ChatClient", "ChatOrPolicy", "Client", "Conversation", "Policy", "RewardClient",
    "RewardEndpoint", "RewardModel", "Service", "Services", "check_servable", "preference", "start_services",
]  # fmt: skip
