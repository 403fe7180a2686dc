"""What is built, and what is in it: the decision for or against the CUDA library, wheels, source archives, metadata."""

import base64
import email
import functools
import hashlib
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import types
import zipfile

import pytest

pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools >= 77")
from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="this is not a source tree")


@pytest.fixture(scope="module")
def setup():
    """The functions of setup.py, which builds nothing unless it is the main program."""
    return types.SimpleNamespace(**runpy.run_path(ROOT / "setup.py"))


def _build(kind, source, target, settings=None, **env):
    """Run one of the build backend's hooks (PEP 517, 660) as pip does; return what it made and what it printed."""
    command = f"import build_backend; print(build_backend.build_{kind}({str(target)!r}, {settings}))"
    env = _unset() | env
    run = subprocess.run(
        [sys.executable, "-c", command], cwd=source, env=env, check=True, capture_output=True, text=True
    )
    return target / run.stdout.splitlines()[-1], run.stdout


def _unset():
    """The environment without the variables that steer a build, which whoever runs the tests may have set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FLASH_ATT")}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the tree that holds what must not get into a package: stale and scratch files, compiled Python."""
    tree = tmp_path_factory.mktemp("source") / "flash-attn"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "_kernels.so", "results")
    shutil.copytree(ROOT, tree, ignore=ignored)
    for name in (
        "flash_attn/_kernels.so",
        "flash_attn/_built.txt",
        "csrc/__pycache__/instances.cpython-311.pyc",
        "scratch.py",
        "build/lib/flash_attn/old.py",
        "build/lib/flash_attn/_kernels.so",
        f"build/bdist.{sysconfig.get_platform()}/wheel/flash_attn/older.py",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("# stale")
    return tree


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return _build("wheel", source, tmp_path_factory.mktemp("wheel"), FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE")


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    return _build("sdist", source, tmp_path_factory.mktemp("sdist"))[0]


def _sources():
    """Every Python file of the package and of the modules beside it, as paths in the source tree."""
    files = [path for folder in ("flash_attn", "compat") for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix() for path in files}


def _modules():
    """The same files as an installation has them: those of compat/ at the top level."""
    return {path.removeprefix("compat/") for path in _sources()}


def _unpacked(wheel, folder):
    """The folder, with a wheel unpacked in it as an installer would."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _ask(folder, expression):
    """What a Python finds that has the standard library and `folder` as its site-packages, nothing else."""
    imports = "import pathlib, site; from importlib import metadata, util"
    code = f"{imports}; site.addsitedir({str(folder)!r}); print({expression})"
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


CUDA_TORCH, CPU_TORCH = ((2, 13), "13.0"), ((2, 13), None)
NVCC, NO_NVCC = ("/usr/local/cuda", "13.0"), "no nvcc"
# torch, toolkit or why there is none: None if the library is built, or a part of the reason; the same if forced
DECISIONS = {
    "all there": (CUDA_TORCH, NVCC, None, None),
    "older nvcc of the same CUDA": (CUDA_TORCH, ("/usr/local/cuda", "13.2"), None, None),
    "no torch": (None, NVCC, "there is no torch in", "there is no torch in"),
    "old torch": (((2, 9), "13.0"), NVCC, "older than 2.10", "older than 2.10"),
    "CPU-only torch": (CPU_TORCH, NVCC, "CPU-only", None),
    "no nvcc": (CUDA_TORCH, NO_NVCC, "no nvcc", "no nvcc"),
    "neither": (CPU_TORCH, NO_NVCC, "no nvcc: .* beside a CUDA build of torch", "no nvcc"),
    "nothing": (None, NO_NVCC, "no nvcc: .* beside a CUDA build of torch", "no nvcc"),
    "other CUDA": (CUDA_TORCH, ("/usr/local/cuda", "12.8"), "nvcc is of CUDA 12.8", "nvcc is of CUDA 12.8"),
}


def _obstacle(setup, torch, toolkit, forced, ninja="/usr/bin/ninja"):
    toolkit = toolkit if isinstance(toolkit, str) else setup.Toolkit(*toolkit)
    return setup.obstacle(torch and setup.Torch(*torch), toolkit, ninja, forced)


@pytest.mark.parametrize(("torch", "toolkit", "reason", "_"), DECISIONS.values(), ids=DECISIONS)
def test_decision(setup, torch, toolkit, reason, _):
    found = _obstacle(setup, torch, toolkit, forced=False)
    assert found is None if reason is None else re.search(reason, found)


@pytest.mark.parametrize(("torch", "toolkit", "_", "error"), DECISIONS.values(), ids=DECISIONS)
def test_forced_decision(setup, torch, toolkit, _, error):
    if error is None:
        assert _obstacle(setup, torch, toolkit, forced=True) is None
    else:
        with pytest.raises(SystemExit, match=f"FORCE_BUILD.*{error}"):
            _obstacle(setup, torch, toolkit, forced=True)


def test_a_build_without_ninja_is_refused(setup):
    """Torch would run one compiler at a time: hours in place of minutes."""
    assert "`pip install ninja`" in _obstacle(setup, CUDA_TORCH, NVCC, forced=False, ninja=None)
    with pytest.raises(SystemExit, match="pip install ninja"):
        _obstacle(setup, CPU_TORCH, NVCC, forced=True, ninja=None)


def test_ninja_is_found_beside_python(setup, monkeypatch, tmp_path):
    """Where pip has put it, in an environment that need not be active."""
    monkeypatch.setattr(setup.find_ninja.__globals__["sysconfig"], "get_path", lambda name: str(tmp_path))
    assert setup.find_ninja({"PATH": ""}) is None
    _script(tmp_path / "ninja")
    assert setup.find_ninja({"PATH": ""}) == str(tmp_path / "ninja")


# What nvcc 13.0 has, and 12.4.
CODES = "75 80 86 87 88 89 90 100 110 103 120 121", "50 75 80 86 87 89 90"


@pytest.fixture
def toolkit(setup, tmp_path, request):
    """A toolkit whose nvcc only tells which GPUs it has code for, and takes what it has, with an `a` or without."""
    codes = getattr(request, "param", CODES[0]).split()
    taken = "|".join(f"*code=*sm_{code}|*code=*sm_{code}]|*code=sm_{code}a" for code in codes)
    check = f'for flag; do case $flag in {taken}) ;; -gen*) echo "nvcc fatal : $flag" >&2; exit 1;; esac; done'
    _script(tmp_path / "bin/nvcc", f"[ $1 = --list-gpu-code ] && printf 'sm_%s\\n' {' '.join(codes)} && exit", check)
    return setup.Toolkit(str(tmp_path), "13.0")


@pytest.mark.parametrize(
    ("wanted", "toolkit", "archs"),
    [
        (None, CODES[0], ["80", "90", "100", "120"]),
        (None, CODES[1], ["80", "90"]),
        ("120", CODES[0], ["120"]),
        ("90;80;90", CODES[0], ["90", "80"]),
        ("120a;121;103", CODES[0], ["120a", "121", "103"]),
    ],
    indirect=["toolkit"],
)
def test_architectures(setup, toolkit, wanted, archs):
    """By default those of wheels that nvcc has."""
    env = {} if wanted is None else {"FLASH_ATTN_CUDA_ARCHS": wanted}
    assert setup.architectures(env, toolkit) == archs


@pytest.mark.parametrize(
    ("wanted", "toolkit", "error"),
    [
        *((wanted, CODES[0], "a list like '80;90'") for wanted in ("", "8.0", "80,90", "80;", "native", "80 90")),
        ("75;80", CODES[0], "of 80, 86, .* with nvcc 13.0"),
        ("80;130", CODES[0], "of 80, 86, .*120, 121 with nvcc 13.0"),
        ("80;120", CODES[1], "of 80, .*89, 90 with nvcc 13.0"),
        ("80;86f", CODES[0], "what nvcc 13.0 takes"),
    ],
    indirect=["toolkit"],
)
def test_bad_archs(setup, toolkit, wanted, error):
    """Before anything is compiled."""
    with pytest.raises(SystemExit, match=f"FLASH_ATTN_CUDA_ARCHS must be {error}, found {wanted!r}"):
        setup.architectures({"FLASH_ATTN_CUDA_ARCHS": wanted}, toolkit)


def test_arch_flags(setup):
    assert setup.arch_flags(["80", "90", "120"]) == [
        "-gencode=arch=compute_80,code=[compute_80,sm_80]",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
    ]


@pytest.mark.parametrize(
    ("archs", "said"),
    [
        (["80", "90", "120"], "compute capabilities 8.0, 9.0, 12.0 and, as PTX, newer ones"),
        (["80"], "compute capabilities 8.0 and, as PTX, newer ones"),
        (["90", "100f"], "compute capabilities 9.0, 10.0f"),
        (["120"], "compute capability 12.0"),
    ],
)
def test_capabilities(setup, archs, said):
    assert setup.capabilities(archs) == said


def test_says_at_last_what_was_built(setup, toolkit, monkeypatch, tmp_path):
    """And keeps it beside the library, since installers hide what a build prints."""
    functions = setup.plan.__globals__
    monkeypatch.setitem(functions, "find_toolkit", lambda env: toolkit)
    monkeypatch.setitem(functions, "find_torch", lambda: setup.Torch((2, 13), "13.0"))
    monkeypatch.setitem(functions, "find_ninja", lambda env: "ninja")
    monkeypatch.setitem(functions, "kernels", lambda env, toolkit, archs, last_line: {"archs": archs})
    arguments, said = setup.plan({"FLASH_ATTN_CUDA_ARCHS": "80;120"})
    assert arguments == {"archs": ["80", "120"]}
    assert said.startswith("flash-attn: built with CUDA kernels for compute capabilities 8.0, 12.0 and, as PTX, newer")
    assert "by nvcc 13.0 beside torch 2.13; they serve every torch from 2.10 and every Python from 3.10" in said
    assert "only those that match '*128*'" in setup.plan({"FLASH_ATTN_INSTANCES": "*128*"})[1]
    setup.keep_beside(str(tmp_path / "_kernels.so"), "built with CUDA kernels")
    assert (tmp_path / setup.BUILT).read_text() == "built with CUDA kernels\n"


@pytest.mark.parametrize(
    ("cuda", "flags"),
    [("12.9", ["-Xfatbin=-compress-all"]), ("13.0", ["--compress-mode=size"]), ("14.1", ["--compress-mode=size"])],
)
def test_compression_flags(setup, cuda, flags):
    assert setup.compression_flags(cuda) == flags


def _script(path, *lines, shebang="#!/bin/sh"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([shebang, *lines, ""]))
    path.chmod(0o755)


def test_nvcc_behind_a_wrapper(setup, tmp_path):
    """The toolkit is where nvcc really is, not where a script of that name is."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    _script(tmp_path / "nvcc", f'exec {nvcc} "$@"')
    toolkit = setup.find_toolkit({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (pathlib.Path(toolkit.home) / "include/cuda.h").exists()
    assert int(toolkit.cuda.split(".")[0]) >= 12


BROKEN = {  # the script, and what is said of it
    "fails": (["echo no licence found >&2", "exit 1"], "no licence found"),
    "fails after all": (["echo TOP=/x __CUDACC_VER_MAJOR__=13 __CUDACC_VER_MINOR__=0 >&2", "exit 1"], "status 1"),
    "says something else": (["echo release 13.0"], "status 0"),
    "says what is no text": (["printf '\\377' >&2"], "status 0"),
}


@pytest.mark.parametrize(("script", "reason"), BROKEN.values(), ids=BROKEN)
def test_broken_nvcc(setup, tmp_path, script, reason):
    """It is as good as none: the package installs without kernels and says why."""
    _script(tmp_path / "bin/nvcc", *script)
    found = setup.find_toolkit({"CUDA_HOME": str(tmp_path)})
    assert f"{tmp_path}/bin/nvcc does not work" in found and reason in found


def test_nvcc_that_cannot_be_run(setup, tmp_path):
    _script(tmp_path / "bin/nvcc", shebang="\x7fELF of another machine")
    assert f"{tmp_path}/bin/nvcc does not work" in setup.find_toolkit({"CUDA_HOME": str(tmp_path)})


def test_installs_without_kernels_for_a_broken_nvcc(source, tmp_path):
    """Or, if the kernels are wanted by force, says what is wrong; torch here may be CPU-only, which comes first."""
    _script(tmp_path / "bin/nvcc", "exit 1")
    _, said = _build("wheel", source, tmp_path, CUDA_HOME=str(tmp_path))
    assert "installed without CUDA kernels" in said
    with pytest.raises(subprocess.CalledProcessError) as error:
        _build("wheel", source, tmp_path, CUDA_HOME=str(tmp_path), FLASH_ATTENTION_FORCE_BUILD="TRUE")
    assert error.value.stderr.startswith("flash-attn: FLASH_ATTENTION_FORCE_BUILD=TRUE, but ")
    assert "bin/nvcc does not work" in error.value.stderr


def test_no_nvcc_in_the_working_directory(setup, tmp_path, monkeypatch):
    """Variables that are not set add no folder to search: neither None/bin nor, for an empty name, this one."""
    for path in ("nvcc", "bin/nvcc", "None/bin/nvcc"):
        _script(tmp_path / path, "exit 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", functools.partial(_which_here, shutil.which))
    assert setup.find_toolkit({}) == "there is no nvcc in CUDA_HOME, on the PATH or in /usr/local/cuda"


def _which_here(which, name, path):
    """shutil.which in the folders below this one, whatever is installed on this machine."""
    return which(name, path=os.pathsep.join(folder for folder in path.split(os.pathsep) if folder[:1] != "/"))


GB = 10**9
MEMORY = {  # files of the machine; jobs if there are cores enough
    "free memory": ({"proc/self/cgroup": "0::/"}, 8),
    "no limit": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max\n"}, 8),
    "limit of a container": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": f"{7 * GB}\n"}, 2),
    "limit above a cgroup": (
        {
            "proc/self/cgroup": "1:cpu:/other\n0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": f"{10 * GB}\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
        },
        3,
    ),
    "cgroups of version 1": ({"proc/self/cgroup": "4:memory:/x"}, 8),
    "hardly any": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "1000\n"}, 1),
}


@pytest.mark.parametrize(("files", "jobs"), MEMORY.values(), ids=MEMORY)
def test_max_jobs(setup, tmp_path, monkeypatch, files, jobs):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64))
    for name, text in ({"proc/meminfo": f"MemFree: 1 kB\nMemAvailable: {24 * GB // 1024 + 1} kB\n"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert setup.max_jobs(tmp_path) == jobs


@pytest.fixture
def instances():
    """csrc/instances.py with a table of three."""
    module = types.SimpleNamespace(**runpy.run_path(ROOT / "csrc/instances.py"))
    module.INSTANCES.clear()
    module.INSTANCES.update({"fwd_sm80_64": "// 64", "fwd_sm80_128": "// 128", "bwd_sm80_64": "// back"})
    return module


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (None, ["fwd_sm80_64", "fwd_sm80_128", "bwd_sm80_64"]),
        ("fwd_*", ["fwd_sm80_64", "fwd_sm80_128"]),
        ("*_64", ["fwd_sm80_64", "bwd_sm80_64"]),
        ("bwd_sm80_64", ["bwd_sm80_64"]),
    ],
)
def test_instances(instances, tmp_path, monkeypatch, pattern, names):
    monkeypatch.delenv("FLASH_ATTN_INSTANCES", raising=False)
    if pattern:
        monkeypatch.setenv("FLASH_ATTN_INSTANCES", pattern)
    written = instances.generate(tmp_path / "build")
    assert written == [tmp_path / f"build/{name}.cu" for name in names]
    assert [path.read_text() for path in written] == [instances.INSTANCES[name] for name in names]


