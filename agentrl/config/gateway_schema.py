"""The keys of the gateway."""

from __future__ import annotations

from ipaddress import ip_address

from pydantic import Field

from agentrl.config.section import Section

GATEWAY_KEY = "AGENTRL_GATEWAY_KEY"
"""Environment variable with the key that opens episodes of `agentrl serve`. No config key, since runs keep those."""


class GatewayConfig(Section):
    """The HTTP door for agents written in other frameworks. It opens when an agent asks for `policy.base_url`."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. `agentrl serve` listens on others than this machine's own only with a key in the
    environment variable AGENTRL_GATEWAY_KEY."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: one that is free."""
    public_url: str | None = Field(default=None, pattern="^https?://")
    """How agents reach the gateway, if not by `gateway.host` and the port: through a proxy, or from a container."""
    idle_timeout: float = Field(default=300.0, gt=0)
    """`agentrl serve`: seconds without a request after which an episode from outside is ended: fate `timeout`."""
    max_body_mb: int = Field(default=16, ge=1)
    """Size of the largest request, in MiB."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
