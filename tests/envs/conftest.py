"""Addresses for the servers of other frameworks."""

import contextlib
import socket

import pytest


@pytest.fixture(scope="session")
def free_ports():
    """`free_ports(count)`: ports of this machine at which nothing listens."""

    def free_ports(count):
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for free in sockets:
                free.bind(("127.0.0.1", 0))
            return [free.getsockname()[1] for free in sockets]

    return free_ports
