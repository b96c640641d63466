"""Images from untrusted sources: read in a few formats only and, where the caller gives a limit, up to a number of
pixels."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Pillow knows many formats by their first bytes, one of which runs programs (EPS); these it reads by itself.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def open_image(data: bytes, most_pixels: int | None = None) -> Any:
    """Opens the image of a file's bytes, whole. Raises ValueError for what is no image in one of FORMATS, and for one
    of more than `most_pixels`."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if most_pixels is None or width * height <= most_pixels:
            image.load()  # its file may have broken off
            return image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"is no image ({type(error).__name__}); expected one of {', '.join(FORMATS)}.") from None
    raise ValueError(f"has {width} x {height} pixels; expected at most {most_pixels}.")


def bytes_of(path: Path) -> bytes:
    """Reads a file. Raises OSError for what has no end, a pipe or a device."""
    if not path.is_file() and path.exists():
        raise OSError("no plain file")
    return path.read_bytes()


@dataclass(frozen=True)
class Picture:
    """An image of a chat, opened when it is asked for.

    `source`: a path, which begins at the folder that the program runs in where it is relative; a `data:` address; the
    bytes of a file, or an object with its "bytes" or "path", as the `datasets` library has them; an image of Pillow.
    """

    source: Any = field(repr=False)

    @property
    def path(self) -> Path | None:
        """The file, None for an image that is there without one."""
        source = self._content
        return Path(source) if isinstance(source, str) and not source.startswith(("data:", *NETWORK)) else None

    @property
    def _content(self) -> Any:
        """The source itself; of an object of the `datasets` library its bytes or, without any, its path."""
        source = self.source
        if not isinstance(source, Mapping):
            return source
        return source.get("path") if source.get("bytes") is None else source["bytes"]

    def open(self) -> Any:
        """Opens the image, upright and in RGB as transformers reads images. Raises ValueError for what cannot be read,
        and for an address in a network: what a drafter is trained on must be there when a run goes on."""
        from transformers.image_utils import load_image

        source, path = self._content, self.path
        if isinstance(source, str) and source.startswith(NETWORK):
            raise ValueError(f"{source[:SHOWN]} lies in a network; expected a file. Download it first.")
        try:
            if path is not None:
                source = bytes_of(path)
            elif isinstance(source, str):
                source = base64.b64decode(source.partition(",")[2])
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(path or source)[:SHOWN]} cannot be read ({error}).") from None
        try:
            return load_image(open_image(source) if isinstance(source, bytes) else source)
        except ValueError as error:
            raise ValueError(f"{str(path)[:SHOWN]} {error}" if path else str(error)) from None


NETWORK = ("http://", "https://", "ftp://", "s3://", "gs://", "hf://")
SHOWN = 60  # characters of an address
