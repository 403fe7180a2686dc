"""Who may use whom, read from imports and includes.

Python:  _library <- _ops -> {_reference, _triton};   _ops <- {flash_attn_interface, layers, ...} <- modules <- models
C++:     ptx <- tile <- families <- binding;   common <- all but ptx
"""

import ast
import graphlib
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FAMILIES = ("flash_attn", "layer_norm", "rotary", "xentropy", "fused_dense", "fused_softmax")
pytestmark = pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="this is not a source tree")

# ---------------------------------------------------------------------------------------------------------------------
# Python

FRONTS = {"flash_attn_interface", "fused_softmax", "layers", "losses", "ops"}
MAY_IMPORT = {  # part of the package -> parts that it may import, besides itself
    "_after_import": set(),
    "_build_id": set(),
    "_errors": set(),
    "_sharding": {"_errors"},
    "_removed": set(),  # which every part may import
    "_torch_private": set(),
    "_library": {"_after_import", "_build_id", "_sharding", "_torch_private"},
    "_reference": {"_errors", "_torch_private"},
    "_triton": set(),
    "_ops": {"_errors", "_library", "_reference", "_sharding", "_torch_private", "_triton"},
    "batch_invariance": {"_ops"},
    "bert_padding": {"_ops"},  # its checks
    # checks; masks and softmax of the reference of attention
    "utils": {"_ops", "_reference", "_torch_private", "bert_padding"},
    "_flash_attn_gpu": {"_ops"},
    "flash_attn_interface": {"_flash_attn_gpu", "_ops"},
    "functional": {"_errors", "_ops", "flash_attn_interface"},
    "masks": {"_library", "_ops"},
    "precision": {"_ops"},
    "parallel": {"_ops", "_torch_private", "utils"},
    "context_parallel": {
        "_errors",
        "_library",
        "_ops",
        "_torch_private",
        "flash_attn_interface",
        "functional",
        "utils",
    },
    "integrations": {
        "_errors",
        "_library",
        "_ops",
        "context_parallel",
        "flash_attn_interface",
        "functional",
        "masks",
    },
    "flash_attn_triton": {"_ops", "flash_attn_interface"},
    "fused_softmax": {"_ops"},
    "layers": {"_ops", "_torch_private", "ops"},
    "losses": {"_ops", "ops", "utils"},
    "ops": {"_ops", "utils"},
    "modules": {*FRONTS, "_library", "_ops", "bert_padding", "context_parallel", "parallel", "utils"},
    "models": {*FRONTS, "_library", "_ops", "_torch_private", "bert_padding", "context_parallel", "utils", "modules"},
    "__init__": {"batch_invariance", "flash_attn_interface"},
    "__main__": {"_library", "_ops", *FRONTS},
}
REQUIRED_PACKAGES = {"torch", "einops"}
OUTSIDE = {"tests", "benchmarks", "training", "examples"}


def package_files():
    files = sorted((ROOT / "flash_attn").rglob("*.py"))
    assert files
    return files


def compat_files():
    files = sorted((ROOT / "compat").glob("*.py"))
    assert files
    return files


def part_of(path):
    """The first name below flash_attn: flash_attn/_ops/rotary.py -> _ops."""
    return path.relative_to(ROOT / "flash_attn").with_suffix("").parts[0]


