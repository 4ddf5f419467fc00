"""A reserved port is nobody else's, and yet the server that it was reserved for gets it."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from rlk.driver.ports import HOST, ReservedPorts


def test_only_the_server_that_it_is_for_takes_a_port() -> None:
    ports = ReservedPorts(3)
    try:
        assert len(set(ports.numbers)) == 3
        for number in ports.numbers:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((HOST, number))
        store = TCPStore(HOST, ports.numbers[0], 1, is_master=True, timeout=timedelta(seconds=10))
        store.set("key", "value")
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind((HOST, ports.numbers[0]))
    finally:
        ports.release()
    assert store.get("key") == b"value", "the server goes on when the reservation ends"


def test_a_released_port_is_free_again() -> None:
    ports = ReservedPorts(1)
    ports.release()
    with socket.socket() as other:
        other.bind((HOST, ports.numbers[0]))
