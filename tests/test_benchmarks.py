"""The benchmarks themselves: their cases, and the rows and plots that come of them. Nothing is timed in earnest."""

import csv
import functools
import importlib
import json
import pathlib
import re
import sys
import time
import types

import pytest
import torch

from benchmarks import counts, equal_bits, figures, harness, kernels, plot, power, rerun, rows, tables, trees, units

FAMILIES = sorted(path.stem for path in pathlib.Path(harness.__file__).parent.glob("benchmark_*.py"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_case_has_a_name_of_its_own(family, device):
    names = [str(case) for case in importlib.import_module(f"benchmarks.{family}").cases(device)]
    assert names
    assert len(names) == len(set(names))


def a_case(device):
    def fails():
        raise NotImplementedError("of no use here")

    def fails_without_a_word():
        raise AssertionError

    providers = {"slow": lambda: sum(range(2000)), "broken": fails, "mute": fails_without_a_word}
    yield harness.Case("op", "case", "fp32", lambda: providers, bytes=8)


@pytest.mark.sm90
def test_units(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["units", "--csv", str(tmp_path / "units.csv")])
    units.main()
    with open(tmp_path / "units.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert {row["unit"] for row in found} >= {"box", "page box", "missing page", "product", "two blocks", "empty block"}
    assert all(float(row["value"]) > 0 for row in found) and "expected: 64" in capsys.readouterr().out


def test_units_need_a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["units"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a Hopper GPU"):
        units.main()


def test_continuous_batching(tmp_path, monkeypatch, capsys):
    """A provider that cannot run here is reported and left out; the exit status says so."""
    pytest.importorskip("transformers", minversion="5.17")  # whose cache has the pages that the benchmark asks for
    from benchmarks import benchmark_continuous_batching as benchmark

    path = tmp_path / "x.csv"
    monkeypatch.setattr(sys, "argv", ["", "--device=cpu", "--rounds=1", f"--csv={path}", "--providers", "sdpa"])
    benchmark.main()
    monkeypatch.setattr(sys, "argv", ["", "--device=cpu", f"--csv={path}", "--providers", "flash_attn"])
    says = r"failed:\nllama-tiny 6x3-9\+4 page 4: flash_attn: ImportError: .* not available on CPU"
    with pytest.raises(SystemExit, match=says):
        benchmark.main()
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["case"], row["provider"], row["ratio"]) == ("llama-tiny 6x3-9+4 page 4", "sdpa", "1")
    assert float(row["tokens_per_s"]) == pytest.approx(24 / float(row["s"]), rel=1e-3)
    assert "failed: flash_attn" in capsys.readouterr().err


@pytest.mark.parametrize("chosen", ["*", "op/case/*"])
def test_rows_and_plot_of_a_case(chosen, tmp_path, monkeypatch, capsys):
    """A provider that fails is reported and left out."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        sys, "argv", ["", chosen, "--device=cpu", "--seconds=0", f"--csv={tmp_path / 'x.csv'}", "--plot"]
    )
    harness.main("what", "family", a_case, baseline="slow")
    with (tmp_path / "x.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["op"], row["case"], row["provider"], row["ratio"], row["of"]) == ("op", "case", "slow", "1", "copy")
    assert float(row["ms"]) > 0
    assert (tmp_path / "x.png").stat().st_size > 0
    reported = capsys.readouterr().err
    assert "no broken: NotImplementedError: of no use here" in reported and "no mute: AssertionError" in reported


def test_a_provider_that_there_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["", "--device=cpu", "--seconds=0", f"--csv={tmp_path / 'x.csv'}", "--providers", "slow", "fast"]
    )
    harness.main("what", "family", a_case, baseline="slow")
    assert "op/case/fp32: no fast; there are: slow, broken, mute" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "arguments", "says"),
    [
        (lambda: harness.main("what", "family", a_case, "slow"), ["--device=meta"], "--device: must be a device that"),
        (plot.main, ["no/such.csv"], "csv: must be a file, found 'no/such.csv'"),
    ],
    ids=["a device", "a file"],
)
def test_what_is_not_there(run, arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    with pytest.raises(SystemExit):
        run()
    assert says in capsys.readouterr().err


def test_a_pattern_that_matches_nothing(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", "nothing", "--device=cpu"])
    with pytest.raises(SystemExit, match="no case matches 'nothing'; there are: op/case/fp32"):
        harness.main("what", "family", a_case, baseline="slow")


def test_the_last_row_of_the_device_with_most_counts(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("op,case,dtype,provider,ms,device\na,b,c,d,1,gpu\na,b,c,d,2,gpu\na,b,c,d,3,cpu\na,x,c,d,4,gpu\n")
    assert [(row.case, row.ms) for row in rows.read(path)] == [("b", 2), ("x", 4)]
    assert [(row.case, row.ms) for row in rows.read(path, "a/x/*")] == [("x", 4)]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void flash::fwd_kernel<flash::Config<(int)8, true> >(flash::Params)", "flash::fwd_kernel"),
        ("void at::native::(anonymous namespace)::norm_kernel<float>(int)", "at::native::norm_kernel"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, 3>(float)", "internal::gemvx::kernel"),
        ("nvjet_tst_128x8_64x12_4x1_v_bz_TNN", "nvjet_tst_128x8_64x12_4x1_v_bz_TNN"),
        ("Memset (Device)", "Memset"),
    ],
)
def test_short_names_of_kernels(name, short):
    assert kernels.short_name(name) == short


@pytest.mark.cuda
def test_kernels_of_a_call(device):
    x = torch.ones(2**20, device=device)
    (kernel,) = kernels.kernels_of(lambda: (x + 1) + 1, flush=lambda: None)
    assert kernel.count == 2 and kernel.us > 0


def test_memory_of_graphs(monkeypatch):
    """The pool of a graph counts for the function that captured it; other memory is no graph's."""
    segments = [{"segment_pool_id": (0, 0), "total_size": 7_000_000}]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)

    @functools.cache  # at the first call
    def capture(pool, size):
        segments.append({"segment_pool_id": pool, "total_size": size})

    providers = {
        "plain": lambda: None,
        "graph": lambda: capture((0, 1), 3_000_000),
        "other": lambda: capture((0, 2), 500_000),
    }
    (case,) = a_case("cpu")
    assert harness._warmed(case, providers)[1] == {"plain": 0, "graph": 3, "other": 0.5}


class Nvml:
    """NVIDIA's library, as ctypes would load it, and a board that takes 600 W. refuses: a function that fails."""

    def __init__(self, refuses=None):
        self.start = time.perf_counter()
        if refuses:
            setattr(self, refuses, lambda *_: 3)

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, device):
        device._obj.value = 7
        return uuid != b"GPU-1-2-3"

    def nvmlDeviceGetTotalEnergyConsumption(self, device, millijoules):
        millijoules._obj.value = int(6e5 * (time.perf_counter() - self.start))
        return device.value != 7

    def nvmlDeviceGetClockInfo(self, device, which, clock):
        clock._obj.value = 1980 if time.perf_counter() < self.start + 0.05 else 1500
        return (device.value, which) != (7, 1)


@pytest.fixture
def nvml(monkeypatch):
    """install(Nvml(..) or an error) puts it in the place of the driver's library."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: types.SimpleNamespace(uuid="1-2-3"))

    def install(library):
        def load(name):
            assert name == "libnvidia-ml.so.1"
            if isinstance(library, Exception):
                raise library
            return library

        monkeypatch.setattr(power.ctypes, "CDLL", load)

    return install


def test_power_of_a_function(nvml):
    """Energy is that of the calls that are counted; what the clock was before it settled does not count."""
    nvml(Nvml())  # which begins to settle
    found = power.power_of(lambda: time.sleep(0.002), seconds=0.4)
    assert found.mhz == 1500 and found.watts == pytest.approx(600, rel=0.01)
    assert found.ms >= 2 and found.mj == pytest.approx(found.watts * found.ms)


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (OSError("no such file"), "clock and energy are NVML's to read, .*: no such file"),
        (Nvml("nvmlInit_v2"), "NVML refuses nvmlInit_v2, with status 3"),
        (Nvml("nvmlDeviceGetTotalEnergyConsumption"), "refuses nvmlDeviceGetTotalEnergyConsumption, with status 3"),
    ],
    ids=["missing", "driver", "counter"],
)
def test_power_that_cannot_be_read(nvml, library, message):
    nvml(library)
    with pytest.raises(RuntimeError, match=message):
        power.power_of(lambda: None, seconds=0.01)


@pytest.mark.cuda
def test_power_of_a_gpu(device):
    x = torch.ones(2**26, device=device)
    found = power.power_of(lambda: x + 1, seconds=1.0)
    assert 100 < found.mhz < 5000 and 10 < found.watts < 3000 and found.ms > 0


@pytest.mark.parametrize("flag", ["kernels", "power"])
def test_what_needs_a_gpu(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--device=cpu", f"--{flag}"])
    with pytest.raises(SystemExit):
        harness.main("what", "family", a_case, baseline="slow")
    assert f"--{flag} needs a GPU" in capsys.readouterr().err


RESULTS = pathlib.Path(harness.__file__).parent / "results"


@pytest.mark.parametrize("folder", [RESULTS, RESULTS.parent / "ladders"], ids=lambda path: path.name)
def test_readme_lists_every_file(folder):
    listed = re.findall(r"`(\w+\.csv)`", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in folder.glob("*.csv"))


def test_host_time_is_what_the_table_of_slower_cases_compares():
    """For calls so small that the host takes longer than the GPU."""
    rows = {(row.op, row.case, row.provider): row for row in figures.read(RESULTS / "flash_attn_h100.csv")}
    expected = {
        case: rows[op, case, "torch"].host_us / row.host_us
        for (op, case, provider), row in rows.items()
        if (op, provider) == ("flash_attn_host", "flash_attn") and (op, case, "torch") in rows
    }
    found = {case: ratio for op, case, ratio in list(tables.TABLES["slower"]())[1:] if op == "`flash_attn_host`"}
    assert found == {case: f"{ratio:.2f}" for case, ratio in expected.items() if ratio < 0.98}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_tables_of_pages_are_those_of_the_rows(page):
    text = page.read_text()
    assert "<!-- rows: " in text
    assert text == tables.filled(text), "python -m benchmarks.plot makes them anew"


def test_every_row_has_one_measurement_and_a_style():
    """A file has rows of one device, each case and provider once, and a style of lines for each provider."""
    for path in RESULTS.glob("*.csv"):
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if "ms" in row and "op" in row]
        keys = [(row["op"], row["case"], row["dtype"], row.get("ranks"), row["provider"]) for row in rows]
        assert len(keys) == len(set(keys)), f"{path.name} has rows that newer ones replace"
        assert len({row["device"] for row in rows}) <= 1
        assert {row["provider"] for row in rows} <= figures.STYLES.keys()


def test_every_figure_has_a_plot_with_lines_in_all_panels():
    plots = {path.stem for path in (RESULTS.parents[1] / "docs/plots").glob("*.png")}
    assert plots == figures.FIGURES.keys() | figures.OTHERS.keys()
    for name, (_, make) in figures.FIGURES.items():
        _, panels, *_ = make()
        assert panels and all({"flash_attn", "portable", "gather"} & series.keys() for _, series in panels), name


def test_all_figures_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    name, (title, make) = next(iter(figures.FIGURES.items()))
    assert figures._draw(tmp_path / f"{name}.png", title, *make()).stat().st_size > 0
    title, make = figures.FIGURES["blocks"]
    assert figures._draw(tmp_path / "blocks.png", title, *make()).stat().st_size > 0


def test_equal_bits(tmp_path, monkeypatch, capsys):
    """Without training, and few tokens: at level 2 sampler and trainer agree, which the plot says."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(equal_bits, "TOKENS", 3)
    file = tmp_path / "rows.csv"
    small = ("--device=cpu", "--steps=1", "--dim=64", "--layers=1", f"--csv={file}")
    monkeypatch.setattr(sys, "argv", ["", *small])
    equal_bits.main()
    assert "level 2: at most 0 nats apart, 0 of 3 tokens differ" in capsys.readouterr().out
    assert equal_bits.draw(tmp_path / "plot.png", equal_bits.read(file)).stat().st_size > 0


def test_rows_of_equal_bits_are_equal_at_level_2_alone():
    rows = equal_bits.read(RESULTS / "equal_bits.csv")
    apart = {level: {row["sampler"] == row["trainer"] for row in rows if row["level"] == level} for level in (0, 2)}
    assert False in apart[0] and apart[2] == {True}


def test_rows_that_have_moved():
    def row(case, ms, ratio, provider="flash_attn"):
        return types.SimpleNamespace(op="op", case=case, dtype="bf16", provider=provider, ms=ms, ratio=ratio)

    before = [
        row("same", 1, 2),
        row("slower", 1, 2),
        row("clock", 1, 2),
        row("alone", 1, None),
        row("x", 1, 1, "torch"),
    ]
    after = [
        row("same", 1.1, 2.05),
        row("slower", 1.2, 1.5),
        row("clock", 2, 2),
        row("alone", 0.5, None),
        row("new", 1, 1),
    ]
    assert rerun.moved(before, after) == [
        "op/slower/bf16: -25% (1 ms, now 1.2 ms)",
        "op/alone/bf16: +100% (1 ms, now 0.5 ms)",
    ]


def test_lines_of_rows():
    """Beside a row stand clock and energy of the same provider; what was not measured is left out."""

    def row(case, provider="flash_attn", **columns):
        return types.SimpleNamespace(op="op", case=case, dtype="bf16", provider=provider, ms=1.25, **columns)

    rows = [
        row("a", tflops=640.4, gbps=None, ratio=1.149),
        row("a", "torch"),
        row("b", tflops=None, gbps=2900, ratio=None),
    ]
    powers = [row("a", "torch", mj=9e3, mhz=1), row("a", mj=1134, mhz=1440)]
    assert rerun.lines_of(rows, powers) == [
        "op/a/bf16: 1.25 ms, 640 TFLOP/s, 1.134 J, 1440 MHz, 1.15 of the baseline's speed",
        "op/b/bf16: 1.25 ms, 2900 GB/s",
    ]


def test_rerun_measures_every_family(tmp_path, monkeypatch, capsys):
    """Here with rows that are those of before, so that none has moved."""
    commands = []

    def run(command, **_):
        commands.append(command)
        path = pathlib.Path(command[command.index("--csv") + 1])
        path.parent.mkdir(exist_ok=True)
        path.write_text((RESULTS / path.name).read_text())

    monkeypatch.setattr(rerun, "FOLDER", tmp_path / "rerun")
    monkeypatch.setattr(rerun.subprocess, "run", run)
    monkeypatch.setattr(rerun.report, "default_device", lambda: "cuda")
    monkeypatch.setattr(sys, "argv", ["rerun"])
    assert rerun.main() == 0
    assert all(command[-2:] == ["--power", "0.5"] for command in commands)
    assert {path.stem for path in (tmp_path / "rerun").glob("*.csv")} == set(rerun.FAMILIES)
    assert "0 rows have moved by more than 5%" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["rerun", "nothing"])
    with pytest.raises(SystemExit):
        rerun.main()
    assert "FAMILY: must be of flash_attn, " in capsys.readouterr().err


