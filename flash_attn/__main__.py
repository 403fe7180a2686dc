"""Report on this installation: versions, kernels, devices, the backend of each op and its reason, and a self-check.

`python -m flash_attn` prints the report for a bug report; the exit status is 0 if the self-check passes, else 1. The
self-check compares results with the textbook formula in float64. It allows twice the error that this formula has in
plain torch at the precision of the inputs. Errors are relative: the largest of a tensor over its largest value.
"""

import argparse
import importlib
import pathlib
import pkgutil
import platform
import re
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import flash_attn
from flash_attn import _library, _ops
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.ops.fused_dense import fused_mlp_func
from flash_attn.ops.rms_norm import dropout_add_rms_norm


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device_help = "where the self-check runs (here: %(default)s)"
    parser.add_argument("--device", type=usable_device, default=default_device(), help=device_help)
    device = parser.parse_args(argv).device
    for title, lines in (("Installation", installation()), ("Devices", devices()), ("Ops", backends())):
        print(title, *lines, sep="\n  ", end="\n\n")
    return self_check(device)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(name: str) -> str:
    """Returns `name` if torch can compute on this device; else raises argparse's error with the reason."""
    try:
        torch.zeros(1, device=name).item()
    except Exception as failure:  # each backend raises its own type
        why = re.split(r"\.\s|\n", str(failure))[0]
        raise argparse.ArgumentTypeError(f"must be a device that torch can compute on, found {name!r}: {why}") from None
    return name


def installation() -> list[str]:
    """Returns lines with the versions and the kernel library."""
    error, path, built = _library.load_error(), _library.library_path(), _library.how_built()
    return [
        f"flash_attn {flash_attn.__version__} in {pathlib.Path(flash_attn.__file__).parent}",
        f"torch {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"),
        f"python {platform.python_version()} on {platform.platform()}",
        f"driver {_driver()}",
        f"kernels: {_describe_library(path)}" if path else f"kernels: none, {error}",
        *([f"kernels: {built}"] if built else []),
        f"batch invariance: level {flash_attn.get_batch_invariant()}",
    ]


def devices() -> list[str]:
    """Returns a line for each CUDA device, and one for each compute capability with what serves it."""
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    lines = [
        f"cuda:{i} {gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        for i, gpu in enumerate(found)
    ]
    path = _library.library_path()
    served = [serving((gpu.major, gpu.minor), architectures(path)) for gpu in found] if path else []
    return [*lines, *dict.fromkeys(served)] or ["no CUDA device that torch can use"]


def serving(capability: tuple[int, int], built: Sequence[str]) -> str:
    """Returns a line: which code of a library, as `architectures` lists it, a GPU of this compute capability runs."""
    gpu = f"compute capability {capability[0]}.{capability[1]}"
    code = max((each for each in map(_Code.of, built) if each.runs_on(capability)), default=None)
    if code is None:
        oldest = "kernels need 8.0 or newer"
        advice = (
            f"build it with FLASH_ATTN_CUDA_ARCHS={capability[0]}{capability[1]}" if capability >= (8, 0) else oldest
        )
        return f"{gpu}: the library has no code for it, and kernels raise an error; {advice}"
    how = "" if code.is_machine_code else ", PTX that the driver compiles at the first use and keeps"
    return f"{gpu}: {code.name}{how}{'' if capability in TRIED else '; compiled and emulated, not run on such a GPU'}"


TRIED = {(9, 0)}  # the compute capabilities of the GPUs on which the tests of a release have run


