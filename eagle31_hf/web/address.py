"""The address that a server listens at."""

import errno
import ipaddress
import socket


def check_address(host: str, port: int) -> None:
    """Raises ValueError where nothing can listen at an address, before a target is loaded for minutes."""
    for found in bound(host, port):
        found.close()


def bound(host: str, port: int) -> list[socket.socket]:
    """Returns sockets that listen at an address. A name may stand for several, as localhost for 127.0.0.1 and ::1:
    those of other machines are left out, as ::1 where IPv6 is off. Raises ValueError where one is taken, or none is
    this machine's."""
    sockets, errors = list[socket.socket](), list[OSError]()
    try:
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                sockets.append(socket.create_server(address, family=family))
            except OSError as error:
                errors.append(error)
        taken = [error for error in errors if error.errno == errno.EADDRINUSE]
        if taken or not sockets:
            raise [*taken, *errors][0]
    except OSError as error:
        for made in sockets:
            made.close()
        reason = (error.strerror or str(error)).partition(" (while")[0]  # behind it the address stands once more
        found = f"--host {host} --port {port}: nothing can be served there ({reason})"
        raise ValueError(f"{found}; expected an address of this machine and a free port.") from None
    return sockets


def url_of(host: str, port: int) -> str:
    """Returns the address as clients write it; an IPv6 one stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_of_this_machine(host: str) -> bool:
    """Returns whether only programs of this machine reach what listens at `host`."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
