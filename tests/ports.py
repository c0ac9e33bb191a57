"""A port of this machine where something listens and says nothing."""

import socket


def silent_port():
    """Of a server that accepts, until the process ends: torch, still there, would speak up if it closed."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    server.detach()
    return port
