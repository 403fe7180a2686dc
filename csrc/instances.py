"""The table of compiled instances, and the writer of their sources.

A family whose kernels all fit in one translation unit (rotary) has its `.cu` under csrc/ and no row here. A family
with more instances than one compiler call should take has a row per instance: setup.py calls `generate`, which writes
one small `.cu` file for each under the build folder.

FLASH_ATTN_INSTANCES, a glob over instance names such as "flash_attn_fwd_sm90_*128*", narrows a development build; what
needs another instance then raises.
"""

import fnmatch
import itertools
import os
import pathlib

TYPES = {"fp16": "__half", "bf16": "__nv_bfloat16"}
HEAD_DIMS = (64, 96, 128, 192, 256)
ALL_HEAD_DIMS = (*HEAD_DIMS, 512)  # S_dmask has no instance of 512
FEATURES = {"plain": "Features::kPlain", "ranged": "Features::kRanged", "all": "Features::kAll"}
HOPPER_FEATURES = FEATURES | {"biased": "Features::kBiased", "dropped": "Features::kDropped"}
PORTABLE_FEATURES = {name: FEATURES[name] for name in ("plain", "all")}
PARAMS = {"fwd": "FwdSm80Params", "decode": "DecodeParams", "bwd": "BwdSm80Params"}
# The head dims of the kernels for sm_90, by features. WIDE: those of the forward that have a second tile for long
# sequences (has_wide_tile in fwd/tiles.h).
BWD_HEAD_DIMS = {
    "plain": HEAD_DIMS,
    "ranged": HEAD_DIMS,
    "biased": (64, 96, 128),
    "dropped": (64, 96, 128),
    "all": ALL_HEAD_DIMS,
}
FWD_HEAD_DIMS = {
    "plain": ALL_HEAD_DIMS,
    "ranged": ALL_HEAD_DIMS,
    "biased": HEAD_DIMS,
    "dropped": (64, 96, 128),
    "all": ALL_HEAD_DIMS,
}
WIDE_HEAD_DIMS = {"plain": (64, 96, 128, 256), "ranged": (64,), "biased": (), "dropped": (), "all": ()}
DMASK_WIDTHS = ((64, 128), (64, 64), (96, 64), (128, 32), (192, 64), (256, 64))  # (head dim, dmask_width): fwd/tiles.h


def _flash_attn(kernel, call, params):
    """Source of one explicit instantiation of a kernel's launch."""
    return (
        f'#include "flash_attn/{kernel}/kernel.cuh"\n\n'
        f"namespace flash::flash_attn {{\n"
        f"template void {call}(const {params}&, cudaStream_t);\n"
        f"}}  // namespace flash::flash_attn\n"
    )


