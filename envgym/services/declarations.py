"""Declarations of the services an environment needs. Settings without heavy imports, so that they can be checked early.

No secret is ever a setting: a key is named by its environment variable, a token by its file.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from envgym.settings import Settings, as_list

KEYS = r"[?&;#][^=&;#]*(key(?!word)|token(?!s)|secret|passw|pwd|auth(?!or)|\bsig\b|signature|credential|\bcode\b|\bsk-)"
"""A parameter of a URL that holds a key, by its name."""


class Service(Settings):
    """Base of the declarations. Equal declarations share one client, and so one model and its batches."""

    model_config = ConfigDict(frozen=True)

    @property
    def key(self) -> str:
        """Equal for declarations that may share a client."""
        return f"{type(self).__name__} {self.model_dump_json()}"


def _checked_url(url: str, secret: str = KEYS) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a URL looks like http://127.0.0.1:8000")
    if parts.username or parts.password or re.search(secret, url, re.IGNORECASE):
        raise PydanticCustomError("secret", "a URL must hold no password or key: it would be saved in the run's folder")
    return url.rstrip("/")


def _checked_name(name: str) -> str:
    # A key pasted where its variable's name belongs would be written into the run's folder.
    if name and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name):
        raise PydanticCustomError("secret", "this is the name of an environment variable, not the key itself")
    return name


def _checked_template(template: str | None) -> str | None:
    if template is not None and "{answer}" not in template:
        raise ValueError("a template holds {answer}, and {prompt} as well as a rule")
    return template


Url = Annotated[str, AfterValidator(_checked_url)]
BaseUrl = Annotated[str, AfterValidator(lambda url: _checked_url(url, "[?#]"))]
"""An address to which each request appends its path, so that a query has no use."""
VariableName = Annotated[str, AfterValidator(_checked_name)]
"""The environment variable that holds a secret, or an empty string."""


class RewardModel(Service):
    """A Hugging Face sequence-classification model with one output, in a process that the runtime places.

    Its client is a `RewardClient`.
    """

    model: str = Field(min_length=1)
    """Folder or hub id, or the folder of a run that trained one."""
    batch_size: int = Field(16, ge=1)
    """Conversations per forward pass."""
    max_length: int | None = Field(None, ge=2)
    """Maximum tokens of a conversation; by default the model's own limit."""
    too_long: Literal["fail", "cut"] = "fail"
    """A longer conversation: `fail` its episode (`too_long`), or `cut` its beginning, which the metric `cut` counts."""
    render: Literal["auto", "raw"] = "auto"
    """`auto`: the model's own chat template, if it has one; `raw`: the texts alone, concatenated, for a model that was
    trained with `render=raw`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the weights; `auto` is bfloat16 on an accelerator and float32 on a CPU."""
    ranks: int = Field(1, ge=1)
    """Processes with a share of the weights each (ZeRO 3), each on a GPU of its own: for a model that no GPU holds."""
    offload: bool = False
    """Keep the weights in host memory and move them to the accelerator layer by layer (DeepSpeed): slower, but it
    leaves the accelerator's memory to others."""
    normalise: bool = False
    """Return (reward - mean) / std with the `mean` and `std` that the model's config must then hold."""
    timeout: float = Field(600.0, gt=0)
    """Timeout of one round of batches, in seconds."""


class RewardEndpoint(Service):
    """A reward server over HTTP: POST {"query": […], "prompts": […], "labels": […]} -> {"rewards": […]}.

    It may also return `scores` and `extra_logs` (names to lists or numbers), which become score and metrics. Its
    client is a `RewardClient`.
    """

    urls: Annotated[tuple[Url, ...], BeforeValidator(as_list)] = Field(min_length=1)
    """Addresses of equal servers (`http://host:5000/get_reward`), asked in turn."""
    token_file: str | None = None
    """File that holds the token the servers ask for."""
    template: Annotated[str | None, AfterValidator(_checked_template)] = "{prompt}{answer}"
    """Form of a query. Unset (null): as a list of messages, to which the server applies its chat template."""
    batch_size: int = Field(64, ge=1)
    """Queries in one request at most."""
    concurrency: int = Field(16, ge=1)
    """Maximum number of concurrent requests."""
    timeout: float = Field(60.0, gt=0)
    """Timeout of one attempt of a request, in seconds."""
    tries: int = Field(5, ge=1)
    """Maximum attempts of a request that fails at the network or the server."""


class Chat(Service):
    """A language model behind an OpenAI-compatible API. Its client is a `ChatClient`."""

    base_url: BaseUrl
    """Address without `/chat/completions`, for example `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """The API's name of the model."""
    api_key_env: VariableName = ""
    """Name of the environment variable that holds the API key; empty for none."""
    concurrency: int = Field(16, ge=1)
    """Maximum number of concurrent requests."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Maximum requests started per minute, evenly spaced."""
    timeout: float = Field(60.0, gt=0)
    """Timeout of one attempt of a request, in seconds."""
    tries: int = Field(5, ge=1)
    """Maximum attempts of a request that fails at the network or the server."""
    cache_dir: str | None = None
    """Folder that caches repeatable answers (greedy or seeded) across runs; within a run they are always cached."""
    extra: dict[str, Any] = Field({})
    """Fields to set in every request's body; null removes a key (`{"max_tokens": null, "max_completion_tokens":
    900}`)."""


class Policy(Service):
    """The policy in training: opponents, self-play. Rendered and sampled as the run does it; nothing it says is
    trained on. Its client is a `ChatClient`."""


def _policy_by_name(value: Any) -> Any:
    return Policy() if value == "policy" else value


ChatOrPolicy = Annotated[Chat | Policy, BeforeValidator(_policy_by_name)]
"""For an environment's setting: `env.opponent=policy`, or `env.opponent.base_url=… env.opponent.model=…`."""
