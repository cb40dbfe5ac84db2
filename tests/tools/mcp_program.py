"""An MCP server that the tests start: `mcp_program.py [--port N] [--chatty] [--stubborn] [--hang] [--die]`."""

import argparse
import asyncio
import base64
import os
import signal
import subprocess
import sys
import time
from typing import Literal

if "--die" in sys.argv:
    sys.exit("no licence found")
if "--hang" in sys.argv:
    time.sleep(600)

# After the above, which is why they need no more than an instant: the imports take most of a second.
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

RED = "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAIAAAAiZtkUAAAAEklEQVR4nGP8z4AOmDBEiBQCAEwxAQdOPbOMAAAAAElFTkSuQmCC"
server = MCPServer("test", log_level="ERROR")
notes: dict[str, list[str]] = {}
sleepers = 0
three = asyncio.Barrier(3)


@server.tool()
def add(a: int, b: int, sign: Literal["+", "-"] = "+") -> int:
    """Add two numbers."""
    return a + b if sign == "+" else a - b


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(f"there is no {why}\nand never was")


@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep."""
    global sleepers
    sleepers += 1
    await asyncio.sleep(seconds)
    return "slept"


@server.tool()
def slept() -> int:
    """How often sleeping was begun."""
    return sleepers


@server.tool()
async def meet() -> str:
    """Return once three calls are there."""
    await three.wait()
    return "met"


@server.tool()
def note(word: str, context: Context) -> list[str]:
    """Note a word of this session's."""
    session = (context.headers or {}).get("mcp-session-id", "")
    notes.setdefault(session, []).append(word)
    return notes[session]


@server.tool()
def header(name: str, context: Context) -> str:
    """A header of the request."""
    return (context.headers or {}).get(name, "none")


@server.tool()
def variable(name: str) -> str:
    """An environment variable."""
    return os.environ.get(name, "none")


@server.tool()
def pid() -> int:
    """The server's process."""
    return os.getpid()


@server.tool()
def child() -> int:
    """Start a process that outlives the server."""
    return subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).pid


@server.tool()
def daemon() -> list[int]:
    """Start processes in sessions of their own: a child, and an orphan."""
    child = subprocess.Popen(
        ["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    source = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid)"
    orphan = subprocess.check_output([sys.executable, "-c", source], stdin=subprocess.DEVNULL)
    return [child.pid, int(orphan)]


@server.tool()
def look(kinds: list[str]) -> list[Image | str]:
    """Pictures: `red`, a PNG; `broken`, its beginning; `text`, none."""
    red = base64.b64decode(RED)
    contents = {"red": red, "broken": red[:50], "text": b"text"}
    return ["See:", *(Image(data=contents[kind], format="png") for kind in kinds), "That is all."]


@server.tool()
def die() -> str:
    """End the server."""
    print("out of paper", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    for flag in ("--chatty", "--stubborn"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if options.chatty:
        print("Welcome to the test!\nIt is free.", flush=True)
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.port:
        server.run("streamable-http", port=options.port)
    else:
        server.run()
    if options.stubborn:  # its input has ended
        time.sleep(600)
