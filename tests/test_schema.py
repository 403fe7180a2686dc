"""The options of attention on their way from a NamedTuple through the schema to the struct in C++."""

import pathlib
import re
import sys
from typing import NamedTuple

import native
import pytest
import torch

from flash_attn._ops import schema
from flash_attn._reference.attention.options import CacheOptions, Options

in_a_source_tree = pytest.mark.skipif(not native.CSRC.exists(), reason="this is not a source tree")


class Probe(NamedTuple):
    """Options of the ops in boxed_probe.cpp."""

    scale: float
    left: int
    slopes: torch.Tensor | None = None
    bound: int | None = None
    flag: bool = True


def test_schema_of_a_named_tuple():
    expected = "float scale, int left, Tensor? slopes=None, SymInt? bound=None, bool flag=True"
    assert schema.arguments(Probe) == expected


CPP_TYPES = {
    float: "double",
    int: "int64_t",
    bool: "bool",
    int | None: "std::optional<int64_t>",
    torch.Tensor | None: "OptionalTensor",
}


@in_a_source_tree
@pytest.mark.parametrize("options", [Options, CacheOptions])
def test_the_struct_in_cpp_has_the_same_members(options):
    source = (native.CSRC / "binding/flash_attn/options.h").read_text()
    body = re.search(rf"struct {options.__name__} {{\n(.*?)}};", source, re.DOTALL).group(1)
    members = re.findall(r"  (\S+) (\w+);\n", body)
    assert members == [(CPP_TYPES[kind], name) for name, kind in options.__annotations__.items()], body


@in_a_source_tree
@pytest.mark.parametrize("options", [Options, CacheOptions])
def test_the_members_in_cpp_are_parsed_in_their_order(options):
    source = (native.CSRC / "binding/flash_attn/options.h").read_text()
    body = re.search(rf"void parse\(Arguments& from, {options.__name__}& options\) {{\n(.*?)\n}}", source, re.DOTALL)
    assert body.group(1).splitlines() == [f"  from.read(options.{name});" for name in options._fields]


@pytest.fixture(scope="module")
def probe():
    library = torch.library.Library("boxed_probe", "FRAGMENT")
    library.define(f"describe(Tensor x, Tensor? y, {schema.arguments(Probe)}) -> (Tensor, Tensor)")
    library.define("describe_few(Tensor x, Tensor? y, float scale, int left) -> (Tensor, Tensor)")
    library.define(f"count(Tensor x, {schema.arguments(Probe)}) -> Tensor")
    library.define("too_few(Tensor x, float scale, int left) -> Tensor")
    library.define(f"too_many(Tensor x, {schema.arguments(Probe)}, int more=0) -> Tensor")
    torch_folder = pathlib.Path(torch.__file__).parent
    compiler = (
        *native.HOST,
        f"-isystem{torch_folder / 'include'}",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        f"-L{torch_folder / 'lib'}",
        "-Wl,--exclude-libs,ALL",  # a C++ library that is linked into it must not be mixed with torch's
        "-Wl,--no-as-needed",
        "-ltorch_cpu",
    )
    native.library(pathlib.Path(__file__).parent / "boxed_probe.cpp", compiler)
    yield torch.ops.boxed_probe
    library._destroy()


@in_a_source_tree
@pytest.mark.skipif(sys.platform != "linux", reason="the compiler is called as on Linux")
@pytest.mark.parametrize(
    ("y", "options", "expected"),
    [
        (None, (0.5, -3), [0.5, -3, -1, -1, 1, 0]),
        (torch.ones(1), (0.25, 2**40, torch.ones(7)), [0.25, 2**40, 7, -1, 1, 1]),
        (None, Probe(2.0, 1, None, 9, False), [2, 1, -1, 9, 0, 0]),
    ],
)
def test_options_reach_a_boxed_kernel(y, options, expected, probe):
    x = torch.ones(3)
    same, found = probe.describe(x, y, *options)
    assert same.data_ptr() == x.data_ptr()
    assert found.tolist() == expected


@in_a_source_tree
def test_a_schema_that_may_end_early(probe):
    """The kernel gets None, 0 or false for arguments that the schema lacks, even where Options has another default."""
    _, found = probe.describe_few(torch.ones(3), None, 0.5, -3)
    assert found.tolist() == [0.5, -3, -1, -1, 0, 0]


@pytest.mark.parametrize("options", [Options, CacheOptions])
def test_what_plain_ops_lack_is_none_or_zero(options):
    given = {name: default for name, default in options._field_defaults.items() if default}
    assert given.keys() <= {"rotary_interleaved"}  # which counts only where there are tables


@in_a_source_tree
def test_one_result(probe):
    assert probe.count(torch.ones(1), 1.0, 5).shape == (5,)


@in_a_source_tree
@pytest.mark.parametrize(("name", "says"), [("too_few", "fewer arguments"), ("too_many", "more arguments")])
def test_a_schema_of_another_length_is_refused(name, says, probe):
    with pytest.raises(RuntimeError, match=says):
        getattr(probe, name)(torch.ones(1), 1.0, 5)


@in_a_source_tree
def test_arguments_are_released(probe):
    slopes = torch.ones(7)
    before = sys.getrefcount(slopes), slopes._use_count()
    for _ in range(3):
        probe.describe(torch.ones(1), slopes, 1.0, 2, slopes)
    assert (sys.getrefcount(slopes), slopes._use_count()) == before