def imports(path, *, top_level_only=False):
    """Full names of the modules (and perhaps names in them) that a file imports."""
    tree = ast.parse(path.read_text())
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in _top_level(tree) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _top_level(tree):
    """Statements that run on import: all but those inside functions, and those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        only_checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not only_checked and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from _top_level(node)


def check(files, wrong, advice):
    """Fail if `wrong(path)` yields anything for one of the files. advice: what whoever wrote that should do."""
    found = [f"{path.relative_to(ROOT)}: {what}" for path in files for what in wrong(path)]
    assert not found, "\n".join([advice, *found])


def test_parts_of_the_package_import_downwards():
    def wrong(path):
        part = part_of(path)
        for name in imports(path):
            target = name.removeprefix("flash_attn.").split(".")[0]
            if name.startswith("flash_attn.") and target != part and target not in {*MAY_IMPORT[part], "_removed"}:
                yield f"imports {name}"

    check(
        package_files(),
        wrong,
        "Move what is shared to a lower part, or, if the new dependency is right, add it to MAY_IMPORT.",
    )


def test_every_part_of_the_package_has_its_place():
    new = {part_of(path) for path in package_files()} - MAY_IMPORT.keys()
    assert not new, "add them to MAY_IMPORT with what they may import"


def test_optional_packages_are_imported_where_they_are_used():
    """What is imported with the package is the standard library, torch and einops; in _reference, torch alone.

    Modules of _triton, which need Triton, are imported where their kernels are launched.
    """

    def wrong(path):
        allowed = {"_reference": {"torch"}, "_triton": {"torch", "triton"}}.get(part_of(path), REQUIRED_PACKAGES)
        for name in imports(path, top_level_only=True):
            package = name.split(".")[0]
            if package not in {*allowed, *sys.stdlib_module_names, "flash_attn"}:
                yield f"imports {package} at the top level"

    check(package_files(), wrong, "Import optional packages inside the function that needs them.")


def test_triton_is_loaded_where_it_is_launched():
    def wrong(path):
        names = imports(path, top_level_only=True) if part_of(path) != "_triton" else ()
        yield from (f"imports {name}" for name in names if name.startswith("flash_attn._triton"))

    check(
        package_files(),
        wrong,
        "Reach kernels in Triton through flash_attn._ops.triton, which imports them at their first launch.",
    )


def test_nothing_in_the_package_needs_what_is_not_installed():
    def wrong(path):
        yield from (f"imports {name}" for name in imports(path) if name.split(".")[0] in OUTSIDE)

    check(
        [*package_files(), *compat_files()],
        wrong,
        "Tests, benchmarks and examples are not installed: move what the package needs into it.",
    )


def test_only_the_library_module_asks_for_the_device():
    """torch's dispatcher picks the backend. utils may ask, since they time and distribute, and so may _torch_private,
    since some operators of torch are for one device.
    """

    def wrong(path):
        if part_of(path) in ("_library", "_torch_private", "utils", "__main__"):
            return
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.search(
                r"is_cuda$|is_cpu$|device\.type$|\btorch\.cuda$", ast.unparse(node)
            ):
                yield f"line {node.lineno}: {ast.unparse(node)}"

    check(package_files(), wrong, "Let the dispatcher choose, or ask _library.is_where_kernels_run.")


PRIVATE = re.compile(r"_(?!_)")
NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_replace"}  # public in spite of their names
NOT_OF_TORCH = {"integrations/diffusers.py"}  # private names of others, which have no public ones


def test_private_names_of_torch_are_in_one_file():
    """A private name is one that no file of the package defines."""
    trees = {path: ast.parse(path.read_text()) for path in package_files()}
    own = {name for tree in trees.values() for name in _defined(tree)} | NAMED_TUPLES

    def wrong(path):
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr) and node.attr not in own:
                # Methods of torch that a class here overrides, and what Python documents.
                if not ast.unparse(node).startswith(("super()", "sys.")):
                    yield f"line {node.lineno}: {ast.unparse(node)}"
        for name in imports(path):
            if name.startswith("torch.") and any(PRIVATE.match(part) for part in name.split(".")):
                yield f"imports {name}"

    elsewhere = {ROOT / "flash_attn" / name for name in ("_torch_private.py", *NOT_OF_TORCH)}
    files = [path for path in trees if path not in elsewhere]
    check(files, wrong, "Use them through flash_attn/_torch_private.py, which tells what happens without them.")


def _defined(tree):
    """The names that a file gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_the_reference_registers_nothing():
    def wrong(path):
        yield from (f"imports {name}" for name in imports(path) if name.startswith("torch.library"))
        if "torch.library" in path.read_text():
            yield "torch.library"

    check(
        (ROOT / "flash_attn/_reference").rglob("*.py"), wrong, "Register ops in flash_attn/_ops with _library.define."
    )


