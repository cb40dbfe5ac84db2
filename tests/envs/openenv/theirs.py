"""OpenEnv's own clients, for a Python that has the package: `python theirs.py URL < jobs.json`.

A job is `{"reset": {…}, "actions": […]}`. Prints for each its first observation and its steps to the end of the
episode: `{"first": …, "steps": [[observation, reward, done], …]}`. A job with `calls`, pairs of a tool and its
arguments, is played by the client of tools: `{"tools": [names], "results": […]}`. The variable `PEER_TOKEN` holds a
token.
"""

import asyncio
import json
import os
import sys

from openenv.core import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient


async def play(client, job):
    first = await client.reset(**job["reset"])
    steps = []
    for action in job["actions"]:
        result = await client.step(action)
        steps.append([result.observation, result.reward, result.done])
        if result.done:
            break
    return {"first": first.observation, "steps": steps}


async def call(client, job):
    await client.reset(**job["reset"])
    tools = [tool.name for tool in await client.list_tools()]
    return {"tools": tools, "results": [await client.call_tool(name, **given) for name, given in job["calls"]]}


async def main(url, jobs):
    token = os.environ.get("PEER_TOKEN")
    headers = {"headers": {"Authorization": f"Bearer {token}"}} if token else {}
    results = []
    for job in jobs:
        kind, run = (MCPToolClient, call) if "calls" in job else (GenericEnvClient, play)
        async with kind(base_url=url, **headers) as client:
            results.append(await run(client, job))
    print(json.dumps(results))


asyncio.run(main(sys.argv[1], json.load(sys.stdin)))
