"""What the environments of both kinds of file have in common: the file, where it runs, and how prompts are posed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field

from envgym.env import Env
from envgym.hashing import text_hash
from envgym.isolation.processes import Processes
from envgym.registry import spec_from_json
from envgym.tasks import DataEnvConfig, DataEnvSpec


class ForeignFileConfig(DataEnvConfig):
    """Settings of both."""

    processes: int = Field(1, ge=1)
    """Processes that run the file. What blocks in one holds up what else runs there."""
    logs: str | None = None
    """Folder for what the file prints. Unset: a temporary one, kept where something went wrong."""


class ForeignFile(DataEnvSpec):
    """The environment of a file; `for_file` makes a subclass for each. The file runs in processes of its own."""

    Config = ForeignFileConfig
    config: ForeignFileConfig
    answer_required = False
    path: ClassVar[Path]
    name: ClassVar[str]
    env: ClassVar[type[Env]]
    host: ClassVar[str]
    """The class that runs in the processes."""

    processes: Processes

    @classmethod
    def for_file(cls, path: Path, name: str, about: str | None) -> type[Self]:
        """The environment of what is called `name` in the file at `path`."""
        about = about or f"{name} of {path.name}, written for OpenRLHF."
        return type(path.stem, (cls,), {"path": path, "name": name, "__doc__": about})

    def __init__(self, id: str, env_class: type[Env] | None = None, /, **kwargs: Any) -> None:
        super().__init__(id, env_class or self.env, **kwargs)

    def __reduce__(self) -> Any:
        return spec_from_json, (self.to_json(),)

    def fingerprint(self) -> dict[str, str]:
        return super().fingerprint() | {"code": text_hash(self.path.read_text(errors="replace"))}

    async def setup(self) -> None:
        await super().setup()
        self.tasks("train")  # where there are none, that is said before anything is started
        target = {"target": f"{self.path}:{self.name}"}
        settings = self.config
        self.processes = Processes(self.host, target, count=settings.processes, name=self.path.stem, logs=settings.logs)
        await self.processes.start()

    async def teardown(self) -> None:
        await self.processes.close()
        await super().teardown()
