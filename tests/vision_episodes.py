"""Episodes with images, sampled by vLLM, and the same log-probabilities by transformers."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from envgym.agents.token_level import extend
from envgym.engine import Bucket, SamplingParams
from envgym.engines import choose_engine
from envgym.engines.pool import EngineClient, EnginePool
from envgym.engines.spec import EngineSpec
from envgym.errors import InvalidOutcome
from envgym.models.weights_file import checksum
from envgym.processes.local import LocalRuntime
from envgym.render import RenderConfig, Renderer, load_renderer
from envgym.transcript import EpisodeSampler, Transcript
from envgym.types import ImagePart, Message, Observation
from tests.vision_models import make_vision_model

CORPUS = ["What colour is it?\n\nAnd now?\n", "Look:\n\n\nred, green or blue.\n\n"] * 3
SIZES = [(56, 56), (40, 100), (200, 64), (31, 47)]
TURNS: list[list[str | int]] = [["Look:\n\n\n", 0, "\n\n", 1], [2, "And now?"], ["\n", 3, " and ", 0]]
"""Observations; a number is a picture."""


def picture(number: int, seed: int = 0) -> ImagePart:
    """A picture of noise, in one of the `SIZES`."""
    width, height = SIZES[number]
    pixels = np.random.default_rng([number, seed]).integers(0, 256, (height, width, 3), np.uint8)
    return ImagePart.from_value(Image.fromarray(pixels))


class Model:
    """A model in transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processor: Any = AutoProcessor.from_pretrained(folder)

    @cached_property
    def model(self) -> Any:
        return AutoModelForImageTextToText.from_pretrained(self.folder).eval()

    def logprobs(self, token_ids: list[int], images: Sequence[ImagePart]) -> np.ndarray:
        """log p(token t | tokens before t) for t = 1 .. T-1 of a sequence with these images."""
        mark = getattr(self.processor, "boi_token", None) or self.processor.image_token
        opened = [Image.open(io.BytesIO(image.read())) for image in images]
        inputs = self.processor(text=[mark * len(images)], images=[opened], return_tensors="pt")
        inputs |= {"input_ids": torch.tensor([token_ids]), "attention_mask": torch.ones(1, len(token_ids))}
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inputs:
                inputs[name] = torch.tensor(self.processor.create_mm_token_type_ids([token_ids]))
        with torch.no_grad():
            logprobs = self.model(**inputs, use_cache=False).logits[0, :-1].log_softmax(-1)
        return np.array(logprobs.gather(1, inputs["input_ids"][0, 1:, None])[:, 0])


def with_engine(folder: Path, logs: Path, body: Callable[[EnginePool], Awaitable[Any]], **settings: Any) -> Any:
    """Run `body` with a pool of one engine, which samples from the model in `folder`."""

    async def main() -> Any:
        runtime = LocalRuntime(logs)

        async def start(number: int) -> EngineClient:
            arguments = {"spec": EngineSpec(str(folder), max_model_len=512, **settings)}
            environ = {"OMP_NUM_THREADS": "1"}
            return EngineClient(await runtime.start(choose_engine("vllm")[0], arguments, name="vllm", environ=environ))

        try:
            return await body(await EnginePool.start(start, 1))
        finally:
            await runtime.close()

    return asyncio.run(main())


async def play(pool: EnginePool, renderer: Renderer, seed: int, pictures: int, max_tokens: int) -> Transcript | None:
    """An episode of three turns, with pictures of the seed `pictures` in each; None if the policy has sampled a
    placeholder."""
    dialogue, sampling = renderer.dialogue(), SamplingParams(max_tokens, stop_token_ids=renderer.stop_token_ids)
    transcript = Transcript(EpisodeSampler(pool, f"{seed}.{pictures}", sampling, 512, seed))
    for number, parts in enumerate(TURNS):
        content = [picture(part, pictures) if isinstance(part, int) else part for part in parts]
        observation = Observation(messages=(Message("user", content),))
        extend(transcript, dialogue.add_observation(observation) if number else dialogue.begin(observation))
        try:
            dialogue.add_policy_turn((await transcript.sample()).token_ids)
        except InvalidOutcome as error:
            if error.kind != "placeholder":
                raise
            return None
    return transcript


