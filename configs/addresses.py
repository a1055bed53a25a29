"""Addresses of hosts, IPv4 and IPv6 alike."""

from __future__ import annotations

import socket


def family_of(host: str) -> socket.AddressFamily:
    """The family of the address `host`; names of hosts count as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def host_and_port(host: str, port: int) -> str:
    """`host:port` as it is written in a URL: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