OTHER_TREE = {
    "__init__.py": "",
    "harness.py": "def time_ms(functions, device, seconds): return {name: [1.0] for name in functions}",
    "benchmark_paths.py": "import sys\ncases = lambda device: sys.path",
    "benchmark_rotary.py": """
class Case(str):
    def providers(self):
        return {"flash_attn": None}

def cases(device):
    for shape in ("1x128x4x64x64", "64x1x32x128x128"):
        yield from (Case(f"rotary_fwd/{shape} {order}/bf16") for order in ("halves", "interleaved"))
""",
}


@pytest.fixture
def other_tree(tmp_path):
    """The path of a tree with some of the cases of this one, whose processes start at once: they need no PyTorch."""
    folder = tmp_path / "other"
    (folder / "benchmarks").mkdir(parents=True)
    for name, text in OTHER_TREE.items():
        (folder / "benchmarks" / name).write_text(text)
    return str(folder)


def test_modules_of_one_tree_are_not_those_of_another(other_tree):
    """A worker finds the benchmarks of its tree, and not the folder of this one, whose kernels.py hides a package."""
    with trees.Worker(pathlib.Path(other_tree), "paths", "cpu", 0).process as process:
        said, _ = process.communicate("\n")
    assert other_tree in json.loads(said) and str(pathlib.Path(trees.__file__).parent) not in json.loads(said)


