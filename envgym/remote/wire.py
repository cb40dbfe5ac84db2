"""The protocol of server and client: JSON bodies over HTTP/1.1, version 4. `routes` has the requests.

The client chooses a session's id and numbers its steps, so that every request can be sent again: the server
answers a repeated one with its stored answer and does nothing twice. Tasks, observations and actions travel as the
fields of their dataclasses, episodes as `envgym.episodes.record.to_record` writes them. An image among the parts of a
message is its file (`data`, base64) and the file's SHA-256 (`sha256`), which the receiver computes anew. Errors are RFC
9457 problem details (`Problem`). A reader ignores unknown fields: a newer peer may send more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from envgym.net.problems import Line, ProblemBody
from envgym.types import Action, ImagePart, Observation, Task

VERSION = 4
MAX_PAGE = 1000
"""Tasks in the largest page."""
MAX_GROUP = 1024
"""Episodes in the largest group."""
MAX_HEARTBEAT = 10_000
"""Sessions in the largest heartbeat."""
MAX_INDEX = 2**53
"""Some readers of JSON cannot represent larger integers."""

Method = Literal["GET", "POST", "DELETE"]
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Wire(BaseModel):
    """Base class of the bodies."""

    model_config = ConfigDict(extra="ignore", frozen=True)


# ---------------------------------------------------------------------------------------------------------
# Environments and their tasks


class Split(Wire):
    """`size` is None for an endless split; `error` is the reason why it cannot be read. `tasks` is a hash of a few of
    its tasks; empty where they cannot be sent."""

    size: int | None = None
    tasks: str = ""
    error: Line | None = None


class EnvDescription(Wire):
    """One served environment: `name` in this server's addresses, `id` the environment's id there (of a file without its
    folder), `about` its author's summary.

    `agent` is the default agent; `services` the models it uses on the server; `concurrency` the maximum of open
    sessions (None: any); `scores_groups` whether finished episodes are to be sent to it; `fingerprint` hashes of its
    code and settings.
    """

    name: Line
    id: Line
    about: Line = ""
    agent: Line
    splits: dict[Line, Split]
    services: dict[Line, Line] = {}
    concurrency: int | None = None
    scores_groups: bool = False
    fingerprint: dict[str, str] = {}


class EnvList(Wire):
    """The environments of a server. A session is closed after `lease_seconds` without a request or a heartbeat; the
    client may have `max_sessions` open."""

    protocol: Literal["envgym"] = "envgym"
    version: int = VERSION
    envs: tuple[EnvDescription, ...]
    lease_seconds: float = Field(ge=0.1, allow_inf_nan=False)
    max_sessions: int = Field(ge=1)


class TaskQuery(Wire):
    """The tasks to send."""

    split: Literal["train", "test"]
    start: int = Field(0, ge=0, le=MAX_INDEX)
    count: int = Field(100, ge=1, le=MAX_PAGE)


class TaskPage(Wire):
    """The tasks from index `start` on; shorter than asked for at the end of the split."""

    split: str
    start: int
    tasks: tuple[Task, ...]


class GroupToScore(Wire):
    """Finished episodes of one task, to be scored together; each as `envgym.episodes.record.to_record` writes it.
    `images` are those that the episodes name, each once."""

    task: Task
    episodes: tuple[dict[str, Any], ...] = Field(min_length=1, max_length=MAX_GROUP)
    images: tuple[ImagePart, ...] = ()


class EpisodeVerdict(Wire):
    """The verdict on one episode: a reward with its score and metrics, or in `problem` why there is none."""

    reward: float | None = None
    score: float | None = None
    metrics: dict[str, float] = {}
    problem: ProblemBody | None = None


class Verdicts(Wire):
    """One verdict for each episode, in their order; None where the environment does not score this group."""

    verdicts: tuple[EpisodeVerdict, ...] | None


# ---------------------------------------------------------------------------------------------------------
# Sessions


class Opening(Wire):
    """Make an instance and reset it with `seed` and `options`; without a `task` the seed draws one.

    `env` may be omitted where the server serves one environment.
    """

    session_id: SessionId
    env: str = ""
    seed: int = Field(ge=-(2**63), lt=2**63)
    task: Task | None = None
    options: dict[str, Any] = {}


class Opened(Wire):
    """The result of `reset`, and its task. `dropped` names the `info` entries JSON cannot carry."""

    task: Task
    observation: Observation
    info: dict[str, Any]
    dropped: tuple[str, ...] = ()
    lease_seconds: float
    """After so long without a request or a heartbeat the session is closed."""


class Step(Wire):
    """One action. `step_id` counts the session's steps from 0."""

    step_id: int = Field(ge=0, le=MAX_INDEX)
    action: Action


class Stepped(Wire):
    """The result of `step`. `dropped` names the `info` entries JSON cannot carry."""

    observation: Observation
    reward: float | None
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    dropped: tuple[str, ...] = ()


class Heartbeat(Wire):
    """Sessions in use."""

    session_ids: tuple[SessionId, ...] = Field(max_length=MAX_HEARTBEAT)


class Alive(Wire):
    """The open ones among a heartbeat's sessions, whose leases restart. The others are lost."""

    alive: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------
# Registrations, from a server to a trainer


class ServerRegistration(Wire):
    """A server that a trainer may dial at `url`, without an environment's name. `instance` is drawn when its process
    starts; `leaving`: it takes no new sessions."""

    version: int = VERSION
    instance: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    url: Annotated[str, Field(max_length=1000)]
    weight: float = Field(1.0, gt=0, le=1e6)
    leaving: bool = False


class Registered(Wire):
    """The trainer's answer: the registration counts for `lease_seconds`. `problems` say why the server is not used."""

    lease_seconds: float = Field(ge=0.1, le=3600)
    problems: tuple[Line, ...] = ()


# ---------------------------------------------------------------------------------------------------------
# Answers


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the server, or of a proxy before it, over HTTP or over a channel. `retry_after` are seconds."""

    status: int
    content_type: str
    content: bytes
    retry_after: float = 1.0


# ---------------------------------------------------------------------------------------------------------
# Health


class Health(Wire):
    """`ok` while the process lives; `ready` while it takes new sessions."""

    status: Literal["ok", "ready"]
