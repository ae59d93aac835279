"""How ranks and strangers come to the leader, over the loopback interface."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from phloem.config.launch import Launch
from phloem.core.errors import ConfigError, EngineDead
from phloem.core.mesh import Mesh, ShardAxis
from phloem.engine import greeting, meeting
from phloem.engine.greeting import greet, present
from phloem.engine.meeting import Meeting, Met, find_leader
from phloem.engine.rank_seats import rank_seats, size_memory
from phloem.engine.seat_passing import receive_seat, send_seat
from phloem.kv.layout import PageLayout
from tests.contract.test_groups import in_threads
from tests.engine.test_rank_start import SPEC

PATIENT_S = 60.0
SECRET = b"s" * 32
AXIS = ShardAxis(mesh=Mesh(cp=2), ranks_per_owner=1)


def launch(rank: int, size: int = 3, local_size: int = 1) -> Launch:
    return Launch(
        rank=rank,
        size=size,
        local_size=local_size,
        address="127.0.0.1",
        port=1,
        keeps_store=False,
    )


def close(met: Met) -> None:
    met.sock.close()
    if met.pages is not None:
        met.pages.close()


@pytest.fixture
def met() -> Iterator[tuple[Meeting, dist.HashStore]]:
    store = dist.HashStore()
    leader = Meeting(launch(0), store)
    yield leader, store
    leader.close()


def test_ranks_come_in_any_order_and_talk_over_their_own_wires(met) -> None:
    """At the master's address and no other one."""
    leader, store = met
    assert leader.address == "127.0.0.1"
    found = in_threads(2, lambda at: find_leader(launch(2 - at), store, PATIENT_S))
    socks = leader.gather(PATIENT_S)
    for rank, (sock, pages) in enumerate(zip(socks, leader.pages, strict=True), 1):
        mine = found[2 - rank]
        assert mine.address == "127.0.0.1"
        assert mine.pages is not None
        for ours, theirs, said in ((sock, mine.sock, rank), (pages, mine.pages, 100 + rank)):
            ours.sendall(bytes([said]))
            assert theirs.recv(10) == bytes([said])
            assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            ours.close()
            theirs.close()
    leader.store.set("of this start", "yes")
    assert found[0].store.get("of this start") == b"yes"
    with pytest.raises(ConnectionError):  # it listens no more
        socket.create_connection((leader.address, leader._place))


def test_ranks_of_one_machine_get_their_seats_over_the_wire() -> None:
    """Memory and doorbells, under other numbers. Red if two of them change places."""
    store = dist.HashStore()
    leader = Meeting(launch(0, 2, 2), store, seated=True)
    (met,) = in_threads(1, lambda _at: find_leader(launch(1, 2, 2), store, PATIENT_S))
    (sock,) = leader.gather(PATIENT_S)
    assert (met.seated, leader.pages) == (True, [])
    own, other = rank_seats(AXIS, 2)
    size_memory(own, [PageLayout(SPEC, 4, 1), PageLayout(SPEC, 7, 1)], 3)
    send_seat(sock, other)
    sock.sendall(b"more")  # what comes behind it is not taken with it
    theirs = receive_seat(met.sock)
    assert met.sock.recv(10) == b"more"
    assert not set(theirs.fds) & set(other.fds)
    other.close()
    places = [own.take(), theirs.take()]
    assert [[len(pool) for pool in place.pools or ()] for place in places] == [
        [(2 * pages + 1) * SPEC.page_bytes for pages in (4, 7)]
    ] * 2
    for of_one, of_other in zip(places[0].pools or (), places[1].pools or (), strict=True):
        of_one[:3] = b"abc"
        assert of_other[:3] == b"abc"
    places[1].peers.post(0, 0)
    places[0].peers.written(0, 0)
    for place in places:
        place.leave()
    sock.close()
    met.sock.close()


def test_a_rank_that_does_not_come_is_named(met) -> None:
    leader, store = met
    here = find_leader(launch(1), store, PATIENT_S)
    with pytest.raises(EngineDead, match=r"^rank 2 has not joined for 1 s .*--join-timeout-s$"):
        leader.gather(1.0)
    assert here.pages is not None
    for mine in (here.sock, here.pages):
        assert mine.recv(10) == b""  # who came is told that it is over
        mine.close()


