"""Images in messages: each is named by the SHA-256 of its file, which whoever receives it computes anew."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from envgym.errors import DataError, missing_package, reported_as

MAX_BYTES = 20_000_000
"""Maximum bytes of an image's file."""
MAX_PIXELS = 50_000_000
"""Maximum width times height of an image."""
MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
"""Media types of the files that are stored, by Pillow's names of their formats."""
READ_FORMATS = (*MEDIA_TYPES, "GIF", "BMP", "TIFF")
ORIENTATION = 0x0112
"""The EXIF tag that tells a viewer to rotate the image."""
NAME = re.compile(r"[0-9a-f]{64}")
KINDS = ("image", "image_url", "input_image")
"""Types of a message's part that is an image, in the spellings of templates and of OpenAI's two APIs."""
FORMS = "a pathlib.Path or the bytes of a file, a data URI, a PIL image, or a uint8 array [height, width, 3]"

_decoding = threading.Semaphore(2)
"""Limits the memory of concurrent decoding: the largest image takes 200 MB."""
_sound: set[str] = set()
"""Names of images that were decoded to the end in this process."""
MAX_SOUND = 100_000
"""Maximum number of these names, some 15 MB."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message, a PNG, JPEG or WebP file.

    `sha256`, the image's name, is that of the file in 64 hexadecimal digits; `width` and `height` are pixels. The
    file's content is in `data` or, once a run has stored it, in `file`; an image that was read from a record may have
    neither. Images with equal names are equal.

    Raises `ValueError` for another kind of name, size or media type.
    """

    sha256: str
    width: int
    height: int
    media_type: str
    data: bytes | None = field(default=None, compare=False, repr=False)
    file: Path | None = field(default=None, compare=False, repr=False)

    text: ClassVar[str] = ""
    """The text of an image, beside that of a `TextPart`: none."""

    def __post_init__(self) -> None:
        if not (isinstance(self.sha256, str) and NAME.fullmatch(self.sha256)):
            raise ValueError(f"an image is named by the 64 hexadecimal digits of its SHA-256, not {self.sha256!r:.80}")
        if self.media_type not in MEDIA_TYPES.values():
            raise ValueError(f"an image is a PNG, JPEG or WebP file, not {self.media_type!r:.60}")
        if not all(type(side) is int and side > 0 for side in (self.width, self.height)):
            raise ValueError(f"the size of an image is two numbers of pixels, not {self.width!r} and {self.height!r}")

    @classmethod
    def from_value(cls, value: Any) -> ImagePart:
        """An image of a file (`pathlib.Path`, bytes), a data URI, a PIL image, or a uint8 array [height, width, 3].

        A PNG, JPEG or WebP file in RGB or grey, without a tag that rotates it, stays as it is. Of any other image a PNG
        is made: over white, of an animation the first picture. Only the beginning of a file is read here: `decoded`
        reads all of it.

        Raises `TypeError` for a value of another type, and `ValueError` for a file that is no image, of more than
        `MAX_BYTES`, or with more than `MAX_PIXELS`. Text other than a data URI is no image: a path is a `pathlib.Path`,
        so that no text from a file or a server can name one, and addresses of the web are not read.
        """
        if isinstance(value, ImagePart):
            return value
        if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):  # as `datasets` writes images
            value = value["bytes"]
        if isinstance(value, str | Path):
            value = _content_of(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return _of_file(bytes(value))
        if type(value).__module__.partition(".")[0] == "PIL":
            return _as_png(value)
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return _of_array(value)
        raise TypeError(f"an image is {FORMS}, not {type(value).__name__}")

    def as_dict(self) -> dict[str, Any]:
        """The image in a record, by its name: `{"type": "image", "sha256": …}` with its size and media type."""
        names = ("sha256", "width", "height", "media_type")
        return {"type": "image", **{name: getattr(self, name) for name in names}}

    def read(self) -> bytes:
        """The content of the file. Raises `DataError` if the file is not there, or is another one."""
        if self.data is not None:
            return self.data
        if self.file is None:
            raise DataError(f"image {self.sha256} is known here by its name alone: its run's folder has the file")
        return read_image(self.file, self.sha256)

    def data_uri(self) -> str:
        """The file as a data URI. Raises `DataError` as `read` does."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.read()).decode()}"

    @property
    def label(self) -> str:
        """The image in a text for people: `[image 64 x 48]`."""
        return f"[image {self.width} x {self.height}]"

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        """On the wire an image has its file, and its name is a check sum."""
        from pydantic_core import core_schema

        name = core_schema.str_schema(strict=True, pattern=f"^{NAME.pattern}$")
        data = core_schema.str_schema(strict=True, max_length=MAX_BYTES * 4 // 3 + 4)
        fields = {"sha256": core_schema.typed_dict_field(name), "data": core_schema.typed_dict_field(data)}
        body = core_schema.typed_dict_schema(fields)
        return core_schema.json_or_python_schema(
            core_schema.no_info_after_validator_function(_from_wire, body),
            core_schema.is_instance_schema(ImagePart),
            serialization=core_schema.plain_serializer_function_ser_schema(_to_wire),
        )


class PlacedImage(NamedTuple):
    """An image and its tokens in a sequence: `length` placeholders from position `start` on."""

    image: ImagePart
    start: int
    length: int

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.length

    @property
    def span(self) -> ImageSpan:
        """The same by the image's name."""
        return ImageSpan(self.image.sha256, self.start, self.length)

    def shifted(self, n_tokens: int) -> PlacedImage:
        """The same in a sequence with `n_tokens` more before it."""
        return self._replace(start=self.start + n_tokens)


class ImageSpan(NamedTuple):
    """The tokens of an image in a sequence: `length` placeholders from position `start` on, for the image `sha256`."""

    sha256: str
    start: int
    length: int

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.length


def sha256_of(content: bytes) -> str:
    """The name of an image."""
    return hashlib.sha256(content).hexdigest()


def read_image(file: Path, name: str) -> bytes:
    """The content of the file of the image `name`. Raises `DataError` if it cannot be read, or is another one."""
    with reported_as(DataError, f"image {file} cannot be read"):
        content = file.read_bytes()
    if sha256_of(content) != name:
        raise DataError(f"image {file} has changed: its content is not what it is named after")
    return content


def image_of(part: Mapping[str, Any]) -> ImagePart:
    """The image of a message's part in another program's spelling, whose `type` is one of `KINDS`, or in a record's.
    Raises `TypeError` or `ValueError` as `ImagePart.from_value` does, and for a part without an image."""
    value = part.get("image", part.get("image_url"))
    value = value.get("url") if isinstance(value, Mapping) and "url" in value else value
    if value is None and "sha256" in part:
        return ImagePart(*(part.get(name) for name in ("sha256", "width", "height", "media_type")))  # type: ignore[arg-type]
    if value is None:
        raise TypeError(f"a message has a part of type {part.get('type')!r} without an image")
    return ImagePart.from_value(value)


def image_url(image: ImagePart) -> dict[str, Any]:
    """The image as a part of a message to a program or an API: `{"type": "image_url", …}`, with a data URI. Raises
    `DataError` as `ImagePart.read` does."""
    return {"type": "image_url", "image_url": {"url": image.data_uri()}}


def decoded(image: ImagePart) -> ImagePart:
    """The image as its file says, after it was read to the end (10 to 40 ms for 600 x 400 pixels, once per file and
    process). Raises `ValueError` for a file that is truncated or is not the image's, and `DataError` if there is
    none."""
    content = image.read()
    actual = _of_file(content)
    if actual.sha256 != image.sha256:
        raise ValueError(f"an image is named {image.sha256}, and its file is another one ({actual.sha256})")
    if actual.sha256 not in _sound:
        with _decoding:
            try:
                _open(content).load()
            except Exception as error:
                raise _unreadable(error) from None
        if len(_sound) >= MAX_SOUND:
            _sound.clear()
        _sound.add(actual.sha256)
    return actual


def _to_wire(image: ImagePart) -> dict[str, Any]:
    return {"sha256": image.sha256, "data": base64.b64encode(image.read()).decode()}


def _from_wire(body: Mapping[str, str]) -> ImagePart:
    """The image of a file on the wire. Raises `ValueError` if that is another one than its name says."""
    image = ImagePart.from_value(f"data:;base64,{body['data']}")
    if image.sha256 != body["sha256"]:
        raise ValueError(f"an image was sent as {body['sha256']}, and its file is {image.sha256}")
    return image


def _content_of(value: str | Path) -> bytes:
    """The content of a data URI, or of a file at a path."""
    if isinstance(value, Path):
        try:
            if not value.is_file():
                raise ValueError(f"an image at {value} is no file")
            _check_size(value.stat().st_size)
            return value.read_bytes()
        except OSError as error:
            raise ValueError(f"image {value} cannot be read: {error.strerror}") from None
    head, comma, content = value.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        raise ValueError(
            f"an image is not given as the text {value!r:.60}: give {FORMS}; addresses of the web are not read"
        )
    _check_size(len(content) * 3 // 4 - 2)
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data URI of an image is not base64: {error}") from None


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise ValueError(f"an image has {size:,} bytes, more than the {MAX_BYTES:,} that are read: make it smaller")


def _pillow() -> Any:
    """Pillow's module of images, an optional package."""
    try:
        from PIL import Image
    except ImportError:
        raise missing_package("pillow", "images", "an image in a message") from None
    return Image


def _open(content: bytes) -> Any:
    """Pillow's image of a file, of which it has read the beginning."""
    pillow = _pillow()
    try:
        image = pillow.open(io.BytesIO(content), formats=READ_FORMATS)
    except Exception as error:  # a stranger's file may raise anything
        raise _unreadable(error) from None
    return _within_limit(image)


def _within_limit(image: Any) -> Any:
    if (pixels := image.width * image.height) > MAX_PIXELS:
        raise ValueError(
            f"an image has {image.width} x {image.height} pixels, {pixels:,} in all and more than the {MAX_PIXELS:,} "
            "that are decoded: make it smaller"
        )
    return image


def _unreadable(error: Exception) -> ValueError:
    reason = "it is no image" if type(error).__name__ == "UnidentifiedImageError" else f"{error!s:.200}"
    return ValueError(f"the file of an image cannot be read ({reason or type(error).__name__})")


def _of_file(content: bytes) -> ImagePart:
    _check_size(len(content))
    image = _open(content)
    is_upright = not image.info.get("exif") or image.getexif().get(ORIENTATION, 1) == 1
    is_plain = image.mode in ("RGB", "L") and "transparency" not in image.info
    if image.format in MEDIA_TYPES and is_plain and is_upright and not getattr(image, "is_animated", False):
        return ImagePart(sha256_of(content), image.width, image.height, MEDIA_TYPES[image.format], content)
    return _as_png(image)


def _of_array(array: Any) -> ImagePart:
    if str(array.dtype) not in ("uint8", "torch.uint8") or len(array.shape) != 3 or array.shape[2] != 3:
        shape = "x".join(map(str, array.shape))
        raise ValueError(f"an image is a uint8 array [height, width, 3], not {array.dtype} [{shape}]")
    import numpy as np

    return _as_png(_pillow().fromarray(np.asarray(array)))


def _as_png(image: Any) -> ImagePart:
    """A PNG of Pillow's image: upright, over white, in grey or RGB."""
    from PIL import Image, ImageOps

    _within_limit(image)
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"an image has 8 bits per channel, unlike one of Pillow's mode {image.mode}: convert it")
    buffer = io.BytesIO()
    with _decoding:
        try:
            image = ImageOps.exif_transpose(image)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            image = image.convert("L" if image.mode in ("1", "L") else "RGB")
            image.info.clear()
            image.save(buffer, "PNG", compress_level=1)
        except Exception as error:
            raise _unreadable(error) from None
    content = buffer.getvalue()
    _check_size(len(content))
    return ImagePart(sha256_of(content), image.width, image.height, MEDIA_TYPES["PNG"], content)
