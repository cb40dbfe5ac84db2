"""Tasks from the user's own data: files, folders and generators, mixed, and split into train and held-out."""

from envgym.env import GeneratedTasks

from .columns import Form, prompt_key
from .config import DataConfig, SourceConfig
from .interleave import InProportion, Interleaved
from .named_sets import NamedTaskSet
from .spec import DataEnvConfig, DataEnvSpec
from .split import TaskSplits, load_tasks

__all__ = [
    "DataConfig", "DataEnvConfig", "DataEnvSpec", "Form", "GeneratedTasks", "InProportion", "Interleaved",
    "NamedTaskSet", "SourceConfig", "TaskSplits", "load_tasks", "prompt_key",
]  # fmt: skip
