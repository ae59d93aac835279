"""What the tier controller must know before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from phloem.core.errors import ConfigError

__all__ = ["PREFETCH_POLICIES", "WRITE_POLICIES", "TierConfig", "is_exclusive"]

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("auto", "best_effort", "wait_complete", "timeout")

# Below this ratio of host to device pages, copies of what is on the device anyway would take too
# much of the host: then pages are copied when they are about to leave the device, and a page that
# is loaded gives up its copy.
INCLUSIVE_FROM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Policies and bounds. Raises ConfigError for values that cannot be."""

    write_policy: str = "write_through"
    prefetch_policy: str = "auto"
    page_bytes: int = 1  # of one page, for bandwidths
    window_page_bytes: int = 1  # the same of the window component; 0: there is none
    selective_threshold: int = 2  # uses of a page before write_through_selective copies it
    prefetch_timeout_s: float = 2.0  # of the policy `timeout`, and the most that `auto` waits
    storage_deadline_s: float = 10.0  # of one transfer to or from storage

    def __post_init__(self) -> None:
        for name, known in (
            ("write_policy", WRITE_POLICIES),
            ("prefetch_policy", PREFETCH_POLICIES),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"unknown {name} {value!r}; choose from {known}")


def is_exclusive(num_device_pages: int, num_host_pages: int) -> bool:
    """Whether a host of that size should hold no copies of what the device holds."""
    return num_host_pages < INCLUSIVE_FROM * num_device_pages
