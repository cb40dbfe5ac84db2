"""Images in prompts: an image is the run of placeholder tokens that the model's processor writes for its size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from importlib.util import find_spec
from io import BytesIO
from typing import Any

from envgym.errors import InvalidStep, MissingDependency, needs
from envgym.types import ImagePart, PlacedImage

MAX_SIZES = 1024
"""Maximum number of sizes of images whose runs are remembered."""


class Placeholders:
    """The placeholders of a model's images: `write` puts them into a text, `locate` finds them among its token ids.

    The processor of `model` (a folder or hub id) is loaded with the first image, which imports torch; `image_size` is
    its argument `size`, if not None.
    """

    def __init__(self, model: str, image_size: Mapping[str, int] | None = None) -> None:
        self.model, self.image_size = model, image_size
        self._run = lru_cache(MAX_SIZES)(self._process)

    def write(self, text: str, images: Sequence[ImagePart]) -> str:
        """A text that a template has written for messages with these images, with a whole run in place of each mark.
        Raises `InvalidStep` if it has another number of marks, and for an image that the processor refuses."""
        mark = mark_of(self._processor)
        pieces = text.split(mark)
        if len(pieces) != len(images) + 1:
            raise InvalidStep(
                f"the chat template of {self.model} writes {len(pieces) - 1} marks {mark!r} of images for "
                f"{len(images)}: put images into messages of roles whose images it takes, and no such mark into text"
            )
        runs = [self._run(image.width, image.height) for image in images]
        return "".join([piece + run for piece, run in zip(pieces, [*runs, ""], strict=True)])

    def locate(
        self, token_ids: Sequence[int], images: Sequence[ImagePart], encode: Callable[[str], list[int]]
    ) -> tuple[PlacedImage, ...]:
        """The images at the positions of their runs in the token ids of a text that `write` returned. Line breaks
        around a run belong to the text, since they merge with its own."""
        result, end = list[PlacedImage](), 0
        tokens_of = cache(lambda width, height: encode(self._run(width, height).strip("\n")))
        for image in images:
            run = tokens_of(image.width, image.height)
            starts = (i for i in range(end, len(token_ids)) if token_ids[i] == run[0])
            start = next((i for i in starts if list(token_ids[i : i + len(run)]) == run), None)
            if start is None:
                raise InvalidStep(f"the tokenizer of {self.model} has no tokens for an image's placeholders")
            end = start + len(run)
            result.append(PlacedImage(image, start, len(run)))
        return tuple(result)

    @cached_property
    def _processor(self) -> Any:
        return load_processor(self.model)

    def _process(self, width: int, height: int) -> str:
        """The run of an image, which depends on its size alone."""
        from PIL import Image

        try:
            return process(self._processor, Image.new("RGB", (width, height)), self.image_size)[0]
        except Exception as error:  # the processor of a stranger's model may raise anything
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise InvalidStep(f"{self.model} takes no image of {width} x {height} pixels: {reason}") from None


def mark_of(processor: Any) -> str:
    """What templates write for an image."""
    return str(getattr(processor, "boi_token", None) or processor.image_token)


def process(processor: Any, image: Any, image_size: Mapping[str, int] | None, **options: Any) -> tuple[str, Any]:
    """Call a model's processor for Pillow's image alone: the run of its placeholders, and all outputs."""
    outputs = processor(
        text=[mark_of(processor)], images=[[image]], add_special_tokens=False,
        return_text_replacement_offsets=True, **size_argument(image_size), **options,
    )  # fmt: skip
    return str(outputs["text_replacement_offsets"][0][0]["replacement"]), outputs


def check_torchvision() -> None:
    """Raise `MissingDependency` if torchvision is missing, which vLLM and processors of images need."""
    if find_spec("torchvision") is None:
        raise MissingDependency(
            "a vision-language model needs torchvision: install the build that belongs to this torch, without its "
            "dependencies (pip install --no-deps torchvision)"
        )


def size_argument(image_size: Mapping[str, int] | None) -> dict[str, Any]:
    """The argument of a processor that `render.image_size` sets; none where it is None."""
    return {} if image_size is None else {"size": dict(image_size)}


def open_rgb(content: bytes) -> Any:
    """The image of a file as Pillow's, in RGB, as sampler and trainer give it to the processor."""
    from PIL import Image

    return Image.open(BytesIO(content)).convert("RGB")


def load_processor(model: str) -> Any:
    """Load the processor of a vision-language model, a folder or hub id, as its images are processed by sampler and
    trainer alike: with torchvision, whose pixels differ from Pillow's.

    Raises `InvalidStep` for a model without images, and `MissingDependency` without a package.
    """
    check_torchvision()
    with needs("transformers", "train", "an image in a prompt"):
        import transformers
    try:
        processor = transformers.AutoProcessor.from_pretrained(model, backend="torchvision")
    except ImportError as error:  # it names the package and its installation, on the last of many lines
        raise MissingDependency(f"the images of {model} need another package: {' '.join(str(error).split())}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InvalidStep(f"the processor of {model}, which its images need, cannot be loaded: {reason}") from None
    images = getattr(processor, "image_processor", None)
    if images is None:
        raise InvalidStep(f"a message has an image, and {model} takes text alone: choose a vision-language model")
    if getattr(images, "backend", None) != "torchvision":
        raise InvalidStep(
            f"the images of {model} are processed by {type(images).__name__}, which does not use torchvision: sampler "
            "and trainer would see other pixels"
        )
    return processor
