"""Threads for the tiled algorithm: one queue of items, one BLAS thread each, sums in a fixed order.

NumPy releases Python's lock inside products and ufuncs, so plain threads fill the cores.  There are as many
as NumPy's BLAS would use (threadpoolctl.threadpool_limits and OPENBLAS_NUM_THREADS count), at most one per
core the process may run on.  Which thread takes which item changes nothing in the results: items are the same
for any number of threads, and where two items add to the same rows they do it in the order of the queue.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from cuflash.problem import Problem

MIN_FLOP_PER_THREAD = 2e7  # 0.2 ms of products: starting a thread costs about as much as half of it


class Queue:
    """Hands out items in order, and keeps those that add to the same sums in that order.

    shares(item): items with equal keys add to the same sums; without it none do.
    """

    def __init__(self, items: Sequence, shares: Callable[[Any], Hashable] | None = None):
        self.items = items
        self.shares = shares
        self.n_done = 0
        self.error: BaseException | None = None
        self._next = 0
        self.reached: dict[int, float] = {}  # of items that run: all rows from here on are done
        self.changed = threading.Condition()

    def take(self) -> Turn | None:
        """The turn of the next item; None when there is none left, or one has failed."""
        with self.changed:
            if self.error is not None or self._next == len(self.items):
                return None
            n, self._next = self._next, self._next + 1
            self.reached[n] = math.inf
            return Turn(self, n)

    def done(self, n: int) -> None:
        with self.changed:
            del self.reached[n]
            self.n_done += 1
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop: no item is started any more, and those that wait end too."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()


class Turn:
    """The turn of item n, which walks its query rows from the last to the first.

    Before it adds to rows it waits until every earlier item with the same sums has passed them.  Items are
    started in order, so the earliest one running never waits: no deadlock.
    """

    def __init__(self, queue: Queue, n: int):
        self.queue, self.n = queue, n
        self.key = queue.shares(queue.items[n]) if queue.shares else None

    def wait_for(self, row: int) -> None:
        """Return when this item may add to rows from `row` on."""
        queue = self.queue
        if queue.shares is None:
            return
        with queue.changed:
            while any(
                n < self.n and reached > row and queue.shares(queue.items[n]) == self.key
                for n, reached in queue.reached.items()
            ):
                if queue.error is not None:
                    raise queue.error
                queue.changed.wait()

    def passed(self, row: int) -> None:
        """This item adds no more to rows from `row` on."""
        with self.queue.changed:
            self.queue.reached[self.n] = row
            self.queue.changed.notify_all()


def do_all(
    queue: Queue, make_worker: Callable[[], Callable[[Turn, Any], None]], flop: float, progress: Any = None
) -> None:
    """Do every item of the queue.

    make_worker() is called once per thread and returns the function (turn, item) -> None that does an item;
    it owns the buffers.  flop: of all items together; little work stays in the calling thread.
    progress(done, total) counts items; it is called in the calling thread only.  The first error of any
    thread, progress included, stops all and is raised.
    """
    total = len(queue.items)

    def work(report: Any = None) -> None:
        try:
            # NaN and inf travel as the contract says, without warnings; some BLAS keep the limit by thread
            with np.errstate(all="ignore"), blas().limit(limits=1):
                do = make_worker()
                while (turn := queue.take()) is not None:
                    do(turn, queue.items[turn.n])
                    queue.done(turn.n)
                    if report is not None and queue.n_done < total:
                        report(queue.n_done, total)
        except BaseException as error:  # KeyboardInterrupt must stop the other threads too
            queue.fail(error)

    with ONE_BLAS_THREAD as n_allowed:
        n_threads = min(n_allowed, total, 1 + int(flop / MIN_FLOP_PER_THREAD))
        others = [threading.Thread(target=work, daemon=True) for _ in range(n_threads - 1)]
        for thread in others:
            thread.start()
        work(progress)
        try:
            for thread in others:
                thread.join()
        except BaseException as error:  # interrupted: nobody may write after the call has ended
            queue.fail(error)
            for thread in others:
                thread.join()
            raise
    if queue.error is not None:
        raise queue.error
    if progress is not None and total:
        progress(total, total)


def n_flop(problem: Problem, n_products: int, n_products_v: int) -> float:
    """Flop of so many products over head_dim and over head_dim_v; masks, which only take away, left out."""
    dims = n_products * problem.head_dim + n_products_v * problem.head_dim_v
    n_pairs = problem.heads * problem.len_q * problem.len_k * (1 if problem.packed else problem.batch)
    return 2.0 * dims * n_pairs


class _OneBlasThread:
    """Context in which BLAS products stay in the thread that asks; gives the number of threads to use.

    The limit is the process's, so calls that overlap share it: the first sets it, the last takes it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_inside = 0
        self._n_allowed = 1
        self._limit: Any = None

    def __enter__(self) -> int:
        with self._lock:
            if self._n_inside == 0:
                self._n_allowed = min(n_cores(), n_blas_threads())
                _free_control()
                self._limit = blas().limit(limits=1)
            self._n_inside += 1
            return self._n_allowed

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._n_inside -= 1
            if self._n_inside == 0:
                _free_control()
                self._limit.restore_original_limits()
                _free_control()


ONE_BLAS_THREAD = _OneBlasThread()


@functools.cache
def blas() -> ThreadpoolController:
    """NumPy's BLAS, found once: looking through the process' libraries takes 0.2 ms."""
    return ThreadpoolController().select(user_api="blas")


def _free_control() -> None:
    """Let this thread set the limit: threadpoolctl 3.8 ignores all but the first thread that has set one."""
    for library in blas().lib_controllers:
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)


def n_blas_threads() -> int:
    """Threads that NumPy's BLAS would use; no limit for a BLAS that threadpoolctl does not know."""
    return min((library.num_threads for library in blas().lib_controllers), default=n_cores())


def n_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
