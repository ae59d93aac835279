"""The command log: one order, applied by all, with a digest of everything written."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.replica import Command, CommandLog, commands


class Recorder:
    """A state that keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[Command] = []

    def apply(self, command: Command) -> Any:
        self.seen.append(command)
        return len(self.seen)

    def digest(self) -> str:
        return repr(self.seen)


def test_commands_are_applied_at_once_and_in_order_on_every_rank():
    leader, follower = Recorder(), Recorder()
    log = CommandLog(leader)
    log.attach(follower)
    for index in range(1000):
        assert log.append(commands.lock(index, 0)) == index + 1
        assert log.position == index + 1
    assert leader.seen == follower.seen == [commands.lock(index, 0) for index in range(1000)]


def test_digest_depends_on_the_commands_and_not_on_when_it_is_asked_for():
    asked, silent = CommandLog(Recorder()), CommandLog(Recorder())
    for index in range(700):
        asked.append(commands.split(index, 1))
        silent.append(commands.split(index, 1))
        asked.digest()
    assert asked.digest() == silent.digest()


@pytest.mark.parametrize("at", [0, 300, 599])
def test_digest_sees_one_changed_field(at):
    one, two = CommandLog(Recorder()), CommandLog(Recorder())
    for index in range(600):
        one.append(commands.evict((index, 1)))
        two.append(commands.evict((index, 2 if index == at else 1)))
    assert one.digest() != two.digest()


def test_digest_of_inserts_does_not_depend_on_when_it_is_asked_for():
    asked, silent = CommandLog(Recorder()), CommandLog(Recorder())
    for index in range(600):
        for log in (asked, silent):
            log.append(commands.lock(index, 0))
            if index % 7 == 0:
                log.append(commands.insert(index, b"ns", b"tokens", b"refs"))
        asked.digest()
    assert asked.digest() == silent.digest()
    assert asked.position == 600 + 86


def test_digest_sees_the_order():
    one, two = CommandLog(Recorder()), CommandLog(Recorder())
    one.append(commands.free(b"a"))
    one.append(commands.free(b"b"))
    two.append(commands.free(b"b"))
    two.append(commands.free(b"a"))
    assert one.digest() != two.digest()


def test_digest_sees_equal_values_as_equal_whatever_objects_hold_them():
    """No identity of an object, no shared reference leaks into it."""
    shared = b"x" * 100
    one, two = CommandLog(Recorder()), CommandLog(Recorder())
    one.append(commands.insert(0, shared, shared, shared))
    two.append(commands.insert(0, *(bytes(bytearray(shared)) for _ in range(3))))
    assert one.digest() == two.digest()


def test_every_op_has_its_own_number():
    made = [
        commands.alloc(0, 1),
        commands.free(b""),
        commands.insert(0, b"", b"", b""),
        commands.append(1, b"", b""),
        commands.split(1, 1),
        commands.merge(1, 1),
        commands.lock(1, 0),
        commands.unlock(1),
        commands.evict(()),
        commands.detach(),
        commands.host_alloc(1),
        commands.host_free(b""),
        commands.host_hold(b""),
        commands.host_release(b""),
        commands.host_attach(1, b""),
        commands.host_insert(0, b"", b"", b""),
        commands.demote(()),
        commands.adopt(1, b""),
        commands.host_evict(()),
        commands.stored(1, 1),
        commands.not_stored(1),
        commands.replicate(1, b""),
        commands.replicated(b""),
        commands.drop_replicas(b""),
    ]
    assert [command[0] for command in made] == list(range(commands.NUM_OPS))