def test_trees_take_turns(other_tree, tmp_path, monkeypatch, capsys):
    """Each of two trees is measured in a process of its own."""
    root, rows = str(RESULTS.parents[1]), tmp_path / "rows.csv"
    options = ["--device=cpu", "--rounds=2", "--seconds=0", f"--csv={rows}"]
    monkeypatch.setattr(sys, "argv", ["", root, other_tree, "rotary", "rotary_fwd/1x128x4x64x64 */bf16", *options])
    trees.main()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all(
        re.fullmatch(r"rotary_fwd/\S+ \w+/bf16: \S+ ms, \S+ \(\S+ to \S+\)", line) for line in said
    )
    with rows.open(newline="") as file:
        head, *measured = csv.reader(file)
    assert head == ["case", "round", root, other_tree] and [row[1] for row in measured] == ["0", "1"] * 2
    assert all(float(row[2]) > 0 and float(row[3]) == 1 for row in measured)

    monkeypatch.setattr(sys, "argv", ["", other_tree, "rotary", "nothing", *options])
    with pytest.raises(SystemExit, match="no case that all trees have matches 'nothing'"):
        trees.main()
    monkeypatch.setattr(sys, "argv", ["", root, str(tmp_path), "rotary", "*", *options])
    with pytest.raises(SystemExit):
        trees.main()
    assert "TREE: must have benchmarks/benchmark_rotary.py, found" in capsys.readouterr().err


