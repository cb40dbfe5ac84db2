"""Weights of workers and engines in one file, as tests compare them."""

import hashlib
import os
from pathlib import Path

from safetensors.torch import load_file

from envgym.engine import Bucket
from envgym.models.weights_file import checksum

ALL = 2**40
"""Bytes of a bucket that holds any model."""


def export(worker, path):
    """Write all of a `ModelWorker`'s weights to `path`."""
    worker.begin_export(ALL, str(path))
    os.replace(worker.next_bucket().path, path)


async def export_group(group, path):
    """Write all of a `WorkerGroup`'s weights to `path`."""
    await group.on_all(lambda rank: rank.begin_export(ALL, str(path)))
    bucket, *_ = await group.on_all(lambda rank: rank.next_bucket())
    os.replace(bucket.path, path)


def bucket_of(path, number=0):
    """A file as a bucket."""
    return Bucket(number, str(path), Path(path).stat().st_size, checksum(load_file(path)))


async def load(engine, path, version):
    """Give an engine, behind its handle, the weights of a file."""
    await engine.call(lambda engine: engine.begin_weights())
    await engine.call(lambda engine: engine.load_bucket(bucket_of(path)))
    await engine.call(lambda engine: engine.end_weights(1, version))


def weights(run: Path) -> str:
    """The hash of the weights that a run has trained."""
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()
