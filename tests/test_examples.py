"""The examples run; generation with the cache is the whole model; the demo measures what it says."""

import contextlib
import io
import math
import os
import pathlib
import runpy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from processes import over_processes

import flash_attn

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
pytest.importorskip("tqdm", reason="the examples need tqdm")


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def _run(name, *args):
    """What an example prints, in this process."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def _start(name, *args):
    """What an example prints that imports the package from here, installed or not. pytest shows its errors."""
    paths = [str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}  # small tensors, busy cores
    command = [sys.executable, EXAMPLES / name, *args]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout


def test_attention():
    assert _start("attention.py").count("relative difference") == 4


def test_blocks():
    printed = _run("blocks.py", "--steps", "51")
    first, later = (float(line.split()[2]) for line in printed.splitlines()[:2])
    assert first > 5 and later < 3 and printed.splitlines()[-1].startswith("'import ")


@pytest.mark.parametrize("name", ["sdpa.py", "packing.py"])
def test_the_same_in_two_ways(name):
    """The example raises an error if the difference is not one of rounding."""
    assert "difference" in _run(name)


def check_in_group(group, name):
    """As torchrun or torch.multiprocessing starts it, but for the processes and their group, which are there."""
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda backend, *args, **kwargs: called.append(backend))
        patch.setattr(dist, "destroy_process_group", lambda: called.append("left"))
        patch.setattr(torch.multiprocessing, "spawn", lambda run, args, nprocs: run(group.rank(), *args))
        for variable, value in (("LOCAL_WORLD_SIZE", group.size()), ("LOCAL_RANK", group.rank())):
            patch.setenv(variable, str(value))
        printed = _run(name)
    assert called == [dist.get_backend(group), "left"]
    assert group.rank() > 0 or "largest difference" in printed


@pytest.mark.parametrize("name", ["context_parallel.py", "sequence_parallel.py"])
def test_the_same_on_two_processes(name):
    """The example raises an error if the difference to one process is not one of rounding."""
    over_processes(2, check_in_group, name, backend="nccl" if torch.cuda.device_count() >= 2 else "gloo")


def test_paged():
    """The example compares each step with a cache in one piece."""
    assert "are free" in _run("paged.py")


@pytest.mark.parametrize(("num_pages", "budget"), [(60, 24), (14, 7)])
def test_requests_that_are_served_together_get_the_tokens_that_they_get_alone(num_pages, budget):
    """They arrive while others read or write; in the small pool, some give their pages back and start again.

    In fp32: in bf16, logits depend on who else is in a step by as much as decides about some tokens.
    """
    pytest.importorskip("matplotlib")
    import serving

    torch.manual_seed(0)
    model = serving.TinyLM(dim=64, layers=2, context=64)
    for weight in model.parameters():
        if weight.ndim == 2:  # some start at zero, which would hide an error
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    text = torch.randint(256, (1000,))
    prefix, requests = list(b"a common prefix"), serving.random_requests(text, 7, 12, rate=1.0, seed=0)
    for request in requests:
        request.prompt = request.prompt[:14]
    server = serving.Server(model, prefix, num_pages, page_size=4, budget=budget)
    for step in range(1000):
        if step % 2 == 0 and step // 2 < len(requests):
            server.submit(requests[step // 2])
        if not (server.running or server.waiting):
            break
        server.step()
        shared = {server.pages.pages(each.name)[:3] for each in server.running}
        assert shared <= {server.pages.pages("prefix")[:3]}
    assert [each.tokens for each in requests] == [serving.alone(model, prefix, each) for each in requests]
    assert server.counts["mixed steps"] > 3 and server.counts["largest batch"] > 1
    assert (server.counts["preempted"] > 0) == (num_pages == 14)
    assert server.pages.num_free == num_pages - 4  # those of the prefix
    with pytest.raises(ValueError, match=f"a request must have at most {num_pages - 1} pages, .* found one for 254"):
        server.submit(serving.Request(9, [0] * 1000, 1))


def test_serving(tmp_path):
    pytest.importorskip("matplotlib")
    model = ["--steps", "2", "--dim", "64", "--layers", "1", "--context", "32"]
    path = tmp_path / "new" / "serving.png"
    printed = _run(
        "serving.py", *model, "--requests", "4", "--rate", "50", "--length", "6", "--check", "--out", str(path)
    )
    assert "tokens per second" in printed and "of 4 requests have the tokens" in printed
    assert path.read_bytes().startswith(b"\x89PNG")
    one = ["--requests", "1", "--length", "1", "--budget", "1", "--float8"]
    printed = _run("serving.py", *model, *one, "--out", str(path))
    assert printed.startswith("1 requests, 1 tokens") and "first token after" in printed and "one every" not in printed


def test_float8_cache():
    printed = _run("float8_cache.py", "--steps", "2", "--dim", "64", "--layers", "1", "--context", "16")
    assert [line.count(",") >= 2 for line in printed.splitlines()] == [True] * 5
    assert printed.splitlines()[0] == "cache,perplexity,change" and printed.splitlines()[1].endswith("+0.000%")


def test_serving_beside_transformers(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    small = "--steps 2 --dim 64 --layers 1 --context 32 --requests 2 --length 3 --transformers --out".split()
    printed = _run("serving.py", *small, str(tmp_path / "serving.png"))
    assert "2 requests, 6 tokens" in printed and "PyTorch's attention: 6 tokens in" in printed
    if torch.cuda.is_available():
        assert "transformers, flash_attn: 6 tokens in" in printed and "of 2 requests have the tokens of" in printed
    else:
        assert "transformers, flash_attn: needs a GPU" in printed


def test_grpo(tmp_path):
    """Sampler and trainer agree exactly at level 2, before and after an update."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    path = tmp_path / "new" / "grpo.png"
    printed = _run("grpo.py", "--steps", "2", "--prompts", "3", "--group", "4", "--digits", "5", "--out", str(path))
    assert "first step, level 2: KL 0.0, importance ratios exactly 1" in printed and "mean reward" in printed
    assert path.read_bytes().startswith(b"\x89PNG")

    import grpo

    torch.manual_seed(0)
    model = grpo.make_model(dim=64, layers=2, device="cpu")
    prompts = grpo.draw_prompts(3, 20, torch.device("cpu"))
    with flash_attn.batch_invariant(2):
        answers, sampled = grpo.sample(model, prompts, 20)
        assert torch.equal(grpo.evaluate(model, prompts, answers), sampled)
        assert torch.equal(grpo.evaluate(model, prompts[1:2], answers[1:2]), sampled[1:2])
    assert grpo.reward(prompts, prompts[:, :-1].sort(1).values).tolist() == [1, 1, 1]
    assert grpo.advantages(torch.tensor([0.0, 1.0, 1.0, 1.0]), 2).tolist() == pytest.approx(
        [-0.7071, 0.7071, 0, 0], abs=1e-3
    )


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("steps", 0, "at least 1"),
        ("updates", 0, "at least 1"),
        ("prompts", -1, "at least 1"),
        ("group", 1, "at least 2"),  # one answer has no deviation from the mean
        ("digits", 0, "at least 1"),
        ("layers", 0, "at least 1"),
        ("dim", 40, "a positive multiple of 32"),
    ],
)
def test_options_of_grpo(option, value, expected, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit):
        _run("grpo.py", f"--{option}", str(value))
    assert f"--{option} must be {expected}, found {value}" in capsys.readouterr().err


