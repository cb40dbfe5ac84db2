"""Tasks from the user's own data: files, folders and generators, mixed, and split into train and held-out."""

from .columns import Form, prompt_key
from .config import DataConfig, SourceConfig
from .interleave import InProportion, Interleaved
from .named_sets import NamedTaskSet
from .split import TaskSplits, load_tasks
from .task_set import GeneratedTasks, SeededTasks, TaskList, TaskSet

__all__ = [
    "DataConfig", "Form", "GeneratedTasks", "InProportion", "Interleaved", "NamedTaskSet", "SeededTasks",
    "SourceConfig", "TaskList", "TaskSet", "TaskSplits", "load_tasks", "prompt_key",
]  # fmt: skip
