"""Opens a store by the name of its backend."""

from __future__ import annotations

import importlib
import pkgutil

from phloem.core.clock import Clock
from phloem.core.errors import ConfigError
from phloem.core.store import PageStore
from phloem.stores import adapters
from phloem.stores.backend import Backend, StoreOptions
from phloem.stores.guard import GuardedStore, GuardPolicy
from phloem.stores.seal import SealedBackend
from phloem.stores.threaded import ThreadedStore

__all__ = ["backend_names", "guarded", "open_store"]


def backend_names() -> list[str]:
    """The backends that exist; none is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(adapters.__path__))


def open_store(
    name: str, options: StoreOptions, clock: Clock, policy: GuardPolicy | None = None
) -> PageStore:
    """A guarded store. Raises ConfigError for an unknown name or options it cannot use."""
    if name not in backend_names():
        raise ConfigError(f"no storage backend {name!r}; there are: {', '.join(backend_names())}")
    module = importlib.import_module(f"{adapters.__name__}.{name}")
    backend: Backend = module.build(options)
    return guarded(backend, clock, num_threads=options.num_threads, policy=policy)


def guarded(
    backend: Backend, clock: Clock, *, num_threads: int = 4, policy: GuardPolicy | None = None
) -> PageStore:
    """Put everything above a backend: seal (if it needs one), threads, deadlines, breaker."""
    if not backend.caps.verifies:
        backend = SealedBackend(backend)
    return GuardedStore(ThreadedStore(backend, clock, num_threads=num_threads), clock, policy)
