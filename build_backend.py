"""The build backend (PEP 517, 660) that pip, uv and build call: setuptools' own, which also asks for torch if needed.

An isolated build does not see the environment that it installs into, unless pip made it. Where kernels can be built,
because there is an nvcc, such a build gets a torch of its own: the library needs its headers, and then works with every
torch from 2.10. Where there is no nvcc, nobody has to wait for a download of gigabytes.
"""

import os
import runpy

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that are not here)


def get_requires_for_build_wheel(config_settings=None):
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch()]


def get_requires_for_build_editable(config_settings=None):
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch()]


def _torch():
    return runpy.run_path("setup.py")["build_requirements"](os.environ)
