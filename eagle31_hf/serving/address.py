"""The address that a server listens at."""

import socket


def check_address(host: str, port: int) -> None:
    """Raises ValueError where nothing can listen at an address, before a target is loaded for minutes."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does
            tried.bind(address)
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port}: nothing can be served there ({error.strerror or error}); expected an address"
            " of this machine and a free port."
        ) from None