PORTABLE = {
    f"flash_attn_{kind}_sm80_{dtype}_{head_dim}_{name}": _flash_attn(
        f"{kind}_sm80", f"run_{kind}<{TYPES[dtype]}, {head_dim}, {features}>", params
    )
    for (kind, params), dtype, head_dim, (name, features) in itertools.product(
        PARAMS.items(), TYPES, ALL_HEAD_DIMS, PORTABLE_FEATURES.items()
    )
    if kind != "bwd" or head_dim <= 256 or name == "all"
}
CODED_HEAD_DIMS = (64, 128, 192, 256, 512)  # 96 takes that of 128: CodedDecodeKernel
CODED = {  # decoding and serving over codes in 8 bits, computed in fp16
    f"flash_attn_decode_coded_sm80_fp16_{head_dim}_{name}": _flash_attn(
        "decode_sm80", f"run_decode_coded<__half, {head_dim}, {features}>", "DecodeParams"
    )
    for head_dim, (name, features) in itertools.product(CODED_HEAD_DIMS, PORTABLE_FEATURES.items())
} | {
    f"flash_attn_serving_coded_sm90_fp16_{head_dim}_{name}{'_few' * few}": _flash_attn(
        "fwd_sm90", f"run_fwd_serving_coded<__half, {head_dim}, {features}, {str(few).lower()}>", "ServingParams"
    )
    for head_dim, (name, features), few in itertools.product((64, 128), PORTABLE_FEATURES.items(), (False, True))
}
HOPPER = {
    f"flash_attn_fwd_sm90_{dtype}_{head_dim}_{name}{'_wide' * wide}": _flash_attn(
        "fwd_sm90", f"run_fwd_sm90<{TYPES[dtype]}, {head_dim}, {features}, {str(wide).lower()}>", "FwdSm90Params"
    )
    for dtype, (name, features), wide in itertools.product(TYPES, HOPPER_FEATURES.items(), (False, True))
    for head_dim in (WIDE_HEAD_DIMS if wide else FWD_HEAD_DIMS)[name]
} | {
    f"flash_attn_bwd_sm90_{dtype}_{head_dim}_{name}": _flash_attn(
        "bwd_sm90" if head_dim <= 128 else "bwd_sm90_wide",
        f"run_bwd_sm90<{TYPES[dtype]}, {head_dim}, {features}>",
        "BwdSm90Params",
    )
    for dtype, (name, features) in itertools.product(TYPES, HOPPER_FEATURES.items())
    for head_dim in BWD_HEAD_DIMS[name]
}
PAIRED = {  # pairs of thread blocks that share keys (has_paired_tile in fwd/tiles.h)
    f"flash_attn_fwd_sm90_{dtype}_{head_dim}_plain_paired": _flash_attn(
        "fwd_sm90", f"run_fwd_paired<{TYPES[dtype]}, {head_dim}, Features::kPlain, {head_dim}>", "FwdSm90Params"
    )
    for dtype, head_dim in itertools.product(TYPES, (128, 256))
}
UNEQUAL_HEAD_DIMS = {  # of keys and of values: see head_dims.h
    f"flash_attn_{kind}_sm90_{dtype}_192_128_{name}": _flash_attn(
        kernel, f"run_{kind}_sm90<{TYPES[dtype]}, 192, {features}, {rest}>", params
    )
    for (kind, kernel, rest, params), dtype, (name, features) in itertools.product(
        (("fwd", "fwd_sm90", "false, 128", "FwdSm90Params"), ("bwd", "bwd_sm90_wide", "128", "BwdSm90Params")),
        TYPES,
        FEATURES.items(),
    )
}
SERVING_HEAD_DIMS = (*((d, d) for d in HEAD_DIMS), (192, 128))  # of keys and of values
SERVING = {  # in tiles of 128 rows, and of 64 where there are few
    f"flash_attn_serving_sm90_{dtype}_{head_dim}{'_128' * (head_dim_v != head_dim)}_{name}{'_few' * few}": _flash_attn(
        "fwd_sm90",
        f"run_fwd_serving<{TYPES[dtype]}, {head_dim}, {features}, {str(few).lower()}, {head_dim_v}>",
        "ServingParams",
    )
    for dtype, (head_dim, head_dim_v), (name, features), few in itertools.product(
        TYPES, SERVING_HEAD_DIMS, PORTABLE_FEATURES.items(), (False, True)
    )
}
INVARIANT = {
    f"flash_attn_invariant_sm90_{dtype}_{head_dim}{'_128' * (head_dim_v != head_dim)}_{name}": _flash_attn(
        "fwd_sm90", f"run_fwd_invariant<{TYPES[dtype]}, {head_dim}, {features}, {head_dim_v}>", "FwdSm90Params"
    )
    for dtype, (head_dim, head_dim_v), (name, features) in itertools.product(
        TYPES, SERVING_HEAD_DIMS, PORTABLE_FEATURES.items()
    )
}
DMASK = {
    f"flash_attn_dmask_sm80_{dtype}_{head_dim}_{width}": _flash_attn(
        "dmask_sm80", f"run_dmask<{TYPES[dtype]}, {head_dim}, {width}>", "DmaskParams"
    )
    for dtype, (head_dim, width) in itertools.product(TYPES, DMASK_WIDTHS)
}
DBIAS = {
    f"flash_attn_dbias_sm80_{dtype}": _flash_attn("dbias_sm80", f"run_dbias<{element}>", "PlannedDbias")
    for dtype, element in TYPES.items()
}

# Name of the instance -> text of its source file.
INSTANCES: dict[str, str] = PORTABLE | CODED | HOPPER | PAIRED | UNEQUAL_HEAD_DIMS | SERVING | INVARIANT | DMASK | DBIAS


def generate(build_dir: pathlib.Path) -> list[pathlib.Path]:
    """Write the sources of the wanted instances into `build_dir` and return their paths."""
    pattern = os.environ.get("FLASH_ATTN_INSTANCES", "*")
    wanted = fnmatch.filter(INSTANCES, pattern)
    if INSTANCES and not wanted:
        raise SystemExit(
            f"flash-attn: FLASH_ATTN_INSTANCES must match names of instances like {next(iter(INSTANCES))!r}, "
            f"found {pattern!r}."
        )
    return [_write(build_dir / f"{name}.cu", INSTANCES[name]) for name in wanted]


def _write(path, text):
    """Leave an unchanged file alone, so that it is not compiled again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path
