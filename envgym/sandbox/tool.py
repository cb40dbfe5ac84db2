"""The sandbox as a tool that a policy may call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .sandbox import Execution, Sandbox

_WHY = {
    "timeout": "The program was ended: it ran out of time.",
    "memory": "The program needed more memory than allowed.",
    "output": "The program was ended: it printed more than allowed.",
    "processes": "The program was ended: it started too many processes.",
}


def python_tool(sandbox: Sandbox, *, max_characters: int = 4000) -> Callable[[str], Awaitable[str]]:
    """A function for `Tool.of` that runs programs in `sandbox`. Each starts anew; nothing is kept between calls.

    Of longer results the middle is left out.
    """

    async def python(code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept from one call to the next.

        Args:
            code: The whole program. Use print() to see values.
        """
        return _shortened(_report(await sandbox.run(code)), max_characters)

    return python


def _report(done: Execution) -> str:
    """The output, then the errors, then what there is to say about the end."""
    parts = [done.stdout.strip("\n"), done.stderr.strip("\n")]
    if done.reason in _WHY:
        parts.append(_WHY[done.reason])
    elif done.exit and not done.stderr.strip():
        parts.append(f"The program ended with exit status {done.exit}.")
    return "\n".join(part for part in parts if part) or "The program printed nothing."


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 2], text[-(limit // 2) :]
    return f"{head}\n[… {len(text) - len(head) - len(tail)} characters left out …]\n{tail}"
