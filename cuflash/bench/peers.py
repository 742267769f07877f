"""What a user could pick instead: every peer that the bench knows.

Each is tried in a child process before it runs here (probe.py); a library that is not installed, refuses or
crashes is a line in the table.
"""

from __future__ import annotations

from cuflash.bench.peer import ALL, HALF, Peer
from cuflash.bench.peers_jax import FlashAttention3Jax, JaxAttention
from cuflash.bench.peers_torch import FlashAttention3, FlashAttention4, Sdpa
from cuflash.bench.peers_unfused import Unfused
from cuflash.bench.suites import SUITES
from cuflash.errors import CuflashError

PEERS: tuple[Peer, ...] = (
    Sdpa("sdpa_flash", "FLASH_ATTENTION", HALF),
    Sdpa("sdpa_cudnn", "CUDNN_ATTENTION", HALF),
    Sdpa("sdpa_efficient", "EFFICIENT_ATTENTION", (*HALF, "float32")),
    Sdpa("sdpa_math", "MATH", ALL, score_arrays=4.0),
    FlashAttention3(),
    FlashAttention3Jax(),
    FlashAttention4(),
    JaxAttention("jax_cudnn", "cudnn", HALF, 0.0),
    JaxAttention("jax_xla", "xla", (*HALF, "float32"), 3.5),
    Unfused("cupy_unfused", "gpu", ("cupy",), ("float16", "float32", "float64")),
    Unfused("numpy_unfused", "cpu"),
    Sdpa("torch_cpu", None, ALL, place="cpu"),
)


def chosen(names: tuple[str, ...], place: str, grid: str) -> tuple[Peer, ...]:
    """Peers named on the command line; without names, all that the grid is for.

    The envelope is the best there is: libraries that hold scores, or offer a kernel that another peer offers
    too, are left out unless they are named.
    """
    found = named(names or None, place)
    return tuple(peer for peer in found if names or grid != "envelope" or peer.best)


def named(names: tuple[str, ...] | None, place: str) -> list[Peer]:
    """Peers of a place by name, all of them when names is None."""
    known = {peer.name: peer for peer in PEERS if peer.place == place}
    unknown = [name for name in names or () if name not in {peer.name for peer in PEERS}]
    if unknown:
        listed = ", ".join(peer.name for peer in PEERS)
        said = [f"{name} (a suite: it comes before --peers)" if name in SUITES else name for name in unknown]
        raise CuflashError(f"bench: unknown peer {', '.join(said)}; known: {listed}.")
    return [peer for name, peer in known.items() if names is None or name in names]