def test_unchanged_instances_are_left_alone(instances, tmp_path, monkeypatch):
    """A new time of change would have all of them compiled again."""
    monkeypatch.delenv("FLASH_ATTN_INSTANCES", raising=False)
    for path in instances.generate(tmp_path):
        os.utime(path, (1, 1))
    instances.INSTANCES["fwd_sm80_64"] = "// 64, changed"
    changed = [path.name for path in instances.generate(tmp_path) if path.stat().st_mtime != 1]
    assert changed == ["fwd_sm80_64.cu"]
    assert (tmp_path / "fwd_sm80_64.cu").read_text() == "// 64, changed"


def test_pattern_without_instances(instances, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_INSTANCES", "fwd_sm90*")
    with pytest.raises(SystemExit, match=r"FLASH_ATTN_INSTANCES must .* 'fwd_sm80_64', found 'fwd_sm90\*'"):
        instances.generate(tmp_path)
    instances.INSTANCES.clear()
    assert instances.generate(tmp_path) == []


_WHEEL_TAG = """
import runpy, sys
from setuptools import Distribution, Extension
setup = runpy.run_path(sys.argv[1])
ext_modules = [Extension(name, []) for name in sys.argv[2:]]
command = setup["Wheel"](Distribution({"name": "flash-attn", "ext_modules": ext_modules}))
command.ensure_finalized()
print(*command.get_tag())
"""


@pytest.mark.parametrize(("ext_modules", "platform"), [([], "any"), (["flash_attn._kernels"], "linux")])
def test_wheel_tag(ext_modules, platform):
    """A wheel with the library is for one platform, but for every Python. In a process of its own, where nobody else
    has imported distutils."""
    command = [sys.executable, "-c", _WHEEL_TAG, str(ROOT / "setup.py"), *ext_modules]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    python, abi, found = run.stdout.split()
    assert (python, abi, found.split("_")[0]) == ("py3", "none", platform)


def test_says_at_last_that_there_are_no_kernels(wheel):
    """And keeps it in the wheel, since installers hide what a build prints."""
    *before, said, name = wheel[1].splitlines()
    assert "without CUDA kernels" in said and not [line for line in before if "without CUDA kernels" in line]
    assert "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE: unset it. Then" in said
    assert re.search(r"`pip install [^`]* \.` or `uv pip install [^`]* \.`", said)  # as it is typed in the sources
    assert "--no-cache-dir" in said  # or pip would install the wheel that it has just made
    assert f"{wheel[0].name} has no CUDA kernels." in wheel[1]
    with zipfile.ZipFile(wheel[0]) as archive:
        assert archive.read("flash_attn/_no_kernels.txt").decode().strip() == said.removeprefix("flash-attn: ")


@pytest.mark.parametrize(
    ("env", "toolkit", "torch", "needed"),
    [
        ({}, "13.0", False, ["torch>=2.11"]),
        ({}, "12.8", False, ["torch==2.10.*"]),
        ({}, "13.0", True, []),
        ({}, None, False, []),
        ({"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}, "13.0", False, []),
    ],
)
def test_isolated_builds_ask_for_torch_where_kernels_can_be_built(setup, monkeypatch, env, toolkit, torch, needed):
    """uv and `python -m build` hide the torch of the environment that they build for."""
    functions = setup.build_requirements.__globals__
    found = setup.Toolkit("/usr/local/cuda", toolkit) if toolkit else "no nvcc"
    monkeypatch.setitem(functions, "find_toolkit", lambda env: found)
    monkeypatch.setitem(functions, "find_torch", lambda: setup.Torch((2, 13), "13.0") if torch else None)
    assert setup.build_requirements(env) == needed


def test_output_in_short(setup):
    """A line says which file is done and how long the others take; from a failure on, all is printed."""
    times = iter([0, 10, 600])
    compiled = "[{}/4] /usr/local/cuda/bin/nvcc -I/x -c -c /source/csrc/flash_attn/{} -o /y/{}.o -O3\n"
    link = "g++ -shared " + "a.o " * 1000 + "\n"
    failed = ["FAILED: [code=1] c.o\n", link, compiled.format(4, "d.cu", "d"), "c.cu(1): error\n"]
    lines = ["running\n", compiled.format(1, "a.cu", "a"), compiled.format(2, "b.cpp", "b"), link, *failed]
    begin, first, second, linked, *rest = setup.in_short(lines, clock=lambda: next(times))
    assert [begin, first, second] == ["running\n", "[1/4] a.cu, 30 s left\n", "[2/4] b.cpp, 10 min left\n"]
    assert linked == f"{link[:100]} ... (4013 characters)\n"
    assert rest == failed


def test_output_of_children_is_in_short(setup, tmp_path, capfd):
    command = f"echo '[1/1] nvcc -c {tmp_path}/a.cu -o a.o'; echo FAILED >&2"
    with setup.output_in_short():
        print("first")
        subprocess.run(["sh", "-c", command], stdout=1, stderr=subprocess.STDOUT, check=True)
    print("last")
    assert capfd.readouterr().out == "first\n[1/1] a.cu, 0 s left\nFAILED\nlast\n"


def test_wheel_contents(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        names = set(archive.namelist())
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        recorded = {line.split(",")[0] for line in archive.read(record).decode().splitlines()}
    assert wheel[0].name.endswith("-py3-none-any.whl")
    assert {name for name in names if ".dist-info/" not in name} == _modules() | {
        "flash_attn/py.typed",
        "flash_attn/_no_kernels.txt",
    }
    assert recorded == names


@pytest.mark.parametrize("step", ["build", "build_py"])
def test_wheel_keeps_what_was_built_in_the_same_run(source, tmp_path, step):
    command = [sys.executable, "setup.py", "--quiet", step, "bdist_wheel", "--dist-dir", tmp_path]
    env = _unset() | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run(command, cwd=source, env=env, check=True, capture_output=True)
    (made,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        assert _modules() <= set(archive.namelist())


def test_metadata(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        path = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(path))
        licence = archive.read(path.replace("METADATA", "licenses/LICENSE")).decode()
    assert metadata["Name"] == "flash-attn"
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"torch>=2.10", "einops"} <= set(metadata.get_all("Requires-Dist"))
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert licence == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("local", ["", "cu13"])
def test_version(setup, local):
    """One number, inside what transformers (from 2.3.3) and TransformerEngine (from 2.7.3 to 2.8.3) accept."""
    version = Version(setup.version({"FLASH_ATTN_LOCAL_VERSION": local}))
    assert Version("2.7.3") <= version < Version("2.8.4")
    assert (version.local or "") == local


KINDS = {"wheel": ("wheel", None), "editable": ("editable", None), "strict": ("editable", {"editable_mode": "strict"})}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def installed(request, source, tmp_path_factory):
    """A folder with the package installed in it, with a local version label."""
    kind, settings = request.param
    folder = tmp_path_factory.mktemp("installed")
    env = dict(FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE", FLASH_ATTN_LOCAL_VERSION="x")
    built, _ = _build(kind, source, folder, settings, **env)
    return _unpacked(built, folder / "site")


def test_other_packages_find_the_distribution(installed):
    """transformers asks which distribution the module belongs to, and which version that is."""
    names = {path.split("/")[0].removesuffix(".py") for path in _modules()}
    found = _ask(installed, f"[metadata.packages_distributions()[name] for name in {names}]")
    assert found == str([["flash-attn"]] * len(names))
    assert _ask(installed, "metadata.version('flash_attn')").endswith("+x")


def test_modules_are_found(installed):
    """Python finds the package, and the modules of compat/ at the top level."""
    files = [ROOT / "flash_attn/__init__.py", *sorted((ROOT / "compat").glob("*.py"))]
    names = ["flash_attn", *(path.stem for path in files[1:])]
    found = _ask(installed, f"[pathlib.Path(util.find_spec(name).origin).read_text() for name in {names}]")
    assert found == str([path.read_text() for path in files])


@pytest.fixture(scope="module", params=["wheel", "editable"])
def flash_attn_4(request, tmp_path_factory):
    """A folder with the distribution flash-attn-4, which has flash_attn/cute/ but no flash_attn/__init__.py."""
    folder = tmp_path_factory.mktemp("flash_attn_4")
    source = folder / "source"
    shutil.copytree(ROOT / "extras/flash-attn-4", source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    command = f"from setuptools import build_meta; print(build_meta.build_{request.param}({str(folder)!r}))"
    command = [sys.executable, "-c", command]
    made = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    return _unpacked(folder / made, folder / "site")


@pytest.mark.parametrize("place", ["same folder", "folder before", "folder behind"])
@pytest.mark.cover(2)
def test_beside_flash_attn_4(installed, flash_attn_4, tmp_path, place):
    """The folder flash_attn/ that flash-attn-4 installs does not hide the package, and both have their modules."""
    if place == "same folder":
        folders = [tmp_path]
        for each in (installed, flash_attn_4):
            shutil.copytree(each, tmp_path, dirs_exist_ok=True)
    else:
        folders = [flash_attn_4, installed] if place == "folder before" else [installed, flash_attn_4]
    code = f"""
import site, sys
from importlib import util
from unittest import mock
for folder in {[str(folder) for folder in folders]}:
    site.addsitedir(folder)
for name in ("batch_invariance", "flash_attn_interface"):  # which would import torch
    sys.modules["flash_attn." + name] = mock.MagicMock()
import flash_attn
print(flash_attn.__file__, util.find_spec("flash_attn.bert_padding").origin, util.find_spec("flash_attn.cute").origin)
"""
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True)
    package, module, cute = (pathlib.Path(path).read_text() for path in run.stdout.split())
    assert package == (ROOT / "flash_attn/__init__.py").read_text()
    assert module == (ROOT / "flash_attn/bert_padding.py").read_text()
    assert cute == (ROOT / "extras/flash-attn-4/flash_attn/cute/__init__.py").read_text()


def test_packages_on_the_path_come_before_an_editable_installation(source, tmp_path):
    """As with any package in site-packages: a folder that is being worked on, and PYTHONPATH, come first."""
    built, _ = _build("editable", source, tmp_path, FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE")
    site_packages, first = _unpacked(built, tmp_path / "site"), tmp_path / "first"
    (first / "flash_attn").mkdir(parents=True)
    (first / "flash_attn/__init__.py").touch()
    (first / "rotary_emb.py").touch()
    code = f"""
import site, sys
from importlib import util
site.addsitedir({str(site_packages)!r})
sys.path.insert(0, {str(first)!r})
print([util.find_spec(name).origin for name in ("flash_attn", "rotary_emb")])
"""
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == str([str(first / "flash_attn/__init__.py"), str(first / "rotary_emb.py")])


def test_record_of_an_editable_wheel(source, tmp_path):
    """Each file is recorded with its digest and size: uv and pip refuse others, or do not uninstall them."""
    built, _ = _build("editable", source, tmp_path, FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE")
    with zipfile.ZipFile(built) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    found = dict(line.split(",", 1) for line in files.pop(record).decode().splitlines())
    assert found.pop(record) == ","
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(text).digest()) for name, text in files.items()}
    assert found == {name: f"sha256={digests[name].decode().rstrip('=')},{len(files[name])}" for name in files}


def test_sdist_contents(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    csrc = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.*") if path.suffix != ".pyc"}
    assert {"pyproject.toml", "LICENSE", "flash_attn/py.typed"} <= names
    assert csrc <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith(("build/", "tests/"))]
    assert {name for name in names if name.endswith(".py")} - csrc == {"setup.py", "build_backend.py"} | _sources()


def test_sdist_makes_the_same_wheel(sdist, wheel, tmp_path):
    shutil.unpack_archive(sdist, tmp_path)
    tree = tmp_path / sdist.name.removesuffix(".tar.gz")
    again, _ = _build("wheel", tree, tmp_path, FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE")
    with zipfile.ZipFile(wheel[0]) as first, zipfile.ZipFile(again) as second:
        assert set(first.namelist()) == set(second.namelist())


def test_what_repeats_the_makefile_and_the_version():
    """Workflows and pages run targets that there are, with extras that there are; a release names one version."""
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    targets = set(re.findall(r"^([\w-]+):.*## ", makefile, re.MULTILINE))
    pages = [
        *(ROOT / ".github/workflows").glob("*.yml"),
        ROOT / ".ci/run",
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
    pages += [*(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"(?:^|`|run: |  )make ([a-z-]+)\b", page.read_text())}
    assert named and named <= targets
    extras = {name for each in re.findall(r"^EXTRAS_\w+ := (.+)$", makefile, re.MULTILINE) for name in each.split(",")}
    assert all(re.search(rf"^{name} = \[", project, re.MULTILINE) for name in extras)
    version = re.search(r'__version__ = "(.+)"', (ROOT / "flash_attn/__init__.py").read_text())[1]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
