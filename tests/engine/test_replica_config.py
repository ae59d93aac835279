"""When a server's ranks make replicas of hot pages, if nobody says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phloem.cache import ReplicaConfig
from phloem.cache.remote_choice import RemoteChooser, RemoteModel
from phloem.cache.remote_cost import LayerShape
from phloem.config import CacheOptions, Config, ParallelOptions
from phloem.core.remote import LinkRates
from phloem.engine.loop_core import replica_config
from tests.engine.fakes import build_fake


def chooser(read_bytes_s: float) -> RemoteChooser:
    """Ranks whose links were measured; 0: they map no memory of each other."""
    rates = LinkRates(
        latency_s=1e-5, bytes_s=1e9, linear_row_s=1e-6, pair_s=1e-9, read_bytes_s=read_bytes_s
    )
    layer = LayerShape(kv_bytes=1, q_bytes=1, partial_bytes=1)
    return RemoteChooser(model=RemoteModel(ranks=2, page_size=16, layer=layer, rates=rates))


@pytest.mark.parametrize(
    ("options", "remote", "made"),
    [
        ({}, None, False),  # one rank
        ({}, chooser(1e9), False),
        ({}, chooser(0.0), True),
        ({"remote_kv": "direct"}, RemoteChooser(), False),
        ({"remote_kv": "gather_kv"}, RemoteChooser(), True),
        ({"remote_kv": "send_q"}, RemoteChooser(), True),
        ({"remote_kv": "gather_kv", "hot_replicas": "0"}, RemoteChooser(), False),
    ],
)
def test_replicas_are_made_where_others_pages_are_not_read_in_place(options, remote, made):
    config = Config(parallel=ParallelOptions(cp=2, **options))
    assert replica_config(config, remote) == (ReplicaConfig() if made else None)


def test_a_share_that_is_given_counts_whatever_the_way():
    config = Config(parallel=ParallelOptions(cp=2, remote_kv="direct", hot_replicas="0.5"))
    assert replica_config(config, RemoteChooser()) == ReplicaConfig(fraction=0.5)


@pytest.mark.parametrize(("share", "warns"), [("0.5", True), ("0", False), ("auto", False)])
def test_who_asks_for_replicas_that_there_cannot_be_is_told(share, warns, caplog):
    """One owner of all pages here. Red if the setting is dropped without a word."""
    parallel = ParallelOptions(remote_kv="gather_kv", hot_replicas=share)
    config = Config(parallel=parallel, cache=CacheOptions(num_pages=8))
    hooks = dict.fromkeys(("emit", "on_wait", "wake", "on_load", "on_layer"), lambda *_: None)
    build_fake(config, SimpleNamespace(**hooks), ()).close()
    told = "--hot-replicas 0.5 has no effect: it is for 2 to 64 owners of pages, and there are 1"
    assert [record.message for record in caplog.records] == [told] * warns
