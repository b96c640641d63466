"""An ASGI application that is served in the background, until it is closed."""

import threading
import time
from typing import Any

import uvicorn

from .address import bound

ENDING = 1  # seconds that answers under way have once it is closed


class Listener:
    """Serves an application at an address from a thread of its own, as soon as it is made."""

    def __init__(self, app: Any, host: str, port: int):
        config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=ENDING)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=(bound(host, port),), name="listener", daemon=True
        )
        self._thread.start()
        while self._thread.is_alive() and not self._server.started:
            time.sleep(0.01)
        if not self._server.started:
            raise RuntimeError(f"nothing can be served at {host}, port {port}; what went wrong is in the log above.")

    def close(self) -> None:
        """Takes no more requests, and ends those under way."""
        self._server.should_exit = True
        self._thread.join()
