"""Storage backends behind `core.store.PageStore`. Stands on `core` alone; no torch."""

from phloem.stores.backend import Backend, Item, StoreOptions, Usage
from phloem.stores.guard import GuardPolicy
from phloem.stores.registry import backend_names, guarded, open_store

__all__ = [
    "Backend",
    "GuardPolicy",
    "Item",
    "StoreOptions",
    "Usage",
    "backend_names",
    "guarded",
    "open_store",
]
