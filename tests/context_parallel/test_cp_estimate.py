"""The estimator: formulas against numbers computed by hand, and what it prints."""

import csv

import pytest

from flash_attn.context_parallel import __main__ as command
from flash_attn.context_parallel import _estimate as estimate

MODEL, MACHINE, OPTIONS = estimate.Model(), estimate.Machine(), estimate.Options()
ADVICE = {  # as docs/guides/long.md has it
    "--offload": "steps of 8,388,608 tokens: dp 8, cp 1, tp 1:",
    "--offload --memory 80": "steps of 8,388,608 tokens: dp 4, cp 2, tp 1,",
    "--offload --batch 1M": "steps of 1,048,576 tokens: dp 1, cp 8, tp 1,",
}
M = 2**20


def test_sizes_of_the_model():
    # 32 layers of 4096 x 128 x 80 and 3 x 4096 x 14336, and two matrices of the vocabulary
    assert MODEL.parameters == 32 * (41_943_040 + 176_160_768) + 2 * 525_336_576 == 8_029_995_008


def test_attention_of_a_layer():
    forward, backward = estimate.attention_flops(MODEL, M)
    assert forward == 2 * 32 * 128 * M**2 == pytest.approx(9.007e15, rel=1e-3) and backward == 2.5 * forward
    # 3 n of 4 n tokens, 8 heads of 128 numbers of keys and of values, 2 bytes each
    keys, both = estimate.gather_bytes(MODEL, 2**17, 4)
    assert keys == 3 * 2**15 * 2 * 8 * 128 * 2 == pytest.approx(403e6, rel=1e-2) and both == 3 * keys
    # queries, keys, values and out, of which a quarter stays
    assert estimate.ulysses_bytes(MODEL, 2**17, 4)[0] == 2**15 * 128 * 2 * (32 + 8 + 8 + 32) * 3 / 4
    assert estimate.ulysses_bytes(MODEL, 2**17, 4)[0] == pytest.approx(503e6, rel=1e-2)
    assert estimate.ulysses_bytes(MODEL, 2**17, 4)[1] == estimate.ulysses_bytes(MODEL, 2**17, 4)[0]
    # on 16 ranks each has a copy of a key head, whose gradients have 4 bytes
    forward, backward = estimate.ulysses_bytes(MODEL, 2**17, 16)
    assert forward == 2**13 * 128 * (2 * 2 * 32 + 2 * 2 * 16) * 15 / 16
    assert backward == 2**13 * 128 * (2 * 2 * 32 + 2 * 4 * 16) * 15 / 16


def test_what_is_exposed():
    assert estimate.exposed_of_gather(8.0, 100.0, 4) == 2.0
    assert estimate.exposed_of_gather(8.0, 4.0, 4) == 2.0 + 0.75 * 4.0
    assert estimate.exposed_of_gather(8.0, 100.0, 1) == 8.0
    assert estimate.link_of(MACHINE, 8) == ("NVLink", 360.0) and estimate.link_of(MACHINE, 16) == ("NIC", 43.0)


def test_efficiency():
    gather, ulysses = estimate.attention(MODEL, MACHINE, M, 4, OPTIONS)
    assert (gather.method, ulysses.method) == ("gather", "ulysses")
    assert gather.compute[0] == pytest.approx(9.007e15 / 4 / 741e12 * 1e3, rel=1e-3)
    assert min(gather.efficiency + ulysses.efficiency) > 0.99 and gather.bound == "compute"
    short = next(estimate.attention(MODEL, MACHINE, 2**13, 64, OPTIONS))
    assert short.efficiency[1] < 0.5 and short.bound in ("NIC", "launches")
    assert len(list(estimate.attention(MODEL, MACHINE, M, 64, OPTIONS))) == 1  # more ranks than heads
    assert next(estimate.attention(MODEL, MACHINE, M, 1, OPTIONS)).exposed == (0.0, 0.0)