PROFILER = """#!{python}
import pathlib, sys
args = sys.argv[1:]
if "-i" in args:
    assert pathlib.Path(args[args.index("-i") + 1]).is_file() and args[-3:] == ["--page", "source", "--csv"]
    print('"Kernel Name","void f(g)",')
    print('"Source","# Samples","Instructions Executed","Address Space",', end="")
    print('"stall_wait","stall_mio","stall_wait (Not Issued)",')
    for line in ["MOV R1, R2", "FADD R1, R2", "BAR.SYNC 0x1", "DEPBAR", "MOV R3, R4", "@P0 HGMMA R5", "EXIT"]:
        print(f'"{{line}}","{{0 if line == "EXIT" else 1 if "HGMMA" in line else 99}}","8","-","30","20","9",')
    sys.exit()
for option in (["--clock-control", "none"], ["--profile-from-start", "off"]):
    assert option[1] == args[args.index(option[0]) + 1]
assert args[-3:-1] == ["--worker", "rotary"]
if "--metrics" in args:
    print("==PROF== Connected")
    print('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"')
    assert args[args.index("--print-units") + 1] == "base"
    names = args[args.index("--metrics") + 1].split(",")
    for i, kernel in enumerate(["void a::b::main_kernel<c<(int)2>>(d)", "finish(e)"]):
        for name in names:
            print(f'"{{i}}","{{kernel}}","{{name}}","unit",' + ('"n/a"' if "dram" in name else f'"{{i + 1}},500,000"'))
elif args[args.index("-k") + 1] == "regex:main":
    assert args[args.index("-c") + 1] == "1"
    pathlib.Path(args[args.index("-o") + 1]).touch()
else:
    print("==WARNING== No kernels were profiled.")
"""


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """A profiler that prints what ncu does, for two kernels: nothing runs under it."""
    (tmp_path / "ncu").write_text(PROFILER.format(python=sys.executable))
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_counts_of_two_trees_and_stalls(fake_ncu, other_tree, tmp_path, monkeypatch, capsys):
    root, case = str(RESULTS.parents[1]), "rotary_fwd/64x1x32x128x128 halves/bf16"
    monkeypatch.setattr(sys, "argv", ["", root, other_tree, "rotary", case, "--stalls", "main"])
    counts.main()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        f"{case} {root} a::b::main_kernel: cycles 1.5 M, instructions 1.5 M, L2 0.0015 GB, DRAM nan"
    )
    assert said[1].startswith(f"{case} {root} finish: cycles 2.5 M")
    before, after, report = said[2:5]  # a part with 1 of 496 samples is left out
    assert re.fullmatch(r" 39.9%     2 from MOV R1, R2 +  x 8: wait 12.1%, mio 8.1%", before)
    assert re.fullmatch(r" 59.9%     3 from BAR.SYNC 0x1 +  x 8: wait 18.1%, mio 12.1%", after)
    assert report == f"report: {tmp_path}/stalls_0_rotary_fwd_64x1x32x128x128_halves_bf16.ncu-rep"
    assert (
        said[5:9] == [line.replace(root, other_tree) for line in said[:4]]
        and said[9] == report.replace("stalls_0", "stalls_1")
        and len(said) == 10
    )

    monkeypatch.setattr(sys, "argv", ["", other_tree, "rotary", case, "--stalls", "other"])
    with pytest.raises(SystemExit, match=r"no kernel of rotary_fwd.* matches 'other'(.|\n)*No kernels were profiled"):
        counts.main()