def differences(model: Model, transcripts: Iterable[Transcript], version: int, pictures: int | None = None) -> Any:
    """The absolute differences in nats between the sampler's log-probabilities and a model's, of all tokens that a
    version of the policy sampled; with the pictures of another seed, if given."""
    result: list[float] = []
    shown = [(picture(number, seed).sha256, number, seed) for number in range(len(SIZES)) for seed in range(2)]
    by_name = {name: picture(number, seed if pictures is None else pictures) for name, number, seed in shown}
    for row in (row for transcript in transcripts for row in transcript.rows if row.turns):
        reference, start = model.logprobs(row.token_ids.tolist(), [by_name[image.sha256] for image in row.images]), 0
        for segment in row.segments:
            for span in segment.versions:
                if span.version == version:
                    expected = reference[start + span.start - 1 : start + span.end - 1]
                    result += list(np.abs(np.array(segment.logprobs)[span.start : span.end] - expected))
            start += len(segment)
    return np.array(result)


def bucket_of(folder: Path) -> Bucket:
    """The weights of a model as they are sent to engines."""
    path = folder / "model.safetensors"
    return Bucket(0, str(path), path.stat().st_size, checksum(load_file(path)))


def compare_family(kind: str, folder: Path) -> dict[str, Any]:
    """Sample episodes of a family's models with images before, during and after new weights. Returns the number of
    tokens, and the mean and the largest difference to transformers, for each; and for the first the mean with other
    pictures of the same sizes."""
    first, second = (make_vision_model(kind, folder / str(number), CORPUS, seed=number) for number in range(2))
    renderer = load_renderer(str(first), RenderConfig())

    async def body(pool: EnginePool) -> list[list[Transcript]]:
        async def play_all(seed: int, count: int, max_tokens: int) -> list[Transcript]:
            episodes = (play(pool, renderer, seed + n, n % 2, max_tokens) for n in range(count))
            return [transcript for transcript in await asyncio.gather(*episodes) if transcript]

        before = await play_all(0, 4, 10)
        bucket = bucket_of(second)  # before the turns begin: they do not wait for it
        [client] = pool.clients
        steps = await client.call(lambda engine: engine.steps())
        playing = asyncio.create_task(play_all(100, 24, 80))
        while await client.call(lambda engine: engine.steps()) < steps + 8:
            pass
        await pool.on_all(lambda engine: engine.begin_weights())
        await pool.on_all(lambda engine: engine.load_bucket(bucket))
        await pool.on_all(lambda engine: engine.end_weights(1, 1))
        return [before, await playing, await play_all(200, 4, 10)]

    before, during, after = with_engine(first, folder, body)
    spans = [segment.versions for t in during for row in t.rows for segment in row.segments]
    assert any(len(versions) == 2 for versions in spans), "no turn has tokens of both versions"
    old, new, figures = Model(first), Model(second), dict[str, Any]()
    for name, model, transcripts, version in (
        ("before", old, before, 0), ("during", new, during, 1), ("until then", old, during, 0),
        ("after", new, after, 1),
    ):  # fmt: skip
        found = differences(model, transcripts, version)
        figures[name] = {"tokens": len(found), "mean": float(found.mean()), "max": float(found.max())}
    figures["with other pictures"] = float(differences(old, before, 0, pictures=2).mean())
    return figures


def check_figures(figures: dict[str, Any]) -> None:
    """Invariant 2 of images: mean below 1e-6 nats, and the pictures matter."""
    assert figures.pop("with other pictures") > 1e-3
    for name, figure in figures.items():
        assert figure["tokens"] >= 40, name
        assert figure["mean"] < 1e-6, name
        assert figure["max"] < 1e-4, name
