"""The sandbox as a tool that a policy may call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .sandbox import Execution, Sandbox

_REASONS = {
    "timeout": "The program was ended: it ran out of time.",
    "memory": "The program needed more memory than allowed.",
    "output": "The program was ended: it printed more than allowed.",
    "processes": "The program was ended: it started too many processes.",
}


def python_tool(sandbox: Sandbox) -> Callable[[str], Awaitable[str]]:
    """A function for `Tool.from_function`: the policy gives it a program, and gets what the program prints. Each call
    runs in a new process of `sandbox`."""

    async def python(code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept from one call to the next.

        Args:
            code: The whole program. Use print() to see values.
        """
        return _format(await sandbox.run(code))

    return python


def _format(execution: Execution) -> str:
    """The output, the errors, and the reason of the end."""
    parts = [execution.stdout.strip("\n"), execution.stderr.strip("\n")]
    if execution.reason in _REASONS:
        parts.append(_REASONS[execution.reason])
    elif execution.exit and not execution.stderr.strip():
        parts.append(f"The program ended with exit status {execution.exit}.")
    return "\n".join(part for part in parts if part) or "The program printed nothing."