def test_counts_of_what_is_not_there(fake_ncu, other_tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", other_tree, "rotary", "nothing"])
    with pytest.raises(SystemExit, match="no case that all trees have matches 'nothing'"):
        counts.main()
    for args, expected in (
        ([str(tmp_path), "rotary", "*"], "TREE: must have benchmarks/benchmark_rotary.py, found"),
        ([other_tree, "rotari", "*"], "TREE: must have benchmarks/benchmark_rotari.py, found"),
    ):
        monkeypatch.setattr(sys, "argv", ["", *args])
        with pytest.raises(SystemExit):
            counts.main()
        assert expected in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["", other_tree, "rotary", "*"])
    with pytest.raises(SystemExit):
        counts.main()
    assert "ncu, of CUDA's Nsight Compute, is not on the PATH" in capsys.readouterr().err


def test_one_call_is_counted(monkeypatch):
    """The profiler starts after two calls that warm up, and stops once the GPU has done the third."""
    events = []
    case = harness.Case("op", "case", "bf16", lambda: {"flash_attn": lambda: events.append("call")})
    module = types.SimpleNamespace(cases=lambda device: [case])
    monkeypatch.setitem(sys.modules, "benchmarks.benchmark_stub", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    for where, name in ((torch.cuda, "synchronize"), (torch.cuda.profiler, "start"), (torch.cuda.profiler, "stop")):
        monkeypatch.setattr(where, name, functools.partial(events.append, name))
    counts.work("stub", str(case))
    assert events == ["call", "call", "synchronize", "start", "call", "synchronize", "stop"]
