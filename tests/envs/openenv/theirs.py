"""Play episodes with OpenEnv's own client, for a Python that has the package: `python theirs.py URL < jobs.json`.

Each job is `{"seed": …, "actions": […]}`. Prints a list for each: the rewards of its steps, to the end of the episode.
"""

import asyncio
import json
import os
import sys

from openenv.core import GenericEnvClient


async def main(url, jobs):
    token = os.environ.get("PEER_TOKEN")
    headers = {"headers": {"Authorization": f"Bearer {token}"}} if token else {}
    results = []
    for job in jobs:
        async with GenericEnvClient(base_url=url, **headers) as client:
            await client.reset(seed=job["seed"])
            results.append([])
            for action in job["actions"]:
                result = await client.step(action)
                results[-1].append(result.reward)
                if result.done:
                    break
    print(json.dumps(results))


asyncio.run(main(sys.argv[1], json.load(sys.stdin)))
