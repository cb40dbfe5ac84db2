"""Images in vLLM's requests. `vllm` states the range of versions.

A request has the token ids as they are recorded, with every image's placeholders. In vLLM's usual prompt those would be
expanded once more, silently; so its own processor makes the tensors, and the request is the input that it makes of a
prompt itself. Three of its methods are private, and are called here alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from envgym.engine import IMAGE_ADVICE, Request
from envgym.errors import DataError, InvalidOutcome
from envgym.types import PlacedImage

CACHE_GIBIBYTES = 1
"""Host memory for processed images; vLLM would take four times as much."""
PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Attributes of Hugging Face's configs that are ids of placeholder tokens."""
FAILURE = "images"
"""The kind of failure of an episode whose images cannot be sampled after."""


def image_arguments(image_size: Mapping[str, int] | None, *, cpu: bool) -> dict[str, Any]:
    """The fields of vLLM's `EngineArgs` for a model whose prompts may have images."""
    from envgym.render.images import size_argument

    return {
        "language_model_only": False,
        "skip_tokenizer_init": False,  # processors need the tokenizer
        "limit_mm_per_prompt": {"video": 0, "audio": 0},
        "mm_processor_cache_gb": CACHE_GIBIBYTES,
        "mm_processor_kwargs": size_argument(image_size) or None,
        "skip_mm_profiling": cpu,  # an image of the largest size takes minutes there, and no memory is to be found out
    }


class Prompts:
    """Makes vLLM's inputs of requests. They `may_have_images` if the engine has loaded a vision-language model whole;
    `image_advice` is that of the `EngineInfo`."""

    def __init__(self, engine: Any) -> None:
        model = engine.vllm_config.model_config
        self._renderer = engine.renderer
        self._processor = engine.renderer.mm_processor
        self.may_have_images = self._processor is not None
        self.image_advice = _advice(model) if self.may_have_images else IMAGE_ADVICE
        ids = (getattr(model.hf_config, name, None) for name in PLACEHOLDERS)
        self._placeholders = frozenset(token for token in ids if isinstance(token, int))

    @contextmanager
    def input(self, token_ids: list[int], images: Sequence[PlacedImage]) -> Iterator[Any]:
        """vLLM's input for a prompt, which is to be added to the engine at once.

        Raises `InvalidOutcome` of kind `images` unless the processor makes exactly the placeholders of the prompt, at
        the positions of its images.
        """
        if not images:
            if self.may_have_images:
                self._check(token_ids, [], images)
            yield {"prompt_token_ids": token_ids}
            return
        if self.image_advice:
            raise InvalidOutcome(FAILURE, self.image_advice)
        from envgym.render.images import open_rgb

        cache, names = self._renderer.mm_processor_cache, [placed.image.sha256 for placed in images]
        is_cached = [False] * len(names) if cache is None else cache.is_cached(names)
        try:
            pixels = [None if c else open_rgb(placed.image) for c, placed in zip(is_cached, images, strict=True)]
        except DataError as error:
            raise InvalidOutcome(FAILURE, str(error)) from None
        try:
            yield self._process(token_ids, images, names, pixels)
        except BaseException:
            # The processor's cache is a copy of the engine's, which has not received these.
            for name in names if cache is not None else ():
                cache.invalidate(name)
            raise

    def _process(
        self, token_ids: list[int], images: Sequence[PlacedImage], names: list[str], pixels: Sequence[Any]
    ) -> Any:
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.parse import parse_mm_uuids
        from vllm.multimodal.processing import ProcessorInputs, TimingContext

        processor, cache = self._processor, self._renderer.mm_processor_cache
        items = processor.info.parse_mm_data({"image": list(pixels)})
        inputs = ProcessorInputs(token_ids, items, parse_mm_uuids({"image": names}), cache=cache)
        result = processor._cached_apply_hf_processor(inputs, TimingContext(enabled=False))
        runs = processor._find_mm_placeholders(token_ids, result.prompt_updates)
        self._check(token_ids, runs.get("image", []), images)
        ranges = {kind: [run.to_range() for run in places] for kind, places in runs.items()}
        return mm_input(token_ids, result.kwargs, result.hashes, ranges)

    def check_sampled(self, request: Request, result: Any) -> None:
        """Raise `InvalidOutcome` if vLLM has sampled after other token ids than the request's, and for a placeholder
        that the policy has sampled: the model would look for its image."""
        if not self.may_have_images:
            return
        if list(result.prompt_token_ids) != list(request.token_ids):
            raise InvalidOutcome("engine", "vLLM has sampled after other token ids than those of the request")
        token_ids = result.outputs[0].token_ids
        if not self._placeholders.isdisjoint(token_ids):
            token = self._renderer.tokenizer.convert_ids_to_tokens(
                next(t for t in token_ids if t in self._placeholders)
            )
            raise InvalidOutcome("placeholder", f"the policy has sampled {token}, the placeholder of an image")

    def _check(self, token_ids: Sequence[int], runs: Sequence[Any], images: Sequence[PlacedImage]) -> None:
        """Raise `InvalidOutcome` unless the runs that the processor would make are those of the images, and all of the
        placeholders belong to them."""
        places = [index for index, token in enumerate(token_ids) if token in self._placeholders]
        by_run = [_embedded(run) for run in runs]
        within = [
            image.start <= run[0] and run[-1] < image.end for image, run in zip(images, by_run, strict=False) if run
        ]
        if len(within) != len(images) or not all(within) or [place for run in by_run for place in run] != places:
            raise InvalidOutcome(
                FAILURE,
                f"a prompt has {len(places)} placeholders for {len(images)} images, of which the model's processor "
                f"finds {len(runs)} with {sum(map(len, by_run))}: an agent passes the images of each observation "
                "beside its token ids (`Extension.images`), unchanged",
            )


def _embedded(run: Any) -> list[int]:
    """The positions of a run at which the model puts an image's features."""
    mask = [True] * run.length if run.is_embed is None else run.is_embed.tolist()
    return [run.start_idx + index for index, is_embedded in enumerate(mask) if is_embedded]


def _advice(model: Any) -> str:
    """The advice for users with images where vLLM computes them for another model; else empty."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and model.is_mm_prefix_lm:
        return (
            f"{model.hf_config.model_type} attends both ways within an image, and vLLM does not on a CPU; sample on a "
            "GPU, or choose another vision-language model"
        )
    return ""
