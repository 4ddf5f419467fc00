"""Ports at which the ranks of an engine meet, kept until they are used.

vLLM takes the number of a port, and its first rank serves there once it has been started, seconds later. In between the
kernel could give the same port to any program that asks for one, or to an outgoing connection: Ray opens hundreds.
"""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


class ReservedPorts:
    """Ports of this machine that only a server can take, and one that says SO_REUSEADDR, as torch's store does."""

    def __init__(self, count: int) -> None:
        self._held = [_reserve() for _ in range(count)]
        self.numbers: tuple[int, ...] = tuple(s.getsockname()[1] for s in self._held)

    def release(self) -> None:
        """Once the servers run, or nobody wants them any more."""
        for held in self._held:
            held.close()


def _reserve() -> socket.socket:
    """A socket that is bound and does not listen. It is bound without SO_REUSEADDR, so that the port is nobody's, and
    marked with it afterwards: Linux then lets one server with the same mark in."""
    held = socket.socket()
    try:
        held.bind((HOST, 0))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held
