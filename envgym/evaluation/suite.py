"""A suite: a named set of environments to measure a policy on, with how each is played and what it weighs.

Suites are YAML files; those that ship with envgym are in `suites/` beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from envgym.config.missing import Part, needs
from envgym.config.schema import Component, ComponentField
from envgym.config.words import AUTO
from envgym.errors import ConfigError, NameNotFound, did_you_mean
from envgym.settings import Settings, validated
from envgym.yaml_files import read_yaml

SHIPPED = Path(__file__).with_name("suites")
STANDARD = "standard"
"""The size where none is asked for and the suite has several."""


class Sampling(Settings):
    """Sampling parameters of a suite; what is unset is the run's (`rollout.…`)."""

    temperature: float | None = Field(None, ge=0)
    """0 is greedy."""
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)


class SuiteEnv(Settings):
    """One environment of a suite. What is unset is the suite's."""

    env: ComponentField
    """Environment: id, `file.py[:Name]`, import path or URL, and its own settings."""
    agent: ComponentField = Component(name=AUTO)
    data: dict[str, Any] = Field(default_factory=dict)
    """Source of the environment's tasks, as in a run."""
    split: str = "test"
    """Split whose first tasks are played."""
    tasks: int | None = Field(None, ge=1)
    """Tasks; where the split has fewer, all of them."""
    samples: int | None = Field(None, ge=1)
    """Episodes of each task."""
    sampling: Sampling = Sampling()
    weight: float = Field(1.0, ge=0)
    """Weight of its score in the suite's; with 0 it is only shown."""
    success: float = Field(1.0, gt=0, le=1)
    """A score of at least this is a success: for the success rate, pass@k and pass^k."""
    cluster: str | None = None
    """Field of the tasks that those share which belong together (questions about one text): their errors are not
    independent, and the interval is by these clusters."""


def _env_alone(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: {"env": item} if isinstance(item, str) else item for name, item in value.items()}


class Suite(Settings):
    """Environments by name, in the order they are played."""

    description: str = ""
    include: list[str] = Field(default_factory=list)
    """Other suites, as `NAME` or `NAME:SIZE`, whose environments become part of this one as `NAME/ENVIRONMENT`. They
    keep their own tasks, samples and sampling. Files are looked for beside this one."""
    sizes: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Tasks of each environment by the name of a size; one is chosen by `--suite NAME:SIZE`."""
    tasks: int | None = Field(None, ge=1)
    """Tasks of each environment, where there are no sizes."""
    samples: int = Field(1, ge=1)
    """Episodes of each task."""
    sampling: Sampling = Sampling()
    environments: Annotated[dict[str, SuiteEnv], BeforeValidator(_env_alone)] = Field(default_factory=dict)

    _within: tuple[Path, ...] = PrivateAttr(())
    """The files of this suite and of those that include it, the innermost last."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.environments or self.include):
            raise ValueError("a suite needs environments, or others that it includes")
        for name in self.environments:
            if not name or "/" in name or name != name.strip():
                raise ValueError(f"an environment of a suite needs a name without a slash, not {name!r}")
        if self.sizes and self.tasks is not None:
            raise ValueError("give a suite either `tasks` or `sizes`")
        if not self.environments and self.model_fields_set & {"sizes", "tasks", "samples", "sampling"}:
            raise ValueError("what a suite includes keeps its own tasks, samples and sampling: say them there")
        return self

    def of_size(self, size: str | None) -> dict[str, SuiteEnv]:
        """The environments with the suite's own settings written into each. Raises `ConfigError` for a size
        that the suite has not."""
        if size is not None and size not in self.sizes:
            sizes = ", ".join(self.sizes) or "none"
            raise ConfigError(f"the suite has no size {size!r} (sizes: {sizes}).{did_you_mean(size, self.sizes)}")
        chosen = size or (STANDARD if STANDARD in self.sizes else next(iter(self.sizes), None))
        tasks = self.tasks if chosen is None else self.sizes[chosen]
        found: dict[str, SuiteEnv] = {}
        for included in self.include:
            name, suite, its_size = find_suite(included, self._within)
            for env, item in suite.of_size(its_size).items():
                if f"{name}/{env}" in found:
                    raise ConfigError(
                        f"the suite includes two suites of the name {name!r}: an environment is in it once"
                    )
                found[f"{name}/{env}"] = item
        for name, item in self.environments.items():
            sampling = {**self.sampling.model_dump(), **item.sampling.model_dump(exclude_none=True)}
            own = {"sampling": Sampling(**sampling), "samples": item.samples or self.samples}
            found[name] = item.model_copy(update={**own, "tasks": item.tasks or tasks})
        if not any(env.weight for env in found.values()):
            raise ConfigError("every environment of the suite has weight 0: then it has no score")
        return found


def parts_of(suite: Suite, size: str | None = None) -> list[Part]:
    """The components that a suite names."""
    items = suite.of_size(size).values()
    return [*(("env", item.env.name) for item in items), *(("agent", item.agent.name) for item in items)]


def suite_names() -> list[str]:
    """The suites that ship with envgym."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_suite(given: str, within: tuple[Path, ...] = ()) -> tuple[str, Suite, str | None]:
    """The name, the suite and the size that `NAME`, `NAME:SIZE`, `FILE.yaml` or `FILE.yaml:SIZE` means. `within` are
    the files that include it, beside the last of which it is looked for.

    Raises `NameNotFound` for an unknown name, `ConfigError` for a file that is missing or malformed.
    """
    name, _, size = given.partition(":")
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = within[-1].parent / name if within else Path(name)
    elif name in suite_names():
        path = SHIPPED / f"{name}.yaml"
    else:
        known = suite_names()
        there_are = f"There are {', '.join(map(_listed, known))}, and YAML files"
        raise NameNotFound(f"there is no suite {name!r}.{did_you_mean(name, known)} {there_are}")
    if path.resolve() in (outer.resolve() for outer in within):
        raise ConfigError(f"suite {path} includes itself")
    suite = validated(Suite, read_yaml(path), f"suite {path}")
    suite._within = (*within, path)
    return path.stem, suite, size or None


def _listed(name: str) -> str:
    lacks = needs(parts_of(find_suite(name)[1]))
    return f"{name} ({lacks})" if lacks else name
