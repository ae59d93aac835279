"""A start by somebody else: torchrun, or whoever sets its variables, starts a process per rank.

    RANK, WORLD_SIZE           which rank of how many this process is
    LOCAL_WORLD_SIZE           how many of them are on this machine; not set: this one alone
    LOCAL_RANK                 which of these this process is, and so which GPU it takes
    MASTER_ADDR, MASTER_PORT   where they meet: an address of rank 0's machine

They say where a process runs, and nothing about what it serves: no setting is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phloem.config.options import Config
from phloem.core.errors import ConfigError
from phloem.core.mesh import Mesh

__all__ = ["Launch", "check_launch", "launch_from"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process of several. `keeps_store`: it serves the store at which all meet, because nobody
    does so already."""

    rank: int
    size: int
    local_size: int
    local_rank: int = 0
    address: str
    port: int
    keeps_store: bool

    @property
    def on_one_machine(self) -> bool:
        """All processes are, so that they can share memory."""
        return self.local_size == self.size


def launch_from(environ: Mapping[str, str]) -> Launch | None:
    """Where this process stands; None if it stands alone. Raises ConfigError for half a start."""
    if environ.get("WORLD_SIZE", "1") == "1":
        return None
    size = _number(environ, "WORLD_SIZE", low=2, high=1024)
    rank = _number(environ, "RANK", low=0, high=size - 1)
    local_size, local_rank = 1, 0
    if "LOCAL_WORLD_SIZE" in environ:
        local_size = _number(environ, "LOCAL_WORLD_SIZE", low=1, high=size)
        local_rank = rank % local_size
        if "LOCAL_RANK" in environ:
            local_rank = _number(environ, "LOCAL_RANK", low=0, high=local_size - 1)
    address = environ.get("MASTER_ADDR", "")
    if not address:
        raise ConfigError("WORLD_SIZE is set, but MASTER_ADDR is not: name rank 0's machine")
    try:
        address.encode("idna")  # as whoever looks it up does
    except UnicodeError:
        raise ConfigError(f"MASTER_ADDR must be a name or an address, got {address!r}") from None
    by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(
        rank=rank,
        size=size,
        local_size=local_size,
        local_rank=local_rank,
        address=address,
        port=_number(environ, "MASTER_PORT", low=1, high=65535),
        keeps_store=rank == 0 and not by_agent,
    )


def check_launch(config: Config, launch: Launch) -> None:
    """Raise ConfigError for settings that such a start cannot have; every process looks itself."""
    parallel = config.parallel
    if parallel.mesh.world != launch.size:
        raise ConfigError(_other_size(parallel.mesh, launch.size))
    if launch.on_one_machine:
        return
    if parallel.placement == "replicate":
        raise ConfigError(
            "--placement replicate writes into other ranks' memory, which is not there on several "
            "hosts; leave it out"
        )
    if parallel.remote_kv == "direct":
        raise ConfigError(
            "--remote-kv direct reads other ranks' memory, which is not there on several hosts: "
            "add --remote-kv send_q or --remote-kv gather_kv"
        )


def _other_size(mesh: Mesh, size: int) -> str:
    tp = f" --tp {mesh.tp}" if mesh.tp > 1 else ""
    instead = "" if size % mesh.tp else f", or give --cp {size // mesh.tp}{tp}"
    return (
        f"{size} processes were started (WORLD_SIZE), but --cp {mesh.cp}{tp} needs {mesh.world}: "
        f"start so many{instead}"
    )


def _number(environ: Mapping[str, str], name: str, *, low: int, high: int) -> int:
    text = environ.get(name)
    if text is None:
        raise ConfigError(f"WORLD_SIZE is set, but {name} is not; torchrun sets both")
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise ConfigError(f"{name} must be a number from {low} to {high}, got {text!r}")
    return int(text)
