"""Images in a request: they come with it, in formats that browsers show, and not too large to be unpacked."""

import base64
import io
import re
from typing import Any

from .request_error import RequestError, shown

# An address would have the server fetch an image, from a network or a disk that only the server can read.
IMAGE = re.compile(r"data:image/[\w.+-]+;base64,([A-Za-z0-9+/=\s]+)")
# Pillow knows many formats by their first bytes, one of which runs programs (EPS); these it reads by itself.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS = 16 * 2**20  # of an image: a file of kilobytes may unpack to gigabytes
MOST_IMAGES = 16


def check_image(url: Any, where: str) -> None:
    """Raises RequestError for what is no image, and for one that is too large."""
    found = IMAGE.fullmatch(url) if isinstance(url, str) else None
    if not found:
        raise RequestError(f"{where} is {shown(url)}; expected data:image/...;base64,...", where)
    from PIL import Image

    try:
        with Image.open(io.BytesIO(base64.b64decode(found[1])), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise RequestError(f"{where} has {width} x {height} pixels; expected at most {MOST_PIXELS}.", where)
            image.load()  # whose upload may have broken off
    except RequestError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        message = f"{where} is no image ({type(error).__name__}); expected one of {', '.join(FORMATS)}."
        raise RequestError(message, where) from None
