"""Images in vLLM's requests. `vllm` states the range of versions.

A request has the token ids as they are recorded, with every image's placeholders. In vLLM's usual prompt those would be
expanded once more, silently; so its own processor makes the tensors, and the request is the input that it makes of a
prompt itself. Three of its methods are private, and are called here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envgym.engine import Request
from envgym.errors import DataError, InvalidOutcome
from envgym.models.vision import placeholder_ids, takes_images
from envgym.types import PlacedImage

from .spec import EngineSpec

CACHE_GIBIBYTES = 1
"""Host memory for processed images; vLLM would take four times as much."""
FAILURE = "images"
"""The kind of failure of an episode whose images cannot be sampled after."""


def image_arguments(spec: EngineSpec, config: Any, *, cpu: bool) -> dict[str, Any]:
    """The fields of vLLM's `EngineArgs` for a vision-language model; none for another Hugging Face config. Raises
    `MissingDependency` without torchvision."""
    if not takes_images(config):
        return {}
    from envgym.render.images import check_torchvision, size_argument

    check_torchvision()
    return {
        "language_model_only": False,
        "skip_tokenizer_init": False,  # processors need the tokenizer
        "limit_mm_per_prompt": {"video": 0, "audio": 0},
        "mm_processor_cache_gb": CACHE_GIBIBYTES,
        "mm_processor_kwargs": size_argument(spec.image_size) or None,
        "skip_mm_profiling": cpu,  # an image of the largest size takes minutes there, and no memory is to be found out
    }


class Prompts:
    """Makes vLLM's inputs for a vision-language model that is loaded whole. `image_advice` is that of `EngineInfo`."""

    def __init__(self, engine: Any) -> None:
        model = engine.vllm_config.model_config
        self._engine, self._renderer = engine, engine.renderer
        self.image_advice = _advice(model)
        self._placeholders = placeholder_ids(model.hf_config)

    def add_request(self, request: Request, sampling: Any, adapter: Any) -> None:
        """Add a request to the engine.

        Raises `InvalidOutcome` of kind `images` unless the processor makes exactly the placeholders of the prompt, at
        the positions of its images.
        """
        try:
            prompt = self._input(list(request.token_ids), request.images)
            self._engine.add_request(request.id, prompt, sampling, lora_request=adapter)
        except BaseException:
            # The renderer's cache of processed images is a copy of the engine's, which has not received these.
            self._renderer.clear_mm_cache()
            raise

    def _input(self, token_ids: list[int], images: Sequence[PlacedImage]) -> Any:
        if not images:
            self._check(token_ids, (), ())
            return {"prompt_token_ids": token_ids}
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.parse import parse_mm_uuids
        from vllm.multimodal.processing import ProcessorInputs, TimingContext

        from envgym.render.images import open_rgb

        processor, cache = self._renderer.mm_processor, self._renderer.mm_processor_cache
        names = [placed.image.sha256 for placed in images]
        is_cached = [False] * len(names) if cache is None else cache.is_cached(names)
        try:
            pixels = [None if c else open_rgb(placed.image.read()) for c, placed in zip(is_cached, images, strict=True)]
        except DataError as error:
            raise InvalidOutcome(FAILURE, str(error)) from None
        items = processor.info.parse_mm_data({"image": pixels})
        inputs = ProcessorInputs(token_ids, items, parse_mm_uuids({"image": names}), cache=cache)
        result = processor._cached_apply_hf_processor(inputs, TimingContext(enabled=False))
        runs = processor._find_mm_placeholders(token_ids, result.prompt_updates)
        ranges = {kind: [run.to_range() for run in places] for kind, places in runs.items()}
        self._check(token_ids, ranges.get("image", ()), images)
        return mm_input(token_ids, result.kwargs, result.hashes, ranges)

    def check_sampled(self, request: Request, result: Any) -> None:
        """Raise `InvalidOutcome` if vLLM has sampled after other token ids than the request's, and for a placeholder
        that the policy has sampled: the model would look for its image."""
        if list(result.prompt_token_ids) != list(request.token_ids):
            raise InvalidOutcome("engine", "vLLM has sampled after other token ids than those of the request")
        token = next((token for token in result.outputs[0].token_ids if token in self._placeholders), None)
        if token is not None:
            word = self._renderer.tokenizer.convert_ids_to_tokens(token)
            raise InvalidOutcome("placeholder", f"the policy has sampled {word}, the placeholder of an image")

    def _check(self, token_ids: Sequence[int], ranges: Sequence[Any], images: Sequence[PlacedImage]) -> None:
        """Raise `InvalidOutcome` unless the runs that the processor would make are those of the images, and all of the
        placeholders belong to them."""
        n_placeholders = sum(token in self._placeholders for token in token_ids)
        n_embedded = sum(run.get_num_embeds() for run in ranges)
        # A run may begin and end with line breaks, which are not the image's: its features are within the image.
        features = [run.extract_embeds_range() for run in ranges]
        are_images = len(images) == len(ranges) and all(
            of_run and image.start <= of_run[0][0] and of_run[-1][1] < image.end
            for image, of_run in zip(images, features, strict=True)
        )
        if not are_images or n_embedded != n_placeholders:
            raise InvalidOutcome(
                FAILURE,
                f"a prompt has {n_placeholders} placeholders for {len(images)} images, of which the model's processor "
                f"finds {len(ranges)} with {n_embedded}: an agent passes the images of each observation "
                "beside its token ids (`Extension.images`), unchanged",
            )


def _advice(model: Any) -> str:
    """The advice for users with images where vLLM computes them for another model; else empty."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and model.is_mm_prefix_lm:
        return (
            f"{model.hf_config.model_type} attends both ways within an image, and vLLM does not on a CPU; sample on a "
            "GPU, or choose another vision-language model"
        )
    return ""