def test_memory_of_a_million_tokens_on_four():
    items = estimate.memory(MODEL, M, 4, 1, 4, OPTIONS._replace(keep_attention=False))
    expected = {
        "parameters, gradients, optimizer": 32.1,  # 16 bytes of 8.03 B over 4
        "inputs of blocks, kept": 137.4,  # 32 layers of 262144 x 4096 x 2 bytes, and the residual
        "attention": 16.1,  # 12.9 of its own tokens, and a quarter of all heads' keys and values and of their sums
        "MLP": 2.8,  # 6 x 262144 x 14336 x 2 bytes in 16 chunks
        "loss": 4.2,  # 8192 x 128256 x 2 bytes, and the gradient of the head in float32
        "gathered layers, NCCL, workspace": 4.0,
    }
    assert items == pytest.approx(expected, abs=0.06)
    kept = estimate.memory(MODEL, M, 4, 1, 4, OPTIONS)["inputs of blocks, kept"]
    assert kept == pytest.approx(3 * 68.7, abs=0.1)
    assert estimate.memory(MODEL, M, 4, 1, 4, OPTIONS._replace(offload=True))["inputs of blocks, kept"] == 0


def test_a_step():
    step = estimate.step_seconds(MODEL, MACHINE, M, 4, 1, OPTIONS)
    attention = 32 * (9.007e15 / 741e12 + 2.5 * 9.007e15 / 551e12) / 4
    linear = 8 * 8.03e9 * M / 4 / 500e12
    assert step == pytest.approx(attention + linear, rel=2e-3) == pytest.approx(458, abs=1)
    again = estimate.step_seconds(MODEL, MACHINE, M, 4, 1, OPTIONS._replace(keep_attention=False))
    assert again - step == pytest.approx(32 * 9.007e15 / 741e12 / 4, rel=5e-3)  # and keys are fetched again


def test_tensor_parallelism_is_not_free():
    # 12 transfers of half of 262144 x 4096 x 2 bytes in each of 32 layers, at 360 GB/s
    assert (
        estimate.tensor_parallel_bytes(MODEL, M / 4, 2) == 12 * 2**18 * 4096 * 2 / 2 == pytest.approx(12.9e9, rel=1e-2)
    )
    one, two = (estimate.step_seconds(MODEL, MACHINE, M, 4, tp, OPTIONS) for tp in (1, 2))
    assert two - one / 2 == pytest.approx(32 * 12 * 2**30 / 360e9, rel=0.02)
    slow = estimate.step_seconds(MODEL, MACHINE._replace(per_node=1), M, 1, 2, OPTIONS)
    assert slow - estimate.step_seconds(MODEL, MACHINE, M, 1, 2, OPTIONS) == pytest.approx(
        32 * 12 * 2**32 * (1 / 43e9 - 1 / 360e9), rel=1e-3
    )


def test_what_fits():
    options = OPTIONS._replace(offload=True)
    longest = estimate.longest(MODEL, MACHINE, 4, 1, 4, options)
    sizes = [sum(estimate.memory(MODEL, longest + more, 4, 1, 4, options).values()) for more in (0, 1024)]
    assert sizes[0] <= MACHINE.memory < sizes[1] and longest > 2 * M
    found = estimate.layouts(MODEL, MACHINE, M, 4, M, options)
    assert found == sorted(found, reverse=True) and all(dp * cp * tp == 4 for _, dp, cp, tp in found)
    assert not estimate.layouts(MODEL, MACHINE._replace(memory=10), M, 4, M, options)


def test_rates_of_a_benchmark(tmp_path):
    path = tmp_path / "rows.csv"
    rows = [("links", "all-gather", "", "300"), ("links", "shift", "", "900"), ("attention", "one", "500", "")]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("op", "provider", "tflops", "gbps"), *rows])
    machine = estimate.measured(MACHINE, path)
    assert machine.nvlink == 300 and machine.fwd / machine.bwd == pytest.approx(741 / 551)
    assert 7 / (2 / machine.fwd + 5 / machine.bwd) == pytest.approx(500)


def test_what_is_printed(capsys):
    command.main(["--seqlen", "1M", "--gpus", "4", "--offload"])
    printed = capsys.readouterr().out
    for text in ("1,048,576 tokens, 8.03 B", "gather", "ulysses", "fits in 140", "458.", "estimate"):
        assert text in printed, text
    for arguments, text in ADVICE.items():
        command.main(["--seqlen", "1M", "--gpus", "8", *arguments.split()])
        assert text in capsys.readouterr().out
    command.main(["--seqlen", "64M", "--gpus", "2", "--tp", "2", "--no-keep-attention"])
    assert "No division of these GPUs fits" in capsys.readouterr().out
    for arguments in (["--seqlen", "x"], ["--tp", "3"]):
        with pytest.raises(SystemExit):
            command.main(arguments)
