"""The build backend (PEP 517, 660) that pip, uv and build call: setuptools' own, with two additions.

An isolated build does not see the environment that it installs into, unless pip made it. Where kernels can be built,
because there is an nvcc, such a build gets a torch of its own: the library needs its headers, and then works with every
torch from 2.10. Where there is no nvcc, nobody has to wait for a download of gigabytes.

An editable installation has a finder of its own, below. That of setuptools is asked after Python has looked along
sys.path, where a bare folder flash_attn/ counts as a package: with one in site-packages, in which flash-attn-4 puts
flash_attn/cute/, `import flash_attn` would give an empty package.
"""

import base64
import hashlib
import os
import runpy
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that are not here)

ROOT = Path(__file__).resolve().parent
FINDER = '''\
"""Finds the modules of an editable installation of flash-attn, after packages and modules that sys.path has, but before
folders without an __init__.py.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

FILES = {files}


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in FILES:
            return None
        found = PathFinder.find_spec(name)
        is_file = found is not None and found.origin is not None
        return found if is_file else spec_from_file_location(name, FILES[name])


sys.meta_path.insert(0, Finder)
'''


def get_requires_for_build_wheel(config_settings=None):
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch()]


def get_requires_for_build_editable(config_settings=None):
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch()]


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    if (config_settings or {}).get("editable_mode") != "strict":  # which puts a folder of links on sys.path
        _replace_finder(Path(wheel_directory, name))
    return name


def _torch():
    return runpy.run_path("setup.py")["build_requirements"](os.environ)


def _replace_finder(wheel):
    """Put FINDER into an editable wheel, in place of what setuptools has put there."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.startswith("__editable__")}
    modules = {"flash_attn": ROOT / "flash_attn/__init__.py"}
    modules |= {path.stem: path for path in sorted((ROOT / "compat").glob("*.py"))}
    text = FINDER.format(files={name: str(path) for name, path in modules.items()})
    files["__editable__flash_attn.py"] = text.encode()
    files["__editable__.flash_attn.pth"] = b"import __editable__flash_attn\n"
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    del files[record]
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def _digest(content):
    """The SHA-256 of a file as the RECORD of a wheel has it (PEP 427)."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
