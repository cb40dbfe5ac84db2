"""Images of rows: those in a column and those in the parts of messages, as other programs write them, and their places
in a conversation."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any

from envgym.errors import DataError, did_you_mean
from envgym.images import images_of
from envgym.types import ImagePart, Message, TextPart
from envgym.types.images import KINDS, image_of

from .config import IMAGE_FIELDS, SourceConfig
from .rows import Row, parse_json

MARK = "<image>"
"""The place of an image in a text, as in the files of ShareGPT's form and of verl."""
PLACE = "\ufdd0image\ufdd0"
"""In its stead for a part of a message that says where an image is and not which one, as in TRL's. Text holds no such
characters."""
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_IMAGE = re.compile(r"data:|https?://|file://|.*\.(png|jpe?g|webp|gif|bmp|tiff?)$", re.IGNORECASE | re.DOTALL)
"""Text that is an image."""
_KEYS = ("bytes", "image", "image_url", "url", "path")
"""Keys of a mapping that is an image, in the order in which they are read: `datasets` has `bytes` and `path`."""


class NamedImage(dict[str, Any]):
    """An image in a row by its name, as records have it, beside the `image` with its file."""

    def __init__(self, image: ImagePart) -> None:
        super().__init__(image.as_dict())
        self.image = image


@dataclass(slots=True)
class ImageReader:
    """Reads the images of a source's rows. A path leads from the folder of the row's file, or from the settings'
    `image_folder`, to a file in it: the file of rows may be a stranger's, and must not name others.

    All methods raise `DataError` for an image that cannot be read; a `location` is a row's file and line.
    """

    source: SourceConfig
    has_read: bool = False
    """True after the first row with images."""

    def field(self, row: Row, location: str) -> str | None:
        """The column of images in a row; None without one. What is no image in a column of a usual name is another
        field, say the name of a container's image."""
        names = self.source.images
        if names == IMAGE_FIELDS:
            return next((name for name in names if name in row and _is_image(row[name])), None)
        if names and not (columns := [name for name in names if name in row]):
            raise DataError(
                f"{location}: the row has no field {names[0]!r}, which data.images names.{did_you_mean(names[0], row)}"
            )
        return columns[0] if names else None

    def images(self, value: Any, location: str) -> list[ImagePart]:
        """The images in a column: one, or a list of them."""
        self.has_read = True
        if isinstance(value, str) and value.startswith("["):  # a list in a CSV file
            value = parse_json(value, f"{location}: the row's images")
        items = value if isinstance(value, list | tuple) else [] if _is_empty(value) else [value]
        images = []
        for number, item in enumerate(items, 1):
            try:
                images.append(ImagePart.from_value(self._content(item, location)))
            except (TypeError, ValueError) as error:
                raise DataError(f"{location}: image {number}: {error}") from None
        return images

    def parts(self, value: Any, location: str) -> Any:
        """A value of messages with the images of its parts read. A part without its image is one of text, `PLACE`."""

        def read(part: Mapping[str, Any]) -> Mapping[str, Any]:
            if _first(part) is None and "sha256" not in part:
                return {"type": "text", "text": PLACE}
            return {**part, "image": self.images([part], location)[0]}

        return _change_parts(value, read)

    def name_images(self, row: Row, location: str, fields: Collection[str]) -> Row:
        """A row with a `NamedImage` for each image in its column and in its `fields` of messages."""

        def change(part: Mapping[str, Any]) -> Mapping[str, Any]:
            if "sha256" in part:  # in an episode that envgym saved
                return NamedImage(_stored(part["sha256"], location))
            return part if _first(part) is None else NamedImage(self.images([part], location)[0])

        changed = {key: _change_parts(row[key], change) for key in fields}
        if (field := self.field(row, location)) is not None:
            changed[field] = list(map(NamedImage, self.images(row[field], location)))
        return row | changed

    def _content(self, value: Any, location: str) -> Any:
        """What `ImagePart.from_value` takes, of one image in a row."""
        if isinstance(value, NamedImage):
            return value.image
        if isinstance(value, Mapping):
            return image_of(value) if "sha256" in value else self._content(_first(value), location)
        if not isinstance(value, str) or value.startswith("data:"):
            return value
        path = value.removeprefix("file://")
        if _ADDRESS.match(path):
            raise ValueError(f"{value!r:.80} is an address, and images are not fetched: save the file, give its path")
        return self._file(path, location)

    def _file(self, name: str, location: str) -> Path:
        """The file of a path in a row."""
        file = Path(location.rpartition(":")[0])
        folder = Path(self.source.image_folder or file.parent)
        folders = [folder] if self.source.image_folder else [folder, file.resolve().parent]  # a file of the hub's cache
        path = Path(os.path.normpath(folder.absolute() / name))
        if not path.is_relative_to(os.path.normpath(folder.absolute())):
            problem = f"{name!r:.80} is outside of {folder}"
        elif not path.is_file():
            problem = f"there is no file {name!r:.80} in {folder}"
        elif not any(path.resolve().is_relative_to(allowed.resolve()) for allowed in folders):
            problem = f"{name!r:.80} is a link out of {folder}"
        else:
            return path
        raise ValueError(f"{problem}: data.image_folder=FOLDER names another folder of images")


