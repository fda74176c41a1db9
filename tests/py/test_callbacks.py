"""Python functions that native code calls: what they raise reaches Python, and ends no process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from segki import _segki

ROWS, LENGTH, LIMIT = 1, 8, 4


class Memory:
    """Gives aligned memory and keeps count; `fail` says which function raises."""

    def __init__(self, fail: str = "") -> None:
        self.fail = fail
        self.held: dict[int, Any] = {}

    def allocate(self, size: int) -> int:
        if self.fail == "allocate":
            raise LookupError("no such memory")
        buffer = ctypes.create_string_buffer(size + 64)
        address = (ctypes.addressof(buffer) + 63) // 64 * 64
        self.held[address] = buffer
        return address

    def release(self, address: int, size: int) -> None:
        del self.held[address]
        if self.fail == "release":
            raise LookupError("cannot release")


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """Exceptions that reached sys.unraisablehook."""
    caught: list[BaseException] = []
    monkeypatch.setattr("sys.unraisablehook", lambda given: caught.append(given.exc_value))
    yield caught


def new_cache(allocate: Callable[[int], Any], release: Callable[[int, int], Any]) -> Any:
    layers = [_segki.KvLayer(1, 8, 8, 0, _segki.DType.f32)]
    return _segki.HybridCache(ROWS, LENGTH, layers, allocate, release)


def test_what_release_raises_is_reported_and_nothing_else_happens(unraisable: list[BaseException]) -> None:
    memory = Memory("release")
    cache = new_cache(memory.allocate, memory.release)
    assert len(memory.held) == 1
    cache.release()
    assert not memory.held
    assert [str(error) for error in unraisable] == ["cannot release"]
    assert cache.bytes == 0
    del cache
    assert len(unraisable) == 1


def test_release_may_raise_when_the_cache_is_collected(unraisable: list[BaseException]) -> None:
    memory = Memory("release")
    cache = new_cache(memory.allocate, memory.release)
    del cache
    assert not memory.held
    assert [type(error) for error in unraisable] == [LookupError]


def test_release_may_raise_while_another_exception_is_on_its_way(unraisable: list[BaseException]) -> None:
    memory = Memory("release")

    def fail() -> None:
        cache = new_cache(memory.allocate, memory.release)
        raise KeyError(cache.rows)

    with pytest.raises(KeyError):
        fail()
    assert [type(error) for error in unraisable] == [LookupError]
    assert not memory.held


def test_what_allocate_raises_reaches_the_caller(unraisable: list[BaseException]) -> None:
    memory = Memory("allocate")
    with pytest.raises(LookupError, match="no such memory"):
        new_cache(memory.allocate, memory.release)
    assert not unraisable


def test_allocate_may_return_nothing() -> None:
    with pytest.raises(MemoryError, match="no memory for"):
        new_cache(lambda size: None, Memory().release)


@pytest.mark.parametrize("given", ["here", 1.5, -64])
def test_allocate_must_return_an_address(given: object) -> None:
    with pytest.raises(ValueError, match=rf"'allocate' returned '?{given}'?, accepted an address \(int\) or None"):
        new_cache(lambda size: given, Memory().release)


def test_an_unaligned_address_goes_back_and_is_refused(unraisable: list[BaseException]) -> None:
    given_back: list[int] = []

    def release(address: int, size: int) -> None:
        given_back.append(address)
        raise LookupError("cannot release")

    with pytest.raises(ValueError, match="not a multiple of 64"):
        new_cache(lambda size: 4097, release)
    assert given_back == [4097]
    assert [type(error) for error in unraisable] == [LookupError]


class Step:
    """The state of a loop whose step is a Python function."""

    def __init__(self) -> None:
        self.generated = torch.zeros(ROWS, dtype=torch.int32)
        self.finished = torch.zeros(ROWS, dtype=torch.int32)
        self.kept = [torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)]
        self.history = torch.zeros(ROWS, LIMIT, dtype=torch.int64)

    def loop(self, replay: Callable[[], None]) -> Any:
        state, rule = _segki.DecodeState(), _segki.StopRule()
        names = ("next", "lengths", "positions", "generated", "finished", "history")
        for name, tensor in zip(names, (*self.kept, self.generated, self.finished, self.history), strict=True):
            dtype = _segki.DType.i64 if tensor.dtype == torch.int64 else _segki.DType.i32
            setattr(state, name, _segki.View(tensor.data_ptr(), dtype, list(tensor.shape), list(tensor.stride())))
        rule.max_new_tokens, rule.check_every = LIMIT, 1
        return _segki.DecodeLoop(replay, state, rule)

    def run(self) -> None:
        self.generated += 1
        if int(self.generated[0]) == LIMIT:
            self.finished += int(_segki.StopReason.length.value)


def test_what_a_step_raises_reaches_the_caller() -> None:
    failing = [True]
    step = Step()

    def replay() -> None:
        if failing[0] and int(step.generated[0]) == 2:
            raise LookupError("no step")
        step.run()

    loop = step.loop(replay)
    with pytest.raises(LookupError, match="no step"):
        loop.run()
    failing[0] = False
    assert loop.run(2).columns == LIMIT


def test_what_on_tokens_raises_reaches_the_caller() -> None:
    def on_tokens(begin: int, count: int) -> bool:
        if begin == 1:
            raise LookupError("no listener")
        return True

    step = Step()
    loop = step.loop(step.run)
    with pytest.raises(LookupError, match="no listener"):
        loop.run(0, on_tokens)
    assert loop.run(2).columns == LIMIT