ODD_OPTIONS = {  # of the server, and what the error says
    "--requests 0": "--requests: must be at least 1, found 0",
    "--requests few": "--requests: invalid int value: 'few'",
    "--budget 0": "--budget: must be at least 1, found 0",
    "--length 0": "--length: must be at least 1, found 0",
    "--length 9000": "a request must have at most 4096 tokens, as many as positions, found ",
    "--rate 0": "--rate: must be positive and finite, found 0.0",
    "--rate inf": "--rate: must be positive and finite, found inf",
    "--steps 0": "--steps: must be at least 1, found 0",
    "--page-size 0": "--page-size: must be at least 1, found 0",
    "--dim 100": "--dim: must be a multiple of 64, and at least 64, found 100",
    "--device meta": "--device: must be cuda or cpu, found meta" if torch.cuda.is_available() else "must be cpu, found",
    "--pages 5": "a request must have at most 4 pages, as many as the pool, found one for ",
}


@pytest.mark.parametrize("option", ODD_OPTIONS)
def test_serving_refuses_odd_options_before_it_trains(option, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="2"):
        _run("serving.py", *option.split())
    said = capsys.readouterr().err
    assert ODD_OPTIONS[option] in said and "training" not in said


@pytest.mark.filterwarnings("ignore:.*copy keyword:DeprecationWarning")  # matplotlib of tensors
def test_masks(tmp_path):
    pytest.importorskip("matplotlib")
    _run("masks.py", "--out", str(tmp_path / "masks.png"))
    assert (tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")


def test_bert():
    pytest.importorskip("transformers")
    printed = _run("bert.py")
    assert printed.count("relative difference") == 2 and "classes [0, 1, 1], labels [0, 1, 1]" in printed


def test_checkpoints():
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    printed = _run("checkpoints.py", "--steps", "40")
    assert "logits differ by at most" in printed and "transformers loads it back" in printed
    assert float(printed.split("% of the tokens")[0].split()[-1]) > 90


def test_tiny_lm():
    printed = _run(
        "tiny_lm.py", "--steps", "2", "--dim", "64", "--context", "16", "--length", "5", "--prompt", "import "
    )
    assert "validation after:" in printed and printed.rstrip("\n").count("import ") == 1


def test_generation_with_a_cache_is_the_whole_model(device):
    import tiny_lm

    model = tiny_lm.TinyLM(dim=128, layers=2, context=16).to(device)
    for weight in model.parameters():
        if weight.ndim == 2:  # some start at zero, which would hide an error
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    tokens = torch.randint(256, (2, 40), device=device)  # longer than the window
    with torch.no_grad(), tiny_lm.mixed_precision(device):
        caches, pieces = model.empty_caches(batch=2, capacity=40), []
        for filled, piece in ((0, tokens[:, :25]), *((i, tokens[:, i : i + 1]) for i in range(25, 40))):
            pieces.append(model(piece, caches, filled))
        whole = model(tokens)
    tolerance = 1e-4 if device.type == "cpu" else 5e-2  # fp32, bf16; logits are of size 1
    assert (torch.cat(pieces, dim=1).float() - whole.float()).abs().max() < tolerance


def test_training_learns(device):
    import tiny_lm

    model = tiny_lm.TinyLM(dim=64, layers=1, context=16).to(device)
    text = torch.frombuffer(bytearray(b"to be or not to be, " * 50), dtype=torch.uint8)
    losses = tiny_lm.train(model, text, steps=40, batch=8)
    assert losses[0] == pytest.approx(8) and losses[-1] < 2  # bits per byte


def test_contenders_agree(device):
    pytest.importorskip("matplotlib")
    import demo

    inputs = torch.randn(4, 1, 100, 2, 64, device=device)
    results = [demo.out_and_gradients(attention, *inputs) for attention in demo.CONTENDERS.values()]
    for result in results[1:]:
        for found, expected in zip(result, results[0]):
            assert (found - expected).abs().max() < 1e-4


def test_peak_memory_is_the_peak(device):
    pytest.importorskip("matplotlib")
    import demo

    def run():
        first = torch.ones(16 * 2**20, device=device)  # 64 MiB
        second = first + 1
        del first
        return second.sum()

    for _ in range(2):  # what one run frees must not hide what the next one takes
        assert 127 <= demo.peak_bytes(run, device.type) / 2**20 < 145


def test_plot(device, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import demo

    monkeypatch.setattr(demo, "PLOT", tmp_path / "new" / "demo.png")
    costs = demo.measure_costs(device.type, torch.float32, 1, [64, 128])
    assert {cost.contender for cost in costs} == set(demo.CONTENDERS)
    demo.plot(costs, [3.0, 2.0], 2.5, device.type)
    assert demo.PLOT.read_bytes().startswith(b"\x89PNG")


def test_exponent():
    pytest.importorskip("matplotlib")
    import demo

    assert demo.exponent([(n, 3 * n**1.5) for n in (64, 128, 512)]) == pytest.approx(1.5)
    assert demo.exponent([(64, 0), (128, 5), (256, 10), (512, float("nan"))]) == pytest.approx(1)
    assert math.isnan(demo.exponent([(64, float("nan")), (128, 5)]))
