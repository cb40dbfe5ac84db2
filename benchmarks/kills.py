"""Check, over 300 kills, that no process survives the death of the parent that started it.

    python benchmarks/kills.py [--kills 300]

Parents of every kind alternate: of workers, vLLM engines, grading processes, sandboxes, tool servers, and a served
environment. Each is killed while it works, either immediately or after one of its children that has children itself;
all processes that it had started must be gone within ten seconds.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from record import conditions, store

LIMIT = 10.0
"""Time limit for all processes to end, in seconds."""
READY = "print('ready', flush=True); await asyncio.sleep(600)"
START = "import asyncio, sys, tempfile\nasync def main():\n"
PARENTS = {
    "workers": """
    from envgym.processes.local import LocalRuntime
    runtime = LocalRuntime(tempfile.mkdtemp())
    workers = [await runtime.start("types:SimpleNamespace", {}, name=f"worker-{n}") for n in range(2)]
""",
    "graders": """
    from envgym.registry import spec
    graded = spec("math_verify")
    await graded.ensure_setup()
    await graded.grade("x + 1", "1 + x")
    asyncio.create_task(graded.grade("9^{9^{9^9}}", "1"))
""",
    "sandboxes": """
    from envgym.sandbox import Limits, Sandbox
    sandbox = Sandbox(Limits(wall_seconds=600, cpu_seconds=600))
    await sandbox.run("print(1)")
    for _ in range(2):
        asyncio.create_task(sandbox.run("import time; time.sleep(600)"))
    await asyncio.sleep(0.5)
""",
    "tool servers": """
    from envgym.tools import McpServer
    session = McpServer(command=[sys.executable, "tests/tools/mcp_program.py"]).session()
    await session.start()
""",
    "engines": """
    from envgym.engines import TARGETS
    from envgym.engines.spec import EngineSpec
    from envgym.processes.local import LocalRuntime
    runtime = LocalRuntime(tempfile.mkdtemp())
    engine = await runtime.start(TARGETS["vllm"], {"spec": EngineSpec(sys.argv[1])}, name="engine")
""",
}
SERVED = (str(Path(sys.executable).with_name("envgym")), "serve", "math_verify", "code", "--port", "0")
ENGINES = 0.05
"""Share of kills of engines, each of which takes ten seconds to start."""


def start(kind: str, model: str) -> subprocess.Popen[str]:
    """Start a parent, and return when its children are at work."""
    words = SERVED if kind == "servers" else ("-c", START + PARENTS[kind] + f"    {READY}\nasyncio.run(main())", model)
    parent = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout is not None
    for line in parent.stdout:
        if "ready" in line or "http://" in line:
            return parent
    raise RuntimeError(f"the parent of {kind} ended with {parent.wait()}")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(parent: psutil.Process, child: psutil.Process | None) -> tuple[int, list[psutil.Process], float]:
    """Kill a child, if there is one, and then the parent. Returns the number of its descendants, those that survive,
    and the seconds until the last one ended."""
    below = parent.children(recursive=True)
    if child is not None:
        child.kill()
    began = time.monotonic()
    parent.kill()
    while (living := [each for each in below if is_alive(each)]) and time.monotonic() < began + LIMIT:
        time.sleep(0.01)
    return len(below), living, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    wanted = parser.parse_args().kills
    rng = random.Random(0)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = tempfile.mkdtemp()
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(model)
    kinds = itertools.cycle([kind for kind in (*PARENTS, "servers") if kind != "engines"])
    order = ["engines" if number % round(1 / ENGINES) == 0 else next(kinds) for number in range(wanted)]
    kills: collections.Counter[str] = collections.Counter()
    survivors: list[str] = []
    processes, slowest = 0, 0.0
    for number, kind in enumerate(order, 1):
        parent = start(kind, model)
        family = psutil.Process(parent.pid)
        inner = [child for child in family.children(recursive=True) if child.children()]
        count, living, seconds = kill(family, rng.choice(inner) if inner and number % 2 else None)
        processes, slowest = processes + count, max(slowest, seconds)
        survivors += [f"{kind}: {each}" for each in living]
        parent.wait()
        kills[kind] += 1
        if number % 20 == 0:
            print(f"{number} of {wanted} kills, {len(survivors)} survivors", flush=True)
    numbers = {"processes": processes, "survivors": survivors, "slowest_seconds": round(slowest, 2)}
    store("kills", {"conditions": conditions(("vllm", "psutil")), "kills": dict(kills), **numbers})
    sys.exit(bool(survivors))


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    main()
