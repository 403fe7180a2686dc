"""Calls that wait for the import of a module."""

import importlib
import sys
import threading
import types

import pytest

from flash_attn._after_import import _Finder, after_import

NAME = "module_of_the_test"


class Awaited:
    """A module that calls `meet` halfway through its import; and what calls that wait for it have found."""

    def __init__(self, folder):
        self.folder, self.meet, self.found = folder, lambda: None, []

    def write(self, end):
        (self.folder / f"{NAME}.py").write_text(f"from meeting import meet\nmeet()\n{end}\n")
        importlib.invalidate_caches()

    def wait(self):
        after_import(NAME, lambda: self.found.append(hasattr(sys.modules[NAME], "last")))


@pytest.fixture
def awaited(tmp_path, monkeypatch):
    awaited = Awaited(tmp_path)
    awaited.write("last = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "meeting", types.SimpleNamespace(meet=lambda: awaited.meet()))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield awaited
    sys.modules.pop(NAME, None)


def test_calls_are_made_once_at_the_end_of_the_import(awaited):
    awaited.wait()
    awaited.wait()
    assert not awaited.found
    importlib.reload(importlib.import_module(NAME))
    assert awaited.found == [True, True]
    awaited.wait()
    assert awaited.found == [True, True, True]


def test_during_the_import(awaited):
    """The module imports what waits for it."""
    awaited.meet = awaited.wait
    awaited.wait()
    importlib.import_module(NAME)
    assert awaited.found == [True, True]


@pytest.mark.parametrize("earlier", [False, True])
def test_during_the_import_by_another_thread(awaited, earlier):
    if earlier:
        awaited.wait()
    started, more = threading.Event(), threading.Event()
    awaited.meet = lambda: started.set() or more.wait(60)
    thread = threading.Thread(target=importlib.import_module, args=(NAME,))
    thread.start()
    assert started.wait(60)
    awaited.wait()
    found = list(awaited.found)
    more.set()
    importlib.import_module(NAME)  # which waits for the other thread
    thread.join()
    assert not found
    assert awaited.found == [True] * (1 + earlier)


def test_import_that_fails(awaited):
    """Calls wait for one that succeeds, whether they began to wait before it or during it."""
    awaited.write("raise ValueError('not yet')")
    awaited.meet = awaited.wait
    awaited.wait()
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module(NAME)
    assert not awaited.found
    awaited.write("last = 1")
    importlib.import_module(NAME)
    assert awaited.found == [True, True, True]


def test_finders_without_find_spec(awaited, monkeypatch):
    finders = [finder for finder in sys.meta_path if finder is not _Finder]
    monkeypatch.setattr(sys, "meta_path", [object(), *finders])
    awaited.wait()
    importlib.import_module(NAME)
    assert awaited.found == [True]


def test_module_that_is_not_there(awaited):
    after_import("no_such_module", awaited.wait)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module")


def test_module_that_is_kept_from_being_imported(awaited, monkeypatch):
    monkeypatch.setitem(sys.modules, NAME, None)
    awaited.wait()
    assert not awaited.found
