"""The table of compiled instances, and the writer of their sources.

A family whose kernels all fit in one translation unit (rotary) has its `.cu` under csrc/ and no row here. A family
with more instances than one compiler call should take has a row per instance: setup.py calls `generate`, which writes
one small `.cu` file for each under the build folder.

FLASH_ATTN_INSTANCES, a glob over instance names such as "flash_attn_fwd_sm90_*128*", narrows a development build.
"""

import fnmatch
import os
import pathlib

# Name of the instance -> text of its source file.
INSTANCES: dict[str, str] = {}


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
