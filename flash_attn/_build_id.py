"""The id that ties a kernel library to the schemas of the ops that it serves.

setup.py, which cannot import the package without torch, has the linker write it into `_kernels.so` as the ELF build
id. `_library` loads no file without it: kernels of other schemas would take one argument for another.
"""

import ast
import hashlib
import pathlib

PACKAGE = pathlib.Path(__file__).parent


def build_id(package: pathlib.Path = PACKAGE) -> str:
    """40 hex digits that change with the schemas of the ops in the folder `package`, the same for every Python."""
    return hashlib.sha256("\n".join(map(schema_text, schema_files(package))).encode()).hexdigest()[:40]


def schema_files(package: pathlib.Path = PACKAGE) -> list[pathlib.Path]:
    """The modules that define ops, and those that list arguments of ops."""
    return sorted([*package.glob("_ops/*.py"), *package.glob("_reference/attention/options.py")])


def is_in(library: pathlib.Path) -> bool:
    """Whether the file was built with today's id. Linkers put such notes behind the headers, into the first page."""
    with open(library, "rb") as file:
        return bytes.fromhex(build_id()) in file.read(4096)


def schema_text(path: pathlib.Path) -> str:
    """What schemas are made of in a module: the strings in its assignments, and the fields of its classes."""
    body = ast.parse(path.read_bytes()).body
    assigned = [node for each in body if isinstance(each, ast.Assign) for node in ast.walk(each)]
    strings = [node.value for node in assigned if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    classes = [each for each in body if isinstance(each, ast.ClassDef)]
    fields = [f" {ast.unparse(node)}" for each in classes for node in each.body if isinstance(node, ast.AnnAssign)]
    return "".join([*strings, *fields])
