"""Seeded random walks through the worlds with windows."""

from __future__ import annotations

import random

from phloem.cache import check_invariants
from tests.cache.window_host_world import WindowHostWorld
from tests.cache.window_world import TOKEN, WindowWorld

MOST_RUNNING = 6


class WindowWalk:
    """A seeded random walk through a world."""

    def __init__(self, world: WindowWorld, seed: int, *, max_pages: int = 12) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.max_tokens = max_pages * world.size
        self.texts: list[bytes] = []

    def run(self, steps: int, *, digest_every: int = 50) -> None:
        """Take steps, then end all requests and flush."""
        for step in range(steps):
            self.step()
            if self.world.invariants:
                check_invariants(self.world.cache, idle=not self.world.runners)
            if step % digest_every == 0:
                self.world.check_replicas()
        while self.world.runners:
            self.world.end(self.world.runners[0])
        self.world.flush()
        cache = self.world.cache
        if self.world.invariants:
            check_invariants(cache, idle=True)
        assert cache.free_pages == cache.total_pages
        assert cache.leader.window.free_pages == cache.leader.window.total_pages
        self.world.check_replicas()

    def step(self) -> None:
        rng, world = self.rng, self.world
        roll = rng.random()
        if (roll < 0.25 and len(world.runners) < MOST_RUNNING) or not world.runners:
            namespace = rng.choice((b"a", b"a", b"a", b"b"))
            restart, share = rng.random() < 0.6, rng.random() < 0.9
            world.open(namespace, self._text(), restart=restart, share=share)
            return
        runner = rng.choice(world.runners[:4])
        if world.is_loading(runner):
            return
        done = runner.position == len(runner.tokens) // TOKEN
        if roll < 0.82 and not done:
            world.compute(runner, rng.randint(1, rng.choice((1, 9)) * world.size))
        elif roll < 0.88:
            if done or rng.random() < 0.3:
                world.close(runner)
        elif roll < 0.90:
            world.evict(rng.randint(0, 6))
        elif roll < 0.995:
            world.evict_windows(rng.choice((1, 5, 99, 99)))
        else:
            world.flush()

    def _text(self) -> bytes:
        rng = self.rng
        base = b""
        if self.texts and rng.random() < 0.9:
            base = rng.choice(self.texts)
            if rng.random() < 0.25:
                base = base[: rng.randint(0, len(base) // TOKEN) * TOKEN]
        room = self.max_tokens - len(base) // TOKEN
        more = rng.choice((0, 1, room // 2, room))
        tail = [rng.randrange(2) for _ in range(rng.randint(0, max(0, more)))]
        text = base + b"".join(token.to_bytes(TOKEN, "little") for token in tail)
        text = text or bytes(TOKEN)
        if len(self.texts) < 6:
            self.texts.append(text)
        else:
            self.texts[rng.randrange(6)] = text
        return text


class WindowHostWalk(WindowWalk):
    """A seeded random walk with copies and loads."""

    world: WindowHostWorld

    def step(self) -> None:
        rng, world = self.rng, self.world
        roll = rng.random()
        waiting = list(world.loading)
        if roll < 0.15:
            namespace, tokens = self.known_text(copied=False)
            world.back_up(namespace, tokens, done=rng.random() < 0.9)
        elif roll < 0.30:
            if len(world.runners) >= MOST_RUNNING:
                world.end(rng.choice(world.runners))
            namespace, tokens = self.known_text(copied=True)
            world.open_loading(namespace, tokens + bytes(TOKEN * rng.randint(1, 9)), rng.random())
        elif roll < 0.45 and waiting:
            runner = rng.choice(waiting)
            if rng.random() < 0.15:
                world.give_up(runner)
            else:
                world.end_load(runner, done=rng.random() < 0.85)
        elif roll < 0.50:
            world.evict(rng.choice((3, 30)))
        elif roll < 0.56:
            world.evict_windows(99)
        else:
            super().step()

    def known_text(self, *, copied: bool) -> tuple[bytes, bytes]:
        """Namespace and tokens of the path down to some node; `copied`: to one with copies."""
        tree = self.world.cache.state.tree
        nodes = [tree.nodes[name] for name in sorted(tree.nodes) if name != tree.root.id]
        nodes = [node for node in nodes if not node.detached]
        if copied:
            nodes = [node for node in nodes if node.host or any(node.extra[0].host)]
        if not nodes:
            return b"a", self._text()
        node = self.rng.choice(nodes)
        namespace, tokens = node.namespace, b""
        while node is not tree.root:
            tokens = node.key + tokens
            node = node.parent
        return namespace, tokens
