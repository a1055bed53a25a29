"""Host addresses, IPv4 and IPv6."""

from __future__ import annotations

import socket


def family_of(host: str) -> socket.AddressFamily:
    """The address family of `host`. Host names count as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def host_and_port(host: str, port: int) -> str:
    """`host:port` as in a URL, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
