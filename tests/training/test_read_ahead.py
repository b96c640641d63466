"""Batches that another thread reads while those before them are learnt from, and their states, where the target has a
device of its own."""

import itertools
import threading

import pytest
import torch
from programs import called, forked

from eagle31_hf.training.read_ahead import StatesAhead, TrainingBatches

PATIENCE = 20.0
CPU = torch.device("cpu")


@pytest.fixture
def batches():
    ahead = TrainingBatches()
    yield ahead
    ahead.close()


def test_batches_come_in_their_order_and_fewer_at_the_end(batches):
    items = iter(range(7))
    assert [batches.take(items, count) for count in (3, 1, 2, 4, 1)] == [[0, 1, 2], [3], [4, 5], [6], []]


def test_as_many_are_read_as_were_taken_and_no_more(batches):
    read, now = [], threading.Condition()

    def numbers():
        for i in itertools.count():
            with now:
                read.append((i, threading.current_thread()))
                now.notify_all()
            yield i

    items = numbers()
    assert batches.take(items, 3) == [0, 1, 2]
    with now:
        assert now.wait_for(lambda: len(read) >= 6, PATIENCE), "nothing is read ahead"
    assert batches.take(items, 1) == [3]
    with now:
        assert not now.wait_for(lambda: len(read) > 6, 0.2), "memory for more than was asked for"
    assert [i for i, thread in read if thread is threading.main_thread()] == [0], "with the first an order is drawn"
    batches.close()
    assert items.gi_frame is not None


def test_an_error_is_raised_where_its_batch_is_taken(batches):
    def items():
        yield 0
        raise ValueError("the second is damaged")

    with pytest.raises(ValueError, match="the second is damaged"):
        batches.take(items(), 2)


def test_an_epoch_begins_once_nothing_is_read_of_the_one_before(batches):
    begun, goes_on, reading = threading.Event(), threading.Event(), set()

    def items(epoch):
        for i in range(3):
            reading.add(epoch)
            assert reading == {epoch}, "two epochs are read at once"
            if (epoch, i) == (1, 1):
                begun.set()
                assert goes_on.wait(PATIENCE)
            reading.remove(epoch)
            yield epoch, i

    assert batches.take(items(1), 1) == [(1, 0)]
    assert begun.wait(PATIENCE)
    threading.Timer(0.05, goes_on.set).start()
    assert batches.take(items(2), 3) == [(2, 0), (2, 1), (2, 2)]


def test_the_threads_end_when_it_is_closed_but_one_that_reads_is_not_waited_for(batches):
    before, begun, goes_on = {*threading.enumerate()}, threading.Event(), threading.Event()

    def items():
        yield 0
        begun.set()
        assert goes_on.wait(PATIENCE)

    assert batches.take(items(), 1) == [0]
    assert begun.wait(PATIENCE)
    threads = {*threading.enumerate()} - before
    batches.close()
    assert any(thread.is_alive() for thread in threads)
    goes_on.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_states_of_one_batch_are_read_while_those_of_another_are_used():
    read, moved, now = [], [], threading.Condition()

    class States(int):
        def to(self, device):
            moved.append((self, len(read)))
            return self

    def states(number):
        with now:
            read.append((number, threading.current_thread()))
            now.notify_all()
        if number == 3:
            raise ValueError("the fourth breaks the target")
        return States(number), States(-number)

    ahead = StatesAhead(states, [0, 1, 2, 3])
    for number in (0, 1, 2):
        with now:
            assert now.wait_for(lambda: len(read) > number, PATIENCE), "they are read when they are taken"  # noqa: B023
            assert not now.wait_for(lambda: len(read) > number + 1, 0.1), "memory for two"  # noqa: B023
        assert ahead.take(CPU) == (number, -number)
        assert moved[-2:] == [(number, number + 1), (-number, number + 1)], "a GPU copies them behind the next read"
    with pytest.raises(ValueError, match="the fourth breaks the target"):
        ahead.take(CPU)
    assert threading.main_thread() not in {thread for _, thread in read}


@pytest.mark.skipif(torch.__version__ < "2.9", reason="the pretend device needs torch 2.9")
def test_learning_asks_nothing_of_the_targets_device():
    """Not its embedding and not its head: it would wait there for what is read ahead."""
    reading = {"training/trainer.py", "training/ends.py"}  # moves the ids, runs the target
    assert forked(called, "two_devices", "files_that_wait") == reading | {"training/read_ahead.py"}
