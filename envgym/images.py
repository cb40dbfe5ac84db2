"""Folders of images: a run stores each image once, and its records name it."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from .disk import replacement_file
from .errors import DataError
from .types import ImagePart
from .types.images import NAME, read_image

FOLDER = "images"
"""Name of the folder in a run's or an evaluation's."""
SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp"}
RECORDED = re.compile(r'"sha256": ?"([0-9a-f]{64})"')
"""An image's name in a record, as JSON."""


class ImageFolder:
    """A folder with one file per image, `SHA256.png`, `.jpg` or `.webp`. It is created with its first image."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def store(self, image: ImagePart) -> ImagePart:
        """Write the file of an image that `types.images.decoded` returned, in one rename, or mark it as used now.
        Returns the image without its data, which stay in the file."""
        content, file = image.read(), self.path / f"{image.sha256}{SUFFIXES[image.media_type]}"
        with self._lock:  # episodes that show one image at a time write it once
            try:
                is_stored = file.stat().st_size == len(content)
            except FileNotFoundError:
                is_stored = False
            if is_stored:
                os.utime(file)
            else:
                self.path.mkdir(parents=True, exist_ok=True)
                with replacement_file(file, f".{secrets.token_hex(8)}.tmp") as temporary:
                    temporary.write_bytes(content)
        return replace(image, data=None, file=file)

    def find(self, name: str) -> Path | None:
        """The file of the image `name`; None without one, and for a text that is no image's name."""
        files = (self.path / f"{name}{suffix}" for suffix in SUFFIXES.values())
        return next((file for file in files if file.is_file()), None) if NAME.fullmatch(name) else None

    def read(self, name: str) -> bytes:
        """The content of the image `name`. Raises `DataError` if it is not here, or its file is another one."""
        if (file := self.find(name)) is None:
            raise DataError(f"image {name} is not in {self.path}: its file was deleted, or never stored")
        return read_image(file, name)

    def locate(self, image: ImagePart) -> ImagePart:
        """The image of a record, with its file if that is here."""
        return replace(image, file=self.find(image.sha256))

    def remove_others(self, names: Collection[str], last_use: float) -> None:
        """Delete the images that are not among `names`, and that were not used since `last_use`, a time in
        seconds since 1970."""
        for file in self.path.iterdir() if self.path.is_dir() else ():
            if NAME.fullmatch(file.stem) and file.stem not in names and file.stat().st_mtime < last_use:
                file.unlink(missing_ok=True)


def images_of(path: Path) -> ImageFolder:
    """The images of a file of episodes, which are in the folder of its run or evaluation, or else beside it."""
    default = path.with_name(f"{path.name}.{FOLDER}")
    folders = (default, path.parent / FOLDER, path.parent.parent / FOLDER)
    return ImageFolder(next((folder for folder in folders if folder.is_dir()), default))
