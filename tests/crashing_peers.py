"""Peers that misbehave on purpose, for test_bench.py; a child process imports them by this module's name."""

from __future__ import annotations

import os
import signal
import sys
import time

from cuflash.bench.contenders import Prepared
from cuflash.bench.peer import Peer
from cuflash.bench.peers_unfused import Unfused
from cuflash.errors import CuflashError


class Misbehaving(Peer):
    """Does one thing when it is prepared, but for causal shapes, which it computes."""

    module = "crashing_peers"
    place = "cpu"

    def __init__(self, name, act, needs=()):
        self.name, self.act, self.needs = name, act, needs

    def prepare(self, inputs, fresh):
        if not inputs.shape.causal:
            self.act()
        return Unfused(self.name, "cpu").prepare(inputs, fresh)


class Wrong(Misbehaving):
    """Right but for one row of one head, in every direction."""

    def prepare(self, inputs, fresh):
        made = Unfused(self.name, "cpu").prepare(inputs, fresh)

        def results():
            found = {name: array.copy() for name, array in made.results().items()}
            for array in found.values():
                array[-1, -1, -1] = 0.5
            return found

        return Prepared(made.call, results, self.name)


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def leave():
    os._exit(3)


def hang():
    time.sleep(60)


def refuse():
    raise CuflashError("does not do this\n  and says more")


def raise_():
    raise RuntimeError("no kernel image is available")


def chatter():
    """Prints what could be taken for an answer."""
    print('{"says": "lies"}')
    sys.stdout.flush()
    os.write(1, b"noise\n")


PEERS = (
    Misbehaving("segfault", segfault),
    Misbehaving("leave", leave),
    Misbehaving("hang", hang),
    Misbehaving("refuse", refuse),
    Misbehaving("raise", raise_),
    Misbehaving("chatter", chatter),
    Misbehaving("absent", refuse, needs=("no_such_module",)),
    Wrong("wrong", refuse),
)
