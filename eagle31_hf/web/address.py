"""The address that a server listens at."""

import errno
import ipaddress
import socket
from typing import Any


def check_address(host: str, port: int) -> None:
    """Raises ValueError where nothing can listen at an address, before a target is loaded for minutes. A name may stand
    for several, as localhost for 127.0.0.1 and ::1: none of them may be taken, and one must be this machine's."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        errors = [_error_of(family, kind, protocol, address) for family, kind, protocol, _, address in found]
        taken = [error for error in errors if error is not None and error.errno == errno.EADDRINUSE]
        if taken or None not in errors:
            raise [*taken, *filter(None, errors)][0]
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port}: nothing can be served there ({error.strerror or error}); expected an address"
            " of this machine and a free port."
        ) from None


def _error_of(family: int, kind: int, protocol: int, address: Any) -> OSError | None:
    """Returns why nothing can listen there, None where it can."""
    try:
        with socket.socket(family, kind, protocol) as tried:
            if family == socket.AF_INET6:
                tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does
            tried.bind(address)
    except OSError as error:
        return error
    return None


def url_of(host: str, port: int) -> str:
    """Returns the address as clients write it; an IPv6 one stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_of_this_machine(host: str) -> bool:
    """Returns whether only programs of this machine reach what listens at `host`."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
