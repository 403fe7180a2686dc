"""Write this package as the `kernels` library of Hugging Face loads it: build/kernels/build/<variant>/.

    make kernels-package

A variant is a folder with the package flash_attn as it is and a metadata.json. There is one for the CPU; and one for
CUDA if flash_attn/_kernels.so is there, which serves each torch from 2.10, since it needs only the stable ABI. The id
of the kernel is flash_attn, the name of its ops: what is loaded is the package flash_attn of the process.
"""

import argparse
import json
import os
import platform
import re
import runpy
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = {"80": "8.0+PTX", "90": "9.0a"}  # as setup.py builds these, and others as they are
TORCH = "210"  # the oldest whose stable ABI the library needs: 2.10


def write(target: Path, source: Path = ROOT / "flash_attn", cuda: str | None = None, archs: str = "") -> list[str]:
    """Write the variants below target / "build", and return their names. What was there of them is replaced.

    Arguments:
        target: the folder of a repository of type `kernel`.
        source: the package.
        cuda: the version of CUDA with which its library was built, such as "13.0"; needed if there is a library.
        archs: the compute capabilities that it was built for, such as "80;90".

    Raises:
        FileNotFoundError: source is not the package.
        ValueError: cuda is no version, or archs no list of numbers, although there is a library.
    """
    if not (source / "flash_attn_interface.py").is_file():
        raise FileNotFoundError(f"source must be the folder flash_attn of this project, found {source}")
    library = source / "_kernels.so"
    variants = {"torch-cpu": {"type": "cpu"}}
    if library.is_file():
        if not re.fullmatch(r"\d+\.\d+", cuda or ""):
            raise ValueError(f"cuda must be the version of CUDA of {library.name}, such as '13.0', found {cuda!r}")
        if not re.fullmatch(r"\d{2,3}(;\d{2,3})*", archs):
            raise ValueError(f"archs must be the capabilities of {library.name}, such as '80;90', found {archs!r}")
        name = f"torch-stable-abi{TORCH}-cu{cuda.replace('.', '')}-{platform.machine()}-linux"
        variants[name] = {
            "type": "cuda",
            "archs": [BUILT.get(arch, f"{arch[:-1]}.{arch[-1]}") for arch in archs.split(";")],
        }
    for name, backend in variants.items():
        folder = target / "build" / name
        shutil.rmtree(folder, ignore_errors=True)
        ignored = ["__pycache__"] if backend["type"] == "cuda" else ["__pycache__", library.name]
        shutil.copytree(source, folder / "flash_attn", ignore=shutil.ignore_patterns(*ignored))
        metadata = {
            "id": "flash_attn",
            "name": "flash-attn",
            "version": 1,
            "license": "BSD-3-Clause",
            "python-depends": ["einops"],
            "backend": backend,
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return list(variants)


def main() -> None:
    """Write build/kernels, or the folder that is named, with the versions that setup.py finds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", type=Path, default=ROOT / "build/kernels", help="folder to write")
    target = parser.parse_args().target
    setup = runpy.run_path(str(ROOT / "setup.py"))
    toolkit = setup["find_toolkit"](os.environ)
    archs = os.environ.get("FLASH_ATTN_CUDA_ARCHS", setup["ARCHS"])
    for name in write(target, cuda=getattr(toolkit, "cuda", None), archs=archs):
        print(f"Made {target / 'build' / name}.")


if __name__ == "__main__":
    main()
