"""What has been loaded: for the start-up table, `/server_info` and memory accounts."""

from __future__ import annotations

from dataclasses import dataclass

from phloem.config.units import format_bytes
from phloem.core.mesh import ONE_RANK, Mesh
from phloem.engine.api import ModelCard

__all__ = ["EngineFacts", "WindowFacts", "startup_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFacts:
    """The layers with a sliding window, and their pools."""

    tokens: int  # the token itself included
    layers: int
    num_pages: int
    page_bytes: int
    host_pages: int
    checkpoint_tokens: int  # from one kept tail to the next; 0: ends only


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The model's card, and what it takes."""

    card: ModelCard
    weight_bytes: int
    activation_bytes: int  # an upper bound of one step's temporaries
    threads: int
    load_s: float
    prefix_cache: bool
    schedule_policy: str
    kernels: str = "torch"
    quantization: str = "none"
    kv_dtype: str = "auto"  # of pages, as it came out
    four_bit_blocks: str | None = None  # the 4-bit type of the file's blocks, if it has one
    host_pages: int = 0
    storage: str | None = None  # the directory it started with
    window: WindowFacts | None = None  # None: no layer has one
    num_owners: int = 1  # pages, here and on the card, are those of all owners
    mesh: Mesh = ONE_RANK
    placement: str = "striped"
    remote_kv: str = "direct"  # how ranks read each other's pages, and what was measured for it

    @property
    def kv_bytes(self) -> int:
        of_windows = 0 if self.window is None else self.window.num_pages * self.window.page_bytes
        return self.card.num_pages * self.card.page_bytes + of_windows

    @property
    def host_bytes(self) -> int:
        of_windows = 0 if self.window is None else self.window.host_pages * self.window.page_bytes
        return self.host_pages * self.card.page_bytes + of_windows

    @property
    def token_capacity(self) -> int:
        """Tokens whose KV fits on the device."""
        copies = self.num_owners if self.placement == "replicate" else 1
        return self.card.num_pages // copies * self.card.page_size


def startup_rows(facts: EngineFacts) -> list[tuple[str, str]]:
    """Label and value of each line of the start-up table."""
    rows = [
        *_model_rows(facts),
        *([] if facts.window is None else _window_rows(facts.window)),
        ("KV memory", _kv_memory(facts)),
        *([] if facts.mesh.world == 1 else _ranks(facts)),
        ("host tier", _host_tier(facts)),
        ("storage", facts.storage or "off"),
        ("weights", _weights(facts)),
        ("step memory", f"at most {format_bytes(facts.activation_bytes)}"),
        ("prefix cache", "on" if facts.prefix_cache else "off"),
        ("schedule policy", facts.schedule_policy),
        ("loaded in", f"{facts.load_s:.1f} s"),
    ]
    can_q4 = facts.kernels == "native" and facts.four_bit_blocks is not None
    if can_q4 and facts.quantization != "q4":
        blocks = facts.four_bit_blocks
        rows.append(
            ("recommended", f"--quantization q4: the file's {blocks} blocks, smaller and faster")
        )
    return rows


def _model_rows(facts: EngineFacts) -> list[tuple[str, str]]:
    card = facts.card
    return [
        ("model", f"{card.name} ({card.architecture})"),
        ("file", card.path),
        ("dtype", _dtypes(facts)),
        ("device", f"{card.device}, {facts.threads} threads, {facts.kernels} kernels"),
        ("context", f"{card.max_model_len:,} tokens"),
        ("page size", f"{card.page_size} tokens ({format_bytes(card.page_bytes)})"),
        ("pages", f"{card.num_pages:,}"),
        ("token capacity", f"{facts.token_capacity:,}"),
    ]


def _dtypes(facts: EngineFacts) -> str:
    model, pages = facts.card.dtype, facts.kv_dtype
    return model if pages in ("auto", model) else f"{model}, KV pages in {pages}"


def _window_rows(window: WindowFacts) -> list[tuple[str, str]]:
    kept = "ends only"
    if window.checkpoint_tokens:
        kept = f"ends, and every {window.checkpoint_tokens:,} tokens"
    return [
        ("window", f"{window.tokens:,} tokens in {window.layers} layers; kept: {kept}"),
        ("window pages", f"{window.num_pages:,} ({format_bytes(window.page_bytes)} each)"),
    ]


def _kv_memory(facts: EngineFacts) -> str:
    """Ranks hold equally much, whether they own pages or their heads of a row's pages."""
    total, world = format_bytes(facts.kv_bytes), facts.mesh.world
    return total if world == 1 else f"{total}, {format_bytes(facts.kv_bytes // world)} a rank"


def _weights(facts: EngineFacts) -> str:
    each = "" if facts.mesh.world == 1 else " on each rank"
    return f"{format_bytes(facts.weight_bytes)}{each}, quantization {facts.quantization}"


def _ranks(facts: EngineFacts) -> list[tuple[str, str]]:
    rows = [("ranks", _of_mesh(facts))]
    return rows if facts.num_owners == 1 else [*rows, ("remote KV", facts.remote_kv)]


def _of_mesh(facts: EngineFacts) -> str:
    pages, mesh = facts.card.num_pages // facts.num_owners, facts.mesh
    if mesh.tp == 1:
        return f"{mesh.world} processes of {pages:,} pages each, {facts.placement}"
    each = "each" if facts.num_owners == mesh.world else f"for each {mesh.tp} of them"
    shape = f"{mesh.world} processes (cp {mesh.cp} x tp {mesh.tp})"
    return f"{shape}, {pages:,} pages {each}, {facts.placement}"


def _host_tier(facts: EngineFacts) -> str:
    if facts.host_pages == 0:
        return "off"
    pages = f"{facts.host_pages:,} pages"
    if facts.window is not None:
        pages += f" and {facts.window.host_pages:,} of windows"
    return f"{pages} ({format_bytes(facts.host_bytes)})"
