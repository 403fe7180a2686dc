"""The id that ties a kernel library to the schemas of the ops that it serves.

setup.py, which cannot import the package without torch, has the linker write it into `_kernels.so` as the ELF build
id. `_library` loads no file without it: kernels of other schemas would take one argument for another.
"""

import ast
import hashlib
import pathlib

OPS = pathlib.Path(__file__).parent / "_ops"


def build_id(ops: pathlib.Path = OPS) -> str:
    """40 hex digits that change with the schemas in the folder `ops`, the same for every Python."""
    return hashlib.sha256("\n".join(_module_strings(path) for path in sorted(ops.glob("*.py"))).encode()).hexdigest()[
        :40
    ]


def is_in(library: pathlib.Path) -> bool:
    """Whether the file was built with today's id. Linkers put such notes behind the headers, into the first page."""
    with open(library, "rb") as file:
        return bytes.fromhex(build_id()) in file.read(4096)


def _module_strings(path):
    """All strings in the assignments of a module, schemas and their parts: `fwd = define("fwd(Tensor q, ...", ...)`."""
    assignments = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.Assign)]
    constants = [node.value for each in assignments for node in ast.walk(each) if isinstance(node, ast.Constant)]
    return "".join(value for value in constants if isinstance(value, str))
