"""Untrusted programs, each in a process that is isolated from the host's files, users and network."""

from .sandbox import Execution, Limits, Sandbox
from .tool import python_tool

__all__ = ["Execution", "Limits", "Sandbox", "python_tool"]
