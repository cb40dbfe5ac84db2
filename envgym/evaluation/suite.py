"""A suite: a named set of environments to evaluate a policy on, each with its settings and its weight.

Suites are YAML files; the shipped ones are in `suites/` beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from envgym.config.schema import Component, ComponentField
from envgym.config.words import AUTO
from envgym.errors import ConfigError, NameNotFound, did_you_mean
from envgym.settings import Settings, validate_settings
from envgym.yaml_files import read_yaml

SHIPPED = Path(__file__).with_name("suites")
STANDARD = "standard"
"""The default size of a suite that has several."""


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
    """Split whose first tasks are run."""
    tasks: int | None = Field(None, ge=1)
    """Number of tasks; all of them if the split has fewer."""
    samples: int | None = Field(None, ge=1)
    """Episodes per task."""
    sampling: Sampling = Sampling()
    weight: float = Field(1.0, ge=0)
    """Weight of its score in the suite's; with 0 it is only shown."""
    success: float = Field(1.0, gt=0, le=1)
    """A score of at least this is a success: for the success rate, pass@k and pass^k."""
    cluster: str | None = None
    """Field of the tasks by which they are clustered (questions about one text): errors within a cluster are not
    independent, so the interval is computed over clusters."""


def _env_alone(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: {"env": item} if isinstance(item, str) else item for name, item in value.items()}


class Suite(Settings):
    """Environments by name, in the order in which they are run."""

    description: str = ""
    include: list[str] = Field(default_factory=list)
    """Other suites, as `NAME` or `NAME:SIZE`, whose environments become part of this one as `NAME/ENVIRONMENT`. They
    keep their own tasks, samples and sampling. Those without a size take the one that is asked for. File names are
    relative to this file's folder."""
    sizes: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Tasks per environment by the name of a size; `--suite NAME:SIZE` chooses one."""
    tasks: int | None = Field(None, ge=1)
    """Tasks per environment, for a suite without sizes."""
    samples: int = Field(1, ge=1)
    """Episodes per task."""
    sampling: Sampling = Sampling()
    environments: Annotated[dict[str, SuiteEnv], BeforeValidator(_env_alone)] = Field(default_factory=dict)

    _files: tuple[Path, ...] = PrivateAttr(())
    """The files of the including suites, outermost first, and of this one."""

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
            raise ValueError("included suites keep their own tasks, samples and sampling: set them there")
        return self

    def sized_environments(self, size: str | None) -> dict[str, SuiteEnv]:
        """The environments with the suite's settings written into each. Raises `ConfigError` for an unknown size."""
        if size is not None and size not in self.sizes and (self.environments or not self.include):
            sizes = ", ".join(self.sizes) or "none"
            raise ConfigError(f"the suite has no size {size!r} (sizes: {sizes}).{did_you_mean(size, self.sizes)}")
        default = STANDARD if STANDARD in self.sizes else next(iter(self.sizes), None)
        size_name = size if size in self.sizes else default
        tasks = self.tasks if size_name is None else self.sizes[size_name]
        environments: dict[str, SuiteEnv] = {}
        for reference in self.include:
            name, suite, suite_size = find_suite(reference, self._files)
            for env, item in suite.sized_environments(suite_size or size).items():
                if f"{name}/{env}" in environments:
                    raise ConfigError(
                        f"the suite includes two suites named {name!r} with the same environment: include one of them"
                    )
                environments[f"{name}/{env}"] = item
        for name, item in self.environments.items():
            sampling = {**self.sampling.model_dump(), **item.sampling.model_dump(exclude_none=True)}
            overrides = {"sampling": Sampling(**sampling), "samples": item.samples or self.samples}
            environments[name] = item.model_copy(update={**overrides, "tasks": item.tasks or tasks})
        if not any(env.weight for env in environments.values()):
            raise ConfigError("every environment of the suite has weight 0: give one a positive weight")
        return environments


def suite_names() -> list[str]:
    """The names of the shipped suites."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_suite(reference: str, including: tuple[Path, ...] = ()) -> tuple[str, Suite, str | None]:
    """The name, the suite and the size of `NAME`, `NAME:SIZE`, `FILE.yaml` or `FILE.yaml:SIZE`. `including`: the files
    that include it, outermost first; a file name is relative to the last one's folder.

    Raises `NameNotFound` for an unknown name, `ConfigError` for a file that is missing or malformed.
    """
    name, _, size = reference.partition(":")
    if name.endswith((".yaml", ".yml")) or "/" in name:
        path = including[-1].parent / name if including else Path(name)
    elif name in suite_names():
        path = SHIPPED / f"{name}.yaml"
    else:
        names = suite_names()
        choices = f"There are {', '.join(names)}, and YAML files"
        raise NameNotFound(f"there is no suite {name!r}.{did_you_mean(name, names)} {choices}")
    if path.resolve() in (outer.resolve() for outer in including):
        raise ConfigError(f"suite {path} includes itself")
    suite = validate_settings(Suite, read_yaml(path), f"suite {path}")
    suite._files = (*including, path)
    return path.stem, suite, size or None
