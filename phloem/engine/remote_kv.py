"""How an engine of several ranks reads remote pages: as the settings say, or as it is measured."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from phloem.cache.remote_choice import RemoteChooser, RemoteModel
from phloem.cache.remote_cost import LayerShape
from phloem.config import Config
from phloem.config.units import format_bytes
from phloem.core.mesh import ShardAxis
from phloem.core.remote import IN_PLACE, LinkRates, Remote, RemoteWays
from phloem.worker import LoadedWorker, RankedWorker, staging_bytes

__all__ = ["copies_bytes", "describe_remote", "layer_shape", "measured", "remote_chooser"]

logger = logging.getLogger(__name__)

_FP32 = 4


def measured(config: Config, loaded: LoadedWorker, axis: ShardAxis) -> LoadedWorker:
    """With `rates`, if the settings leave the choice to them. Raises EngineDead if a rank fails."""
    parallel = config.parallel
    # One owner has nobody to read from, and copies of all pages are read in place.
    if axis.size == 1 or parallel.remote_kv != "auto" or parallel.placement == "replicate":
        return loaded
    worker = loaded.worker
    assert isinstance(worker, RankedWorker), "there is more than one rank"
    started = time.monotonic()
    rates = worker.measure()
    logger.info("ranks: %s; measured in %.2f s", describe_rates(rates), time.monotonic() - started)
    return replace(loaded, rates=rates)


def remote_chooser(config: Config, loaded: LoadedWorker, axis: ShardAxis) -> RemoteChooser | None:
    """What the scheduler asks; None where all pages have one owner."""
    if axis.size == 1:
        return None
    asked, rates = config.parallel.remote_kv, loaded.rates
    if asked != "auto":
        return RemoteChooser(RemoteWays.all(Remote(asked)))
    if rates is None:
        return RemoteChooser()
    if not loaded.spec.num_layers:  # windows travel in one way only
        mapped = rates.read_bytes_s > 0
        return RemoteChooser(IN_PLACE if mapped else RemoteWays.all(Remote.GATHER_KV))
    model = RemoteModel(
        ranks=axis.size,
        page_size=loaded.spec.page_size,
        layer=layer_shape(loaded, axis),
        rates=rates,
    )
    return RemoteChooser(model=model)


def layer_shape(loaded: LoadedWorker, axis: ShardAxis) -> LayerShape:
    """What a token of one layer weighs as it travels between two ranks, which have the same heads
    or, of latents, perhaps others."""
    model, spec, tp = loaded.config, loaded.spec, axis.mesh.tp
    width = loaded.pool.buffer.dtype.itemsize
    heads, q_dim, out_dim = model.num_heads // tp, model.head_dim, model.out_size // model.num_heads
    if model.mla is not None and tp > 1:  # others cannot absorb the queries of heads they have not
        q_dim, out_dim = model.mla.row_dim, model.mla.kv_rank
    return LayerShape(
        kv_bytes=spec.token_bytes // spec.num_layers // axis.ranks_per_owner,
        q_bytes=heads * q_dim * width,
        partial_bytes=heads * (out_dim + 1) * _FP32,
    )


def copies_bytes(config: Config, loaded: LoadedWorker, axis: ShardAxis) -> int:
    """An upper bound of what copies of travelling pages take on each rank."""
    parallel = config.parallel
    if axis.size == 1 or parallel.remote_kv == "direct" or parallel.placement == "replicate":
        return 0
    pairs = list(zip(loaded.specs, loaded.num_pages, strict=True))
    if parallel.remote_kv == "send_q":  # windows travel as pages all the same
        pairs = [(spec, pages) for spec, pages in pairs if spec.retention is not None]
    specs, pages = [spec for spec, _ in pairs], [count for _, count in pairs]
    return staging_bytes(specs, pages, ranks=axis.size) // axis.ranks_per_owner


def describe_remote(config: Config, rates: LinkRates | None) -> str:
    """One line for the start-up table."""
    asked = config.parallel.remote_kv
    if rates is None:
        return "direct" if asked == "auto" else asked
    return f"auto: {describe_rates(rates)}"


def describe_rates(rates: LinkRates) -> str:
    """The figures that an operator may want to doubt."""
    mapped = "pools not mapped"
    if rates.read_bytes_s:
        mapped = f"{format_bytes(int(rates.read_bytes_s))}/s in place"
    return (
        f"link {rates.latency_s * 1e6:.0f} us and {format_bytes(int(rates.bytes_s))}/s, {mapped}, "
        f"{rates.linear_row_s * 1e6:.1f} us a row and {rates.pair_s * 1e9:.2f} ns a key in a layer"
    )