def test_modules_beside_the_package_are_thin():
    """Top-level modules with other packages' names stand on _ops, as flash_attn_interface does."""

    def wrong(path):
        for name in imports(path):
            if name.startswith("flash_attn.") and name.split(".")[1] not in ("_ops", "_flash_attn_gpu", *FRONTS):
                yield f"imports {name}"

    check(compat_files(), wrong, "Put the work into flash_attn/_ops and call it from there.")


@pytest.mark.parametrize("folder", ["flash_attn", "benchmarks"])
def test_modules_import_without_a_circle(folder):
    """Also not by imports within functions. A module may import the package that it is in."""
    paths = (ROOT / folder).rglob("*.py")
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    known = {
        name: {each for each in _modules(path) if each in files and not f"{name}.".startswith(f"{each}.")}
        for name, path in files.items()
    }
    assert list(graphlib.TopologicalSorter(known).static_order())  # a circle is a CycleError that shows it


def _modules(path):
    """What a file imports, and the modules that these names may be in."""
    for name in imports(path):
        yield from (name, name.rpartition(".")[0])


# ---------------------------------------------------------------------------------------------------------------------
# C++

CSRC = ROOT / "csrc"
LOWER = {"ptx": set(), "common": set(), "tile": {"ptx", "common"}, "binding": {"common"}}
STABLE_HEADERS = re.compile(r"torch/(csrc/stable|headeronly|csrc/inductor/aoti_torch/c)/")


def sources():
    files = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh", ".cu", ".cpp"))
    assert files
    return files


def folder_of(path):
    return path.relative_to(CSRC).parts[0]


def includes(path, kind='"'):
    """What a file includes: kind '"' for files of the project, '<' for others."""
    closing = {'"': '"', "<": ">"}[kind]
    return re.findall(rf"^\s*#\s*include\s*{kind}([^{closing}]+){closing}", path.read_text(), re.MULTILINE)


def may_include(folder, target):
    """Whether a file of csrc/`folder` may include the file `target`."""
    below = pathlib.PurePath(target).parts[0]
    if below == folder or below in LOWER.get(folder, {"ptx", "tile", "common"}):
        return True
    return folder == "binding" and below in FAMILIES and pathlib.PurePath(target).name in ("params.h", "launch.h")


def test_families_have_the_known_names():
    new = {folder_of(path) for path in sources()} - {*LOWER, *FAMILIES}
    assert not new, "add a family to FAMILIES, or another folder with what it may include to LOWER"


def test_includes_go_downwards():
    """ptx and common stand alone, families do not know one another, and binding sees only params.h and launch.h."""

    def wrong(path):
        yield from (f"includes {target}" for target in includes(path) if not may_include(folder_of(path), target))

    check(
        sources(),
        wrong,
        "Move what is shared to tile, ptx or common, or give it to binding through params.h and launch.h.",
    )


def test_includes_exist():
    """Project headers are written from csrc/ on, which is on the include path."""

    def wrong(path):
        yield from (f"includes {target}" for target in includes(path) if not (CSRC / target).exists())

    check(sources(), wrong, "Write project headers from csrc/ on.")


def test_files_that_comments_name_exist():
    """Of Python and of the pages; headers are found by `test_includes_exist`."""

    def wrong(path):
        names = re.findall(r"\b(?:flash_attn|tests|benchmarks|docs)/[\w/]+\.(?:py|md)\b", path.read_text())
        yield from (f"names {name}" for name in names if not (ROOT / name).exists())

    check(sources(), wrong, "Name the file that took its place.")


def test_only_binding_sees_torch_and_only_its_stable_headers():
    def wrong(path):
        for header in includes(path, "<"):
            foreign = header.startswith(("torch/", "ATen/", "c10/", "pybind11/", "Python.h"))
            if foreign and not (folder_of(path) == "binding" and STABLE_HEADERS.match(header)):
                yield f"includes {header}"

    check(
        sources(),
        wrong,
        "Pass pointers and sizes from csrc/binding, which may use torch/csrc/stable and torch/headeronly.",
    )


