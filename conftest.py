"""Fixtures and markers that every test shares.

`device` is "cuda" where there is a GPU and "cpu" elsewhere; `--device` overrides it. A test that needs more says so
with a marker and is skipped, with the reason, where it cannot run. `pytest` alone takes minutes; `-m slow` runs the
wide samples.
"""

import atexit
import collections
import ctypes
import gc
import multiprocessing
import os
import re
import runpy
import sys
import types
import zlib

import cases
import processes
import pytest
import torch

from flash_attn import _library

LOGS = pytest.StashKey[object]()  # the plugin of pytest that catches them
EMULATOR = pytest.StashKey[ctypes.CDLL]()  # the library of kernels that --emulate has loaded


def pytest_addoption(parser):
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.addoption("--device", default=default, help=f"device that the tests run on (here: {default})")
    parser.addoption(
        "--emulate",
        metavar="INSTANCES",
        help="with --device=cpu: run the CUDA kernels there, those of attention that this glob names (tests/emulator)",
    )


def pytest_configure(config):
    paths = [str(path) for path in config.getini("pythonpath")]  # for processes that a test starts, too
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    # For small tensors one thread is as fast as more, and ten times faster where other work shares the cores.
    torch.set_num_threads(1)
    cases.WIDE = asks_for_slow(config.option.markexpr)
    if config.getoption("--device") == "cpu":  # Triton looks when it is imported, which torch may do at any time
        os.environ.setdefault("TRITON_INTERPRET", "1")
    patterns = config.getoption("--emulate")
    if hasattr(config, "workerinput"):
        atexit.register(_end_at_once)
    if patterns:
        if config.getoption("--device") != "cpu":
            raise pytest.UsageError("--emulate needs --device=cpu")
        build = runpy.run_path(str(config.rootpath / "tests/emulator/build_kernels.py"))["build"]
        path = str(build(patterns.split(",")))
        torch.ops.load_library(path)
        config.stash[EMULATOR] = ctypes.CDLL(path)


def pytest_sessionstart(session):
    """Logs are caught for tests that look at them, alone: pytest gives each of the hundred loggers of torch and
    transformers two handlers in each phase of a test, which takes longer than many a test."""
    config = session.config
    asked = any(config.getoption(name) for name in ("log_level", "log_cli_level", "log_file"))
    config.stash[LOGS] = None if asked else config.pluginmanager.unregister(name="logging-plugin")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    if "caplog" not in item.fixturenames or item.config.stash[LOGS] is None:
        return (yield)
    plugins, logs = item.config.pluginmanager, item.config.stash[LOGS]
    plugins.register(logs, "logging-plugin")
    try:
        return (yield)
    finally:
        plugins.unregister(logs)


def _end_at_once():
    """A worker has reported all it had to: taking its millions of objects apart would take as long as many a file."""
    processes.stop_all()
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed and EMULATOR in item.config.stash:
        seed = os.environ.get("EMULATOR_SEED", "1")
        report.sections.append(("Emulator", f"EMULATOR_SEED={seed} gives this test the same schedules again."))
    return report


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config, items):
    if config.getoption("--device") == "cpu" and EMULATOR not in config.stash:
        for item in cases.repeated(items):
            item.add_marker("slow")
    if not asks_for_slow(config.option.markexpr):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    reasons = dict(line.split(": ", 1) for line in config.getini("markers"))
    missing = [name for name, available in _available(config).items() if not available]
    for item in items:
        for name in missing:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reasons[name]))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests, millions of objects, are no garbage: nothing looks for it among them, now or later.

    Then compilers and configurations make millions more, few of them garbage: looking seldom takes half of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 20)
        gc.enable()
        atexit.register(gc.unfreeze)  # some extensions call it a leak if their objects outlive the interpreter


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """Before a process ends, pytest looks for garbage five times: among all objects once is enough."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """How many tests were skipped for each reason, in a line each; and that some were left out."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
    if not asks_for_slow(terminalreporter.config.option.markexpr):
        terminalreporter.write_line("left out: tests marked slow, which -m slow runs")


def _available(config):
    on_cuda = torch.device(config.getoption("--device")).type == "cuda" and _library.load_error() is None
    return {
        "cuda": on_cuda,
        "sm90": on_cuda and torch.cuda.get_device_capability() == (9, 0),
        "multi_gpu": on_cuda and torch.cuda.device_count() >= 2,
        "four_gpus": on_cuda and torch.cuda.device_count() >= 4,
    }


def asks_for_slow(markexpr):
    """Whether `-m` names the marker: "slow", "slow and not cuda", but not "not slow or cuda"."""
    return re.search(r"(?<!\bnot )\bslow\b", markexpr) is not None


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def seeded(request, monkeypatch):
    """Give each test random numbers and emulated schedules of its own, the same in every run and in any order."""
    seed = zlib.crc32(request.node.nodeid.encode())
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # that would prepare the seeds of GPUs of three makers, for as long as many a test takes
        torch.default_generator.manual_seed(seed)
    if EMULATOR in request.config.stash:
        request.config.stash[EMULATOR].begin_schedules(ctypes.c_uint64(seed))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # that of the test before, if it trained
    if "torch._dynamo" in sys.modules:  # the limit of recompilations counts those of other tests
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def poisoned():
    """Let uninitialised memory read as NaN, so that a missing write cannot pass by luck."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():  # or it is on, from the test before
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(scope="session", autouse=True)
def language_of_kernels():
    """Triton's interpreter puts functions of its own into Triton's language: here once for each kernel that it runs.

    It does so again for each call of a function in a kernel, which finds nothing to do, and takes half of its time.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    patch_language, run, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, []

    def patch_once(function):
        modules = [value for value in function.__globals__.values() if isinstance(value, types.ModuleType)]
        if modules not in done:
            done.append(modules)
            return patch_language(function)

    def run_anew(*args, **kwargs):
        done.clear()
        return run(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_anew)
        yield


@pytest.fixture
def memory_guard(device):
    """`memory_guard(nbytes)` skips the test unless that many bytes are free on its device, with a tenth to spare."""

    def guard(nbytes):
        free = _free_bytes(device)
        if nbytes * 1.1 > free:
            pytest.skip(f"needs {nbytes / 2**30:.1f} GiB on {device}, {free / 2**30:.1f} GiB are free")

    yield guard
    if device.type == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture
def little_shared_memory(device, monkeypatch):
    """Kernels as GPUs of compute capability 8.6, 8.9 and 12.x run them, which have 99 KB of it for a block."""
    if not _library.runs_in_kernel("fwd", torch.empty(0, device=device)):
        pytest.skip("needs kernels, of a GPU or emulated")
    monkeypatch.setenv("FLASH_ATTN_PORTABLE", "1")
    monkeypatch.setenv("FLASH_ATTN_SHARED_BYTES", str(99 * 1024))


def _free_bytes(device):
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as meminfo:
        available = next(line for line in meminfo if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024