class _Code(NamedTuple):
    """Code in a library. What is better for a GPU that runs both is larger."""

    is_machine_code: bool
    capability: tuple[int, int]
    suffix: str
    name: str

    @classmethod
    def of(cls, name: str) -> "_Code":
        kind, number = name.split("_")
        major, minor = divmod(int(number.rstrip("af")), 10)
        return cls(kind == "sm", (major, minor), number.lstrip("0123456789"), name)

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Code with the suffix `a` is for one compute capability, machine code and `f` for a major one, PTX for all."""
        if self.suffix == "a":
            return self.capability == capability
        one_major = self.is_machine_code or self.suffix == "f"
        return self.capability <= capability and not (one_major and self.capability[0] != capability[0])


def backends() -> list[str]:
    """Returns a line for each op: whether a kernel or the reference computes it here, and why. One if all are alike."""
    found = {name: backend(name) for name in op_names()}
    if len(set(found.values())) == 1:
        return [f"all {len(found)}: {backend(next(iter(found)))}"]
    width = max(map(len, found))
    return [f"{name:<{width}} {line}" for name, line in found.items()]


def backend(name: str) -> str:
    """Returns the backend of the op `name` on this machine, and the reason."""
    if not _library.has_kernel(name):
        no_kernels = _library.load_error() and not _library.is_switched_off(name)
        return f"reference in plain torch: {'there are no kernels' if no_kernels else _library.why_no_kernel(name)}"
    kernel = "Triton kernel" if _library.is_in_triton(name) else "kernel"
    if not torch.cuda.is_available():
        return f"reference in plain torch: there is a {kernel}, but no CUDA device"
    return f"{kernel} for CUDA tensors, reference in plain torch for others"


def op_names() -> list[str]:
    """The ops that the package defines."""
    modules = [importlib.import_module(f"{_ops.__name__}.{info.name}") for info in pkgutil.iter_modules(_ops.__path__)]
    return sorted({op.name for module in modules for op in vars(module).values() if isinstance(op, _library.Op)})


def architectures(library: pathlib.Path) -> list[str]:
    """The GPU architectures in a compiled library: sm_XX for machine code, compute_XX for PTX.

    Read from the fat binaries that nvcc embeds. Their layout is not documented; this is how nvcc 11 to 13 write it.
    After a header of 16 bytes (magic, version 1, header size 16, size of what follows) come entries. The header of an
    entry holds the kind (1 PTX, 2 machine code) at byte 0, its own size at 4, the size of the code at 8, the
    architecture at 28 and flags at 40.
    """
    image, found = library.read_bytes(), set()
    magic = struct.pack("<IHH", 0xBA55ED50, 1, 16)
    start = image.find(magic)
    while start >= 0:
        entry = start + 16
        end = entry + struct.unpack_from("<Q", image, start + 8)[0]
        while entry < end:
            kind, header, size = struct.unpack_from("<HxxIQ", image, entry)
            if kind not in (1, 2):
                break  # not the layout described above
            architecture, flags = struct.unpack_from("<I8xQ", image, entry + 28)
            suffix = {0x100000: "a", 0x200000: "f"}.get(flags & 0x300000, "")
            found.add(f"{'compute' if kind == 1 else 'sm'}_{architecture}{suffix}")
            entry += header + size
        start = image.find(magic, end)
    return sorted(found)


def self_check(device: str) -> int:
    """Run the checks on `device` and print their errors. Returns 0 if all pass, else 1."""
    print(f"Self-check on {device}, bfloat16: largest error against the formula in float64, over the largest value")
    torch.manual_seed(0)
    results = [_check(name, *check(device)) for name, check in CHECKS.items()]
    print("All passed." if all(results) else "FAILED: please report this, with all of the above.")
    return 0 if all(results) else 1


def _check(name: str, ours: Callable, formula: Callable, inputs: list[Tensor]) -> bool:
    """Compare the tensors that two functions of the same inputs return."""
    try:
        exact = formula(*(x.double() for x in inputs))
        allowed = 2 * _error(formula(*inputs), exact) + 1e-3
        error = _error(ours(*inputs), exact)
    except Exception as failure:  # reported, as all failures are, and the other checks still run
        print(f"  {name:<18}fail: {type(failure).__name__}: {failure}")
        return False
    passed = error <= allowed  # false for nan
    print(f"  {name:<18}{'pass' if passed else 'FAIL'}  {error:.1e}, allowed {allowed:.1e}")
    return passed


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = zip(found, exact, strict=True)
    return torch.stack([(a.double() - b).abs().max() / b.abs().max() for a, b in pairs]).max().item()


def _check_forward(device):
    def ours(q, k, v):
        return [flash_attn.flash_attn_func(q, k, v, causal=True)]

    def formula(q, k, v):
        return [_attention(q, k, v)]

    return ours, formula, _qkv(device)


def _with_gradients(attention):
    """The function of dout and the inputs of `attention` that returns its output and their gradients."""

    def function(dout, *inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = attention(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, dout)

    return function


def _check_backward(device):
    def ours(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, causal=True)

    q, k, v = _qkv(device)
    return _with_gradients(ours), _with_gradients(_attention), [torch.randn_like(q), q, k, v]


def _check_sink(device):
    """Output and gradients with a sink for each head."""

    def ours(q, k, v, sink):
        return flash_attn.flash_attn_func(q, k, v, causal=True, learnable_sink=sink)

    q, k, v = _qkv(device)
    (sink,) = _random(1, q.shape[2], device=device)
    return _with_gradients(ours), _with_gradients(_attention), [torch.randn_like(q), q, k, v, sink]


def _check_ranges(device):
    """Output and gradients of rows that hold three documents."""
    lengths = torch.tensor([90, 17, 93])
    document = torch.arange(3).repeat_interleave(lengths).to(device)
    end = lengths.cumsum(0).to(device)[document]
    ranges = torch.stack([end - lengths.to(device)[document], end], dim=-1).int()

    def ours(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, causal=True, key_ranges=ranges[None, None])

    def formula(q, k, v):
        return _attention(q, k, v, hidden=document[:, None] != document)

    q, k, v = _qkv(device)
    return _with_gradients(ours), _with_gradients(formula), [torch.randn_like(q), q, k, v]


def _check_head_dims(device):
    """Output and gradients of keys of 192 and values of 128 channels."""

    def ours(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, causal=True)

    q, k = _random(2, 2, 200, 4, 192, device=device)
    v, dout = _random(2, 2, 200, 4, 128, device=device)
    return _with_gradients(ours), _with_gradients(_attention), [dout, q, k, v]


def _check_wide(device):
    def ours(q, k, v):
        return [flash_attn.flash_attn_func(q, k, v, causal=True)]

    def formula(q, k, v):
        return [_attention(q, k, v)]

    return ours, formula, _random(3, 2, 200, 2, 512, device=device)


def _check_kvcache(device):
    """Three new tokens after 61 cached ones: the output, and the appended keys and values."""
    filled, (k, v) = 61, _random(2, 2, 64, 2, 64, device=device)
    (q,), (cos, sin) = _random(1, 2, 3, 8, 64, device=device), _rotary_tables(64, device)

    def ours(q, k, v, cos, sin):
        k_cache, v_cache = k.clone(), v.clone()
        k_cache[:, filled:], v_cache[:, filled:] = 0, 0
        out = flash_attn.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k[:, filled:],
            v[:, filled:],
            cos,
            sin,
            cache_seqlens=filled,
            causal=True,
            rotary_interleaved=False,
        )
        return out, k_cache, v_cache

    def formula(q, k, v, cos, sin):
        q = _rotate(q, cos[filled:], sin[filled:])
        k = torch.cat([k[:, :filled], _rotate(k[:, filled:], cos[filled:], sin[filled:])], dim=1)
        return _attention(q, k, v), k, v

    return ours, formula, [q, k, v, cos, sin]


def _check_rotary(device):
    def ours(x, cos, sin):
        return [apply_rotary_emb(x, cos, sin)]

    def formula(x, cos, sin):
        return [_rotate(x, cos, sin)]

    return ours, formula, [*_random(1, 2, 200, 8, 64, device=device), *_rotary_tables(200, device)]


def _check_norm(device):
    """RMSNorm of a residual stream, and its gradients."""

    def gradients_of(norm):
        def gradients(dout, dh, *inputs):
            inputs = [x.detach().requires_grad_() for x in inputs]
            out, h = norm(*inputs)
            return out.detach(), h.detach(), *torch.autograd.grad((out, h), inputs, (dout, dh))

        return gradients

    def ours(x, residual, weight):
        return dropout_add_rms_norm(x, residual, weight, None, 0.0, 1e-5, prenorm=True)

    def formula(x, residual, weight):
        h = x + residual
        return h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight, h

    inputs = [*_random(4, 200, 512, device=device), *_random(1, 512, device=device)]
    return gradients_of(ours), gradients_of(formula), inputs


def _check_mlp(device):
    """An MLP with GELU, and its gradients."""

    def ours(x, weight1, bias1, weight2):
        return fused_mlp_func(x, weight1, weight2, bias1)

    def formula(x, weight1, bias1, weight2):
        hidden = x @ weight1.T + bias1
        return hidden * torch.sigmoid(1.5957691216057308 * (hidden + 0.044715 * hidden**3)) @ weight2.T

    x, dout = _random(2, 200, 64, device=device)
    (weight1,), (bias1,), (weight2,) = (_random(1, *shape, device=device) for shape in ((256, 64), (256,), (64, 256)))
    return _with_gradients(ours), _with_gradients(formula), [dout, x, weight1 / 8, bias1, weight2 / 16]


CHECKS = {
    "forward": _check_forward,
    "backward": _check_backward,
    "sink": _check_sink,
    "key ranges": _check_ranges,
    "head dims 192/128": _check_head_dims,
    "head dim 512": _check_wide,
    "key-value cache": _check_kvcache,
    "rotary": _check_rotary,
    "norm": _check_norm,
    "MLP": _check_mlp,
}


def _attention(q, k, v, sink=None, hidden=None):
    """softmax(q k^T / sqrt(head_dim)) v with a causal mask, the last query aligned with the last key.

    sink: (heads), the score of one more key, whose value is 0. hidden: (rows, keys), pairs that the mask hides, too.
    """
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    above = torch.ones_like(scores, dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
    scores = scores.masked_fill(above if hidden is None else above | hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., : k.shape[1]], v)


def _rotate(x, cos, sin):
    """Pairs (i, i + head_dim / 2) of channels turned by the angles of their positions."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = (table[: x.shape[1], None] for table in (cos, sin))
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def _qkv(device):
    return _random(1, 2, 200, 8, 64, device=device) + _random(2, 2, 200, 2, 64, device=device)


def _random(count, *shape, device):
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(count)]


def _rotary_tables(positions, device):
    angles = torch.outer(torch.arange(positions), 10000.0 ** -torch.arange(0, 1, 2 / 64))
    return [table.to(device, torch.bfloat16) for table in (angles.cos(), angles.sin())]


def _describe_library(library: pathlib.Path) -> str:
    found = " ".join(architectures(library)) or "unknown, no fat binary was recognised"
    return f"{library}, {library.stat().st_size / 2**20:.1f} MiB, architectures: {found}"


def _driver() -> str:
    version = pathlib.Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0] if version.exists() else "unknown: no NVIDIA driver under /proc"


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end in silence when what reads the report ends, as `head` does
    sys.exit(main())
