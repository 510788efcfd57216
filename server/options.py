"""Options of the server itself, as opposed to the engine's (`tpu_engine.config`).

Owns their names and checks. Knows no file format and no command line.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass

from tpu_engine.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen and how to leave.

    Attributes:
        host: address to listen on; only loopback unless `insecure_listen` is set.
        port: TCP port; 0 takes a free one.
        insecure_listen: allow plaintext on an address that other machines can reach.
        grace_s: seconds that running requests get to finish after SIGTERM.
        serve_partial: be ready once a few programs that every step fits in are warm, and warm the
            rest while serving.
        allow_plan_swap: let whoever reaches the port change the compiled shapes (`tpu-engine plan
            swap`).
    """

    host: str = "127.0.0.1"
    port: int = 50051
    insecure_listen: bool = False
    grace_s: float = 30.0
    serve_partial: bool = False
    allow_plan_swap: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidConfig("port", "from 0 to 65535", self.port)
        if not (math.isfinite(self.grace_s) and self.grace_s >= 0):
            raise InvalidConfig("grace_s", "a number of seconds, at least 0", self.grace_s)
        if not self.insecure_listen and not is_loopback(self.host):
            limit = "a loopback address (traffic is plaintext; insecure_listen allows others)"
            raise InvalidConfig("host", limit, self.host)

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around IPv6 addresses."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
