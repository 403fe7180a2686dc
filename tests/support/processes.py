"""Processes that form a group of torch.distributed, for tests of what runs in parallel.

The processes of a group stay for the next test, because starting them takes longer than most tests. Between two calls
those of gloo are stopped: each group of theirs has threads that wake a hundred times in a second.
"""

import atexit
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import sys
import tempfile
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist

# Numbers of processes for tests with NCCL
ON_GPUS = [
    pytest.param(2, marks=pytest.mark.multi_gpu),
    pytest.param(4, marks=[pytest.mark.multi_gpu, pytest.mark.four_gpus]),  # so that -m multi_gpu selects both
]
_TIMEOUT = 900  # seconds; more than the longest test takes on a busy machine
_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "lightning",
    "families",
    "src.engines",
    "src.tasks.seq",
]
_GROUPS = {}  # (world, backend): the group in use


def over_processes(world, target, *args, backend="gloo"):
    """Call target(group, *args) in each of `world` processes, and raise here what one of them raises.

    target is a function at the top level of its module. With backend "nccl", process i has GPU i.
    """
    if (world, backend) not in _GROUPS:
        _GROUPS[world, backend] = _Group(world, backend)
    try:
        _GROUPS[world, backend].call(target, args)
    except BaseException:  # the other processes may wait for the one that failed: the next test gets new ones
        _GROUPS.pop((world, backend)).stop()
        raise


def stop_all():
    """The next test gets new processes. Each group that a test makes in them has threads, which never rest."""
    while _GROUPS:
        _GROUPS.popitem()[1].stop()


atexit.register(stop_all)  # before multiprocessing asks them to end, which those that are stopped do not hear


def new_process(target, *args):
    """A process that calls target(*args) once it is started, and has torch from its start, as those of a group.

    Where there is a GPU it is not forked: a module that is loaded beforehand may have initialized CUDA.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in _PRELOADED if name in sys.modules])
    return context.Process(target=target, args=args, daemon=True)


def compiled_on_last(group, function, **options):
    """The function compiled on the last rank, whose peers call it as it is: what is sent must be the same."""
    return torch.compile(function, **options) if dist.get_rank(group) == dist.get_world_size(group) - 1 else function


def half_of(group):
    """The group of the first half of the processes, or of the second, whichever has this one."""
    ranks = torch.arange(dist.get_world_size(group)).chunk(2)
    halves = [dist.new_group(half.tolist()) for half in ranks]
    return halves[dist.get_rank(group) // len(ranks[0])]


class _Group:
    def __init__(self, world, backend):
        self.backend, self.folder = backend, tempfile.TemporaryDirectory()
        file = pathlib.Path(self.folder.name, "group")
        self.connections, self.processes = [], []
        for rank in range(world):
            ours, theirs = multiprocessing.Pipe()
            process = new_process(_serve, theirs, rank, file, world, backend)
            process.start()
            theirs.close()  # so that reading from ours ends when the process does
            self.connections.append(ours)
            self.processes.append(process)

    def call(self, target, args):
        self._signal("SIGCONT")
        for connection in self.connections:
            connection.send((target, args))
        waiting = list(self.connections)
        while waiting:
            ready = multiprocessing.connection.wait(waiting, _TIMEOUT)
            if not ready:
                ranks = [self.connections.index(connection) for connection in waiting]
                raise TimeoutError(f"processes {ranks} have not finished {target.__name__} in {_TIMEOUT} s")
            for connection in ready:
                self._check(self.connections.index(connection))
                waiting.remove(connection)
        self._signal("SIGSTOP")

    def _signal(self, name):
        if self.backend == "gloo" and hasattr(signal, name):
            for rank, process in enumerate(self.processes):
                try:
                    os.kill(process.pid, getattr(signal, name))
                except ProcessLookupError:
                    process.join(timeout=1)
                    error = f"process {rank} of {len(self.processes)}: it ended with exit code {process.exitcode}"
                    raise RuntimeError(error) from None

    def _check(self, rank):
        """Raise the error that a process reports; or, if another one has ended, say that: its peers notice it first."""
        try:
            error = self.connections[rank].recv()
        except EOFError:
            error = "it ended"
        if not error:
            return
        if multiprocessing.connection.wait([process.sentinel for process in self.processes], timeout=1):
            rank = next(i for i, process in enumerate(self.processes) if process.exitcode is not None)
            error = f"it ended with exit code {self.processes[rank].exitcode}"
        raise RuntimeError(f"process {rank} of {len(self.processes)}: {error}")

    def stop(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _serve(connection, rank, file, world, backend):
    """Run what the test sends, until it closes the connection."""
    if sys.platform == "linux":  # a stopped process does not notice that its parent has ended; the kernel does
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    torch.set_num_threads(1)
    warnings.filterwarnings("error", "`torch.distributed", FutureWarning)  # old names of collectives
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    while True:
        try:
            target, args = connection.recv()
            _as_if_new()
            target(dist.group.WORLD, *args)
            dist.barrier()
        except EOFError:
            return
        except BaseException:
            connection.send(traceback.format_exc())
        else:
            connection.send(None)


def _as_if_new():
    """Forget what earlier tests have left: random state and compiled graphs."""
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
