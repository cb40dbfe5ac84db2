"""The real rollout collector, on the servers that a head server knows: collect.py HEAD_PORT ROWS OUT REPEATS …"""

import asyncio
import os
import sys

port, *jobs = sys.argv[1:]
os.environ["NEMO_GYM_CONFIG_DICT"] = f"head_server: {{host: 127.0.0.1, port: {port}}}"

from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper  # noqa: E402


async def main():
    for rows, out, repeats in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
        config = RolloutCollectionConfig(
            input_jsonl_fpath=rows, output_jsonl_fpath=out, num_repeats=int(repeats), upload_rollouts_to_wandb=False
        )
        await RolloutCollectionHelper().run_from_config(config)


asyncio.run(main())
