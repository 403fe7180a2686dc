"""Binds a process to the CPU cores next to its GPU, so that its memory is near both.

    set_affinity(local_rank, gpus_per_node, "socket_unique_continuous")

Which cores are near a GPU is asked of NVML, for which nvidia-ml-py must be installed (`pip install nvidia-ml-py`). Only
cores that this process may use at present are considered.
"""

import os
import pathlib
from collections import defaultdict
from types import ModuleType

_TOPOLOGY = pathlib.Path("/sys/devices/system/cpu")
MODES = ("socket", "single", "single_unique", "socket_unique_interleaved", "socket_unique_continuous")


def set_affinity(gpu_id: int, nproc_per_node: int, mode: str = "socket") -> set[int]:
    """Bind this process to cores near a GPU. Returns the cores.

    Modes of which no two processes of a node get the same core give each GPU its share of the cores of a socket: they
    divide one hardware thread of each core, and add the core's other threads afterwards.

    Arguments:
        gpu_id: the number of the GPU among the visible ones.
        nproc_per_node: how many processes, with one GPU each, there are on this node.
        mode: one of
            socket: all cores of the GPU's socket.
            single: the first of them.
            single_unique: one core, another one for each GPU.
            socket_unique_interleaved: a share of the socket, every n-th core.
            socket_unique_continuous: a share of the socket, neighbouring cores.

    Raises ValueError for another mode, ImportError without nvidia-ml-py, RuntimeError if there are no cores to use.
    """
    if mode == "socket":
        set_socket_affinity(gpu_id)
    elif mode == "single":
        set_single_affinity(gpu_id)
    elif mode == "single_unique":
        set_single_unique_affinity(gpu_id, nproc_per_node)
    elif mode in MODES:
        set_socket_unique_affinity(gpu_id, nproc_per_node, mode.removeprefix("socket_unique_"))
    else:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, found {mode!r}")
    return os.sched_getaffinity(0)


def set_socket_affinity(gpu_id: int) -> None:
    """Bind this process to all cores of a GPU's socket."""
    _bind(device(gpu_id).getCpuAffinity(), gpu_id)


def set_single_affinity(gpu_id: int) -> None:
    """Bind this process to the first core of a GPU's socket."""
    _bind(device(gpu_id).getCpuAffinity()[:1], gpu_id)


def set_single_unique_affinity(gpu_id: int, nproc_per_node: int) -> None:
    """Bind this process to a core of the GPU's socket that no process of another GPU gets."""
    taken: list[int] = []
    for affinity in _affinities(nproc_per_node):
        free = [core for core in affinity if core not in taken]
        if not free:
            raise RuntimeError(f"there are fewer cores near the GPUs than processes, {nproc_per_node}")
        taken.append(free[0])
    _bind(taken[gpu_id : gpu_id + 1], gpu_id)


def set_socket_unique_affinity(gpu_id: int, nproc_per_node: int, mode: str) -> None:
    """Bind this process to its share of a socket's cores. mode: interleaved or continuous; otherwise ValueError."""
    if mode not in ("interleaved", "continuous"):
        raise ValueError(f"mode must be interleaved or continuous, found {mode!r}")
    gpus_of = defaultdict(list)
    for gpu, affinity in enumerate(_affinities(nproc_per_node)):
        gpus_of[tuple(affinity)].append(gpu)
    cores, gpus = next((cores, gpus) for cores, gpus in gpus_of.items() if gpu_id in gpus)
    place, shares = gpus.index(gpu_id), len(gpus)
    if mode == "interleaved":
        share = cores[place::shares]
    else:
        share = cores[place * len(cores) // shares : (place + 1) * len(cores) // shares]
    siblings = {first: others for first, *others in _usable_siblings()}
    _bind([*share, *(other for core in share for other in siblings.get(core, []))], gpu_id)


def get_thread_siblings_list() -> list[tuple[int, ...]]:
    """The hardware threads of each core that has several, in rising order."""
    files = _TOPOLOGY.glob("cpu[0-9]*/topology/thread_siblings_list")
    threads = {_numbers(file.read_text().strip()) for file in files}
    return sorted(numbers for numbers in threads if len(numbers) > 1)


class device:
    """A GPU in the eyes of NVML. device_idx: its number among those that CUDA_VISIBLE_DEVICES leaves visible."""

    def __init__(self, device_idx: int) -> None:
        nvml = _nvml()
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        name = visible[device_idx] if visible else str(device_idx)
        self.handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else _by_uuid(nvml, name)

    def getName(self) -> str:
        """Such as "NVIDIA H200"."""
        return _nvml().nvmlDeviceGetName(self.handle)

    def getCpuAffinity(self) -> list[int]:
        """The CPU cores near the GPU that this process may use, in rising order."""
        words = -(-max(os.cpu_count() or 1, max(os.sched_getaffinity(0)) + 1) // 64)
        masks = _nvml().nvmlDeviceGetCpuAffinity(self.handle, words)
        near = {64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}
        return sorted(near & os.sched_getaffinity(0))


def systemGetDriverVersion() -> str:
    """The version of NVIDIA's driver."""
    return _nvml().nvmlSystemGetDriverVersion()


def deviceGetCount() -> int:
    """How many GPUs the machine has."""
    return _nvml().nvmlDeviceGetCount()


def _nvml() -> ModuleType:
    try:
        import pynvml
    except ImportError as error:
        raise ImportError("finding the cores near a GPU needs NVML: `pip install nvidia-ml-py`") from error
    pynvml.nvmlInit()  # counts its calls; any number of them is fine
    return pynvml


def _by_uuid(nvml, name):
    """The handle for a UUID as CUDA_VISIBLE_DEVICES has it, which may be only its beginning."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    matching = [handle for handle in handles if nvml.nvmlDeviceGetUUID(handle).startswith(name)]
    if len(matching) != 1:
        raise RuntimeError(f"CUDA_VISIBLE_DEVICES names {name}, which {len(matching)} GPUs match")
    return matching[0]


def _usable_siblings():
    """The hardware threads of each core that this process may use, where there are any."""
    allowed = os.sched_getaffinity(0)
    threads = ([thread for thread in core if thread in allowed] for core in get_thread_siblings_list())
    return [core for core in threads if core]


def _affinities(count):
    """For each GPU, one hardware thread of each core of its socket."""
    secondary = {thread for _, *others in _usable_siblings() for thread in others}
    return [[core for core in device(gpu).getCpuAffinity() if core not in secondary] for gpu in range(count)]


def _bind(cores, gpu_id):
    if not cores:
        raise RuntimeError(f"there is no CPU core near GPU {gpu_id} that this process may use")
    os.sched_setaffinity(0, cores)


def _numbers(text):
    """(0, 1, 2, 8) of "0-2,8", the format of lists in Linux' sysfs."""
    ranges = (part.partition("-") for part in text.split(","))
    return tuple(number for first, _, last in ranges for number in range(int(first), int(last or first) + 1))
