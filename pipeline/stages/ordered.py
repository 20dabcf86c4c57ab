"""Work done by many threads, taken in order: a file is hashed front to back while parts are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Slot = TypeVar("Slot")
Made = TypeVar("Made")


def in_order(
    pool: ThreadPoolExecutor, items: Iterable[Item], slots: list[Slot], make: Callable[[Item, Slot], Made]
) -> Iterator[tuple[Item, Slot, Made]]:
    """Run make(item, slot) in the pool and yield (item, slot, what it gave) in the order of the items.

    At most len(slots) items are under way or waiting to be taken; a slot (a buffer, say) is used again once its item
    was taken. The first failure is raised here, after the calls that already run have ended.
    """
    free = deque(slots)
    flying: deque[tuple[Item, Slot, Future[Made]]] = deque()
    try:
        for item in items:
            if not free:
                taken, slot, future = flying.popleft()
                yield taken, slot, future.result()
                free.append(slot)
            slot = free.popleft()
            flying.append((item, slot, pool.submit(make, item, slot)))
        while flying:
            taken, slot, future = flying.popleft()
            yield taken, slot, future.result()
    finally:
        for _, _, future in flying:
            future.cancel()
        wait([future for _, _, future in flying])