def show_images(
    messages: Sequence[Message], images: Sequence[ImagePart], location: str, *, are_marks: bool
) -> tuple[Message, ...]:
    """The messages with a row's images at their places: the parts that say so, else the marks `<image>` in what the
    assistant does not say, else before the user's first text. Unless `are_marks`, marks are
    text.

    Raises `DataError` unless there are as many places as images.
    """
    is_part = any(PLACE in message.text for message in messages)
    place, remaining = PLACE if is_part else MARK, iter(images)
    with_places = [is_part or (are_marks and message.role != "assistant") for message in messages]
    parts = chain.from_iterable(message.content for message in compress(messages, with_places))
    n_places = sum(part.text.count(place) for part in parts)
    if images and not n_places:
        first = next((n for n, message in enumerate(messages) if message.role == "user"), None)
        if first is None:
            raise DataError(f"{location}: there is no message of the user to show the row's images in")
        message = replace(messages[first], content=(*images, *messages[first].content))
        return (*messages[:first], message, *messages[first + 1 :])
    if n_places != len(images):
        places = "parts of type image" if is_part else f"marks {MARK}"
        problem = f"the messages have {n_places} {places}, and the row has {len(images)} images"
        raise DataError(f"{location}: {problem}{'' if images else ': data.images=FIELD names their column'}")
    return tuple(
        replace(message, content=tuple(_filled(message, place, remaining))) if is_filled else message
        for message, is_filled in zip(messages, with_places, strict=True)
    )


def _stored(name: str, location: str) -> ImagePart:
    """An image that a file of episodes names, from its folder. Raises `DataError` if it is not there."""
    folder = images_of(file := Path(location.rpartition(":")[0]))
    if (path := folder.find(name)) is None:
        raise DataError(f"{location}: image {name} is not there: copy the folder {file.name}.images with the file")
    return ImagePart.from_value(path)


def _filled(message: Message, place: str, images: Iterator[ImagePart]) -> Iterator[TextPart | ImagePart]:
    for part in message.content:
        if not (isinstance(part, TextPart) and place in part.text):
            yield part
            continue
        for number, text in enumerate(part.text.split(place)):
            if number:
                yield next(images)
            if text:
                yield TextPart(text)


def _change_parts(value: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """A value of messages with `change` of each part that is an image."""
    if isinstance(value, Mapping):
        if value.get("type") in KINDS:
            return change(value)
        return {key: _change_parts(item, change) for key, item in value.items()}
    if isinstance(value, str) and value.startswith('[{"') and '"sha256"' in value:  # parts in a Parquet file
        return _change_parts(json.loads(value), change)
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        return [_change_parts(item, change) for item in value]
    return value


def _is_image(value: Any) -> bool:
    if isinstance(value, str):
        return bool(_IMAGE.match(value)) or (value.startswith("[") and bool(_IMAGE.match(value.rstrip("\"' ]"))))
    if isinstance(value, list | tuple):
        return any(map(_is_image, value))
    if isinstance(value, Mapping):
        return _first(value) is not None or "sha256" in value
    return isinstance(value, bytes | Path | ImagePart) or hasattr(value, "size")  # of Pillow's, of numpy's


def _first(value: Mapping[str, Any]) -> Any:
    return next((value[key] for key in _KEYS if value.get(key)), None)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)
