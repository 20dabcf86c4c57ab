"""Work in threads: all items, the first failure, and nothing after it."""

from __future__ import annotations

import threading

import pytest

from ktconvert.native_quant.runtime.weights import in_parallel


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 500])
def test_each_item_is_done_once(threads: int, count: int) -> None:
    """Whatever the number of threads, also more than items."""
    done: list[int] = []
    in_parallel(done.append, range(count), threads)
    assert sorted(done) == list(range(count))


def test_no_item_begins_after_an_exception() -> None:
    """A layer with a number that is not finite is refused at once."""
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 3:
            raise ValueError("the fourth")

    with pytest.raises(ValueError, match="the fourth"):
        in_parallel(work, range(100), 1)
    assert begun == [0, 1, 2, 3]


def test_the_first_items_exception_is_raised() -> None:
    """Not that of the thread that failed first: here item 1 fails while item 0 is still at work."""
    second_failed = threading.Event()

    def work(item: int) -> None:
        if item == 1:
            second_failed.set()
            raise ValueError("the second")
        assert second_failed.wait(300)
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        in_parallel(work, range(2), 2)
