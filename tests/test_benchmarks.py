"""The benchmarks themselves: their cases, and the rows and plots that come of them. Nothing is timed in earnest."""

import csv
import importlib
import pathlib
import sys

import pytest
import torch

from benchmarks import harness, kernels, plot

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
    assert [(row.case, row.ms) for row in plot.read(path)] == [("b", 2), ("x", 4)]
    assert [(row.case, row.ms) for row in plot.read(path, "a/x/*")] == [("x", 4)]


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