def test_host_headers_include_no_device_code():
    """.h and .cpp compile without nvcc; .cuh does not."""

    def wrong(path):
        if path.suffix in (".h", ".cpp"):
            yield from (f"includes {target}" for target in includes(path) if target.endswith((".cuh", ".cu")))

    check(sources(), wrong, "Make the file a .cuh or .cu, or move what it needs from there to a .h.")


def test_params_and_plans_need_no_cuda():
    """What a kernel is given, and which kernel is chosen, can be compiled and tested without a toolkit."""
    names = re.compile(r"params\.h|config\.h|(.*_)?(tiles|plan|planner)\.h")

    def wrong(path):
        yield from (
            f"needs {header}" for header in reachable(path) if header.startswith(("cuda", "cooperative_groups"))
        )

    check(
        [path for path in sources() if names.fullmatch(path.name)],
        wrong,
        "Keep CUDA's types out of params, tiles and plans: launch.h takes the stream.",
    )


def reachable(path):
    """System headers that a file includes, itself or through the project's."""
    seen, todo = set(), [path]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += [CSRC / target for target in includes(current)]
    return {header for file in seen for header in includes(file, "<")}


def binding_of(family):
    """The files with a family's ops: one or, where that would be long, a folder of them."""
    folder = CSRC / "binding"
    return [path for path in [folder / f"{family}.cpp", *(folder / family).glob("*.cpp")] if path.exists()]


REFERENCE_OF_ATTENTION = "flash_attn/_reference/attention/blockwise.py"  # the only reference of several modules


def test_one_stem_leads_through_a_family():
    """A family with kernels has its binding, ops, reference and benchmark under its own name."""
    families = sorted({folder_of(path) for path in sources()} & set(FAMILIES))
    missing = [f"csrc/binding/{family}.cpp, or a folder" for family in families if not binding_of(family)]
    missing += [
        file
        for family in families
        for file in (
            f"csrc/{family}/params.h",
            f"csrc/{family}/launch.h",
            f"flash_attn/_ops/{family}.py",
            REFERENCE_OF_ATTENTION if family == "flash_attn" else f"flash_attn/_reference/{family}.py",
            f"benchmarks/benchmark_{family}.py",
        )
        if not (ROOT / file).exists()
    ]
    assert not missing, "write them: each family has the same files under its own name"


# ---------------------------------------------------------------------------------------------------------------------
# The readers of this file themselves


def test_a_failure_says_what_to_do():
    with pytest.raises(AssertionError, match=r"Do it otherwise\.\n +tests/test_layering\.py: too long"):
        check([pathlib.Path(__file__)], lambda path: ["too long"], "Do it otherwise.")


def test_imports_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "flash_attn" / "ops" / "new.py"
    path.parent.mkdir(parents=True)
    path.write_text("import a.b\nfrom . import c\nfrom ..d import e\ndef f():\n    from g import h\n")
    assert list(imports(path)) == ["a.b", "flash_attn.ops.c", "flash_attn.d.e", "g.h"]
    assert list(imports(path, top_level_only=True)) == ["a.b", "flash_attn.ops.c", "flash_attn.d.e"]


@pytest.mark.parametrize(
    ("folder", "target", "allowed"),
    [
        ("ptx", "common/check.h", False),
        ("tile", "ptx/mma.cuh", True),
        ("tile", "rotary/params.h", False),
        ("rotary", "flash_attn/params.h", False),
        ("rotary", "tile/vec.cuh", True),
        ("binding", "rotary/launch.h", True),
        ("binding", "rotary/rotary.cuh", False),
        ("binding", "tile/vec.cuh", False),
        ("common", "tile/vec.cuh", False),
    ],
)
def test_layers(folder, target, allowed):
    assert may_include(folder, target) == allowed