def test_a_rank_whose_second_connection_does_not_come_is_named(met) -> None:
    """As long as it is missing nothing begins."""
    leader, _ = met
    found = []
    for number in (1, 2, meeting._PAGES + 1):
        found.append(socket.create_connection((leader.address, leader._place)))
        present(found[-1], leader._secret, number)
    with pytest.raises(EngineDead, match=r"^rank 2 has not joined for 0.2 s"):
        leader.gather(0.2)
    for sock in found:
        sock.close()


def test_a_leader_that_does_not_come_is_an_error_in_time() -> None:
    with pytest.raises(EngineDead, match=r"^rank 1 could not reach the leader for 0.2 s"):
        find_leader(launch(1), dist.HashStore(), 0.2)


def test_a_card_that_an_earlier_leader_has_left_is_not_the_end(met, monkeypatch) -> None:
    """Nobody listens there any more; then the new leader's card comes."""
    _, store = met
    card = store.get(meeting._KEY).decode()
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        port = gone.getsockname()[1]
    store.set(meeting._KEY, meeting._Card(port, b"old", False).to_json())
    monkeypatch.setattr(meeting.time, "sleep", lambda _s: store.set(meeting._KEY, card))
    close(find_leader(launch(1), store, PATIENT_S))


def test_strangers_are_refused_and_delay_nobody(met, monkeypatch, caplog) -> None:
    """One is mute, one knows nothing, one has another secret, one is a rank twice."""
    monkeypatch.setattr(greeting, "_PATIENCE_S", 5.0)
    leader, store = met
    where = leader.address, leader._place
    with caplog.at_level(logging.WARNING), socket.create_connection(where) as mute:
        with socket.create_connection(where) as knows_nothing:
            knows_nothing.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(50))
            said = b""
            while data := knows_nothing.recv(1000):
                said += data
            assert len(said) == len(greeting._MAGIC) + 32  # and no proof
        with socket.create_connection(where) as other, pytest.raises(ConnectionError):
            present(other, b"another secret", 1)
        first = find_leader(launch(1), store, PATIENT_S)
        with pytest.raises(EngineDead, match="does not take rank 1"):
            find_leader(launch(1), store, PATIENT_S)
        with pytest.raises(EngineDead, match="does not take rank 7"):
            find_leader(launch(7, size=9), store, PATIENT_S)
        second = find_leader(launch(2), store, PATIENT_S)
        socks = leader.gather(PATIENT_S)  # while the mute one still says nothing
        assert mute.recv(1000)
        assert [len(socks), caplog.text.count("was refused")] == [2, 4]
    assert "does not know the secret" in caplog.text
    assert "there is a rank 1 already" in caplog.text
    for sock in (*socks, *leader.pages):
        sock.close()
    close(first)
    close(second)


def test_a_rank_finds_out_that_it_is_not_the_leader_who_answers() -> None:
    """Who reads plans from it runs them: the leader has to prove itself too."""
    ours, theirs = socket.socketpair()
    refused = threading.Event()

    def impostor() -> None:
        try:
            greet(theirs, b"guessed", lambda _rank: None)
        except ConnectionError:
            theirs.sendall(bytes(32))
            refused.set()

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(ConnectionError, match="who answers does not know the secret"):
        present(ours, SECRET, 1)
    thread.join()
    assert refused.is_set()
    ours.close()
    theirs.close()


def test_a_proof_is_of_one_rank_and_one_connection() -> None:
    """Red if what a rank has said once can be said again, or for another one."""
    recorded: list[bytes] = []
    for again in range(2):
        ours, theirs = socket.socketpair()
        leader = threading.Thread(target=_greeted, args=(theirs, recorded))
        leader.start()
        if again:
            ours.recv(1000)
            ours.sendall(recorded[0])
        else:
            present(ours, SECRET, 1)
        leader.join()
        ours.close()
        theirs.close()
    assert recorded[1:] == [b"refused"]


def _greeted(sock: socket.socket, recorded: list[bytes]) -> None:
    """Plays a leader, and keeps what the first rank said."""
    real = greeting._receive

    def keep(sock: socket.socket, size: int) -> bytes:
        data = real(sock, size)
        if size > 60 and not recorded:
            recorded.append(data)
        return data

    with pytest.MonkeyPatch.context() as patch:
        if not recorded:
            patch.setattr(greeting, "_receive", keep)
        try:
            assert greet(sock, SECRET, lambda _rank: None) == 1
        except ConnectionError:
            recorded.append(b"refused")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR 203.0.113.1.*rank 0's machine"):
        meeting._listen("203.0.113.1")
