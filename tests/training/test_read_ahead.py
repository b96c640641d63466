"""Batches that another thread reads while those before them are learnt from."""

import itertools
import threading

import pytest

from eagle31_hf.training.read_ahead import ReadAhead

PATIENCE = 20.0


def test_items_come_in_their_order_and_fewer_at_the_end():
    ahead = ReadAhead(iter(range(7)))
    assert [ahead.take(count) for count in (3, 1, 2, 4, 1)] == [[0, 1, 2], [3], [4, 5], [6], []]


def test_as_many_are_read_as_were_taken_and_no_more():
    read, now = [], threading.Condition()

    def items():
        for i in itertools.count():
            with now:
                read.append((i, threading.current_thread()))
                now.notify_all()
            yield i

    ahead = ReadAhead(items())
    assert read == [(0, threading.main_thread())], "an order is drawn as the first item is read"
    assert ahead.take(3) == [0, 1, 2]
    with now:
        assert now.wait_for(lambda: len(read) >= 6, PATIENCE), "nothing is read ahead"
    assert ahead.take(1) == [3]
    with now:
        assert not now.wait_for(lambda: len(read) > 6, 0.2), "memory for more than was asked for"
    assert {thread for _, thread in read[1:]} != {threading.main_thread()}
    ahead.close()
    assert ahead.items.gi_frame is not None


def test_an_error_is_raised_where_its_item_is_taken():
    def items():
        yield 0
        raise ValueError("the second is damaged")

    ahead = ReadAhead(items())
    with pytest.raises(ValueError, match="the second is damaged"):
        ahead.take(2)


def test_the_thread_ends_when_it_is_closed():
    before = threading.active_count()
    ahead = ReadAhead(iter(range(9)))
    ahead.take(2)
    ahead.close()
    for thread in threading.enumerate()[before:]:
        thread.join(PATIENCE)
    assert threading.active_count() == before
