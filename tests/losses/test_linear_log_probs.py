"""Log-probabilities, entropy and lse of a linear head: against float64, in Triton, divided over processes, and against
the functions of libraries for reinforcement learning."""

import importlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import assert_error_ratio, narrow_in_triton, unavoidable
from processes import over_processes

from flash_attn import batch_invariant
from flash_attn._ops import log_probs as ops
from flash_attn._reference import log_probs as reference
from flash_attn.losses.linear_cross_entropy import linear_cross_entropy
from flash_attn.losses.linear_log_probs import LogProbs, linear_log_probs

ROWS, FEATURES, VOCAB = 37, 16, 53
OF_ROWS = torch.linspace(0.3, 3, ROWS)  # temperatures
OPTIONS = [
    dict(),
    dict(temperature=0.5, num_classes=50),
    dict(temperature=OF_ROWS),
    dict(softcap=2.0, num_classes=50, temperature=2.0),
    dict(ignore_index=3),
]


def name_of(options):
    found = "-".join(f"{key}={'rows' if isinstance(value, torch.Tensor) else value}" for key, value in options.items())
    return found or "plain"


def inputs(dtype=torch.float32, device="cpu", options=()):
    tensors = [
        torch.randn(*shape, device=device).to(dtype) for shape in ((ROWS, FEATURES), (VOCAB, FEATURES), (VOCAB,))
    ]
    labels = torch.randint(4, 50, (ROWS,), device=device)
    labels[::5] = dict(options).get("ignore_index", -100)
    return tensors, labels


def plain(hidden, weight, labels, bias, *, temperature=1.0, num_classes=None, softcap=0.0, ignore_index=-100):
    """The same with all logits."""
    logits = F.linear(hidden, weight, bias)[..., :num_classes]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = softcap * torch.tanh(logits / softcap) if softcap > 0 else logits
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(logits)[..., None]
    all_of_them = (logits / temperature).log_softmax(-1)
    counts = labels != ignore_index
    own = all_of_them.gather(-1, labels.clamp(min=0)[..., None].long())[..., 0]
    entropy = -(all_of_them.exp() * all_of_them).sum(-1)
    return LogProbs(*(torch.where(counts, x, 0) for x in (own, entropy, (logits / temperature).logsumexp(-1))))


def with_gradients(function, tensors, labels, incoming=(1.0, -0.5, 0.25), **options):
    """The three results, and gradients of a loss that is made of those with an incoming factor."""
    hidden, weight, bias = tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    results = function(hidden, weight, labels, bias, **options)
    each = torch.linspace(1, 2, labels.numel(), device=labels.device).view(labels.shape)
    loss = sum((factor * each.to(x.dtype) * x).sum() for factor, x in zip(incoming, results) if factor)
    return [*(x.detach() for x in results), *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("chunk_size", [None, 1, 10])
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.cover(2)
def test_values_and_gradients(dtype, options, chunk_size, device):
    tensors, labels = inputs(dtype, device, options)
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    exact = with_gradients(plain, [tensor.double() for tensor in tensors], labels, **options)
    baseline = with_gradients(plain, tensors, labels, **options)
    found = with_gradients(linear_log_probs, tensors, labels, chunk_size=chunk_size, **options)
    for one, right, other in zip(found, exact, baseline, strict=True):
        assert_error_ratio(one, right, other, plus=unavoidable(right, one.dtype, terms=16 * ROWS))


@pytest.mark.parametrize("incoming", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_one_result_at_a_time(incoming, device):
    tensors, labels = inputs(device=device)
    found = with_gradients(linear_log_probs, tensors, labels, incoming)
    expected = with_gradients(plain, tensors, labels, incoming)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_is_the_cross_entropy(device):
    """Which has the same numbers with one product fewer, if the weights of the log-probabilities are given before."""
    tensors, labels = inputs(device=device)
    hidden, weight, bias = tensors = [tensor.requires_grad_() for tensor in tensors]
    advantages = torch.randn(ROWS, device=device)
    results = linear_log_probs(hidden, weight, labels, bias)
    losses = linear_cross_entropy(hidden, weight, labels, bias, reduction="none")
    torch.testing.assert_close(results.log_probs, -losses)
    loss = linear_cross_entropy(hidden, weight, labels, bias, reduction="sum", token_weights=advantages)
    found = torch.autograd.grad(loss, tensors)
    expected = torch.autograd.grad(-(results.log_probs * advantages).sum(), tensors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_functions_of_trl_and_verl(device):
    """Their log-probabilities and entropies of logits are those of hidden states here: values, and a policy's loss."""
    utils = pytest.importorskip("trl.trainer.utils")
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 9, FEATURES, device=device), torch.randn(VOCAB, FEATURES, device=device)
    tokens, advantages = torch.randint(VOCAB, (2, 9), device=device), torch.randn(2, 1, device=device)

    def of_trl(hidden, weight):
        logits = F.linear(hidden, weight) / 0.7
        return utils.selective_log_softmax(logits, tokens), utils.entropy_from_logits(logits)

    def of_verl(hidden, weight):  # logprobs_from_logits and entropy_from_logits of its torch_functional
        logits = F.linear(hidden, weight) / 0.7
        entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
        return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0], entropy

    def ours(hidden, weight):
        return linear_log_probs(hidden, weight, tokens, temperature=0.7)[:2]

    def loss_of(function):
        tensors = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        log_probs, entropy = function(*tensors)
        ratio = (log_probs - log_probs.detach() + 0.1 * torch.sin(log_probs.detach())).exp()
        loss = -(torch.minimum(ratio * advantages, ratio.clamp(0.95, 1.05) * advantages) + 0.01 * entropy).mean()
        return [log_probs.detach(), entropy.detach(), loss.detach(), *torch.autograd.grad(loss, tensors)]

    found = loss_of(ours)
    for theirs in (of_trl, of_verl):
        for one, other in zip(found, loss_of(theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["reference", "triton"])
@pytest.mark.parametrize(
    ("offset", "softcap"), [(0.0, 0.0), (0.0, 2.0), (0.0, 100.0), (30000.0, 0.0), (float("-inf"), 0.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops(dtype, offset, softcap, way, device):
    """Logits that are large and close to each other, some that are impossible, rows that do not count, ragged rows."""
    if way == "triton":
        pytest.importorskip("triton")
        kernels = importlib.import_module("flash_attn._triton.log_probs")
    else:
        kernels = reference
    narrow = narrow_in_triton if way == "triton" else torch.Tensor.to
    logits = narrow(torch.randn(4, 9001, device=device) * (10 if offset > 0 else 1) + max(offset, 0), dtype)
    if offset < 0:
        logits[:, ::3] = offset
    logits[2] = float("nan")  # does not count
    labels = torch.tensor([9000, 0, -1, 7], device=device)
    scale = torch.tensor([1.0, 0.5, 1.0, 2.0], device=device)
    kept = labels >= 0
    exact = logits[kept].double()
    tanh = torch.tanh(exact / softcap) if softcap else torch.zeros_like(exact)
    s = (softcap * tanh if softcap else exact) * scale[kept, None].double()
    log_p = s.log_softmax(-1)
    p, is_own = log_p.exp(), F.one_hot(labels[kept], 9001).bool()
    surprise = torch.where(p > 0, log_p, 0)
    entropy = -(p * surprise).sum(-1)
    own, lse, mean = kernels.fwd(logits, labels, scale, softcap, 0)
    for one, right in ((own - lse, log_p[is_own]), (lse - mean, entropy), (lse, s.logsumexp(-1))):
        torch.testing.assert_close(one[kept], right, rtol=1e-6, atol=1e-5)
    assert all(x[2] == 0 for x in (own, lse, mean))

    incoming = torch.randn(3, 4, device=device)
    a, b, c = incoming[:, kept, None].double()
    right = (a * is_own + p * (c - a - b * (surprise + entropy[:, None]))) * scale[kept, None] * (1 - tanh.square())
    kernels.bwd_(logits, labels, scale, lse, mean, *incoming, softcap, 0)
    assert (logits[2] == 0).all()
    torch.testing.assert_close(logits[kept].double(), right, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["reference", "triton"])
def test_no_possible_class_and_no_columns(way, device):
    if way == "triton":
        pytest.importorskip("triton")
    kernels = importlib.import_module("flash_attn._triton.log_probs") if way == "triton" else reference
    logits, labels = torch.full((1, 5), float("-inf"), device=device), torch.tensor([2], device=device)
    scale = torch.ones(1, device=device)
    own, lse, mean = kernels.fwd(logits, labels, scale, 0.0, 0)
    assert own.isneginf() and lse.isneginf() and mean.isfinite()
    own, lse, mean = kernels.fwd(logits[:, :0], labels, scale, 0.0, 0)
    assert own == 0 and lse.isneginf() and mean.isfinite()
    assert all(x.shape == (0,) for x in kernels.fwd(logits[:0], labels[:0], scale[:0], 0.0, 0))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("way", ["reference", "triton"])
def test_nan_is_not_lost(way, softcap, device):
    """Neither in one class, which is not that of the label, nor in all."""
    if way == "triton":
        pytest.importorskip("triton")
    kernels = importlib.import_module("flash_attn._triton.log_probs") if way == "triton" else reference
    logits, labels = torch.randn(2, 40, device=device), torch.tensor([1, 1], device=device)
    logits[0, 5], logits[1] = float("nan"), float("nan")
    own, lse, mean = kernels.fwd(logits, labels, torch.ones(2, device=device), softcap, 0)
    assert lse.isnan().all() and (lse - mean).isnan().all() and (own - lse).isnan().all()


@pytest.mark.parametrize("cuts", [(17,), (0, 5), (53,), (3, 52)])
def test_parts_of_the_vocabulary(cuts, device):
    """Joined, those of any parts are those of the whole, also where a part has no columns or no possible class."""
    logits, scale = torch.randn(ROWS, VOCAB, device=device) * 3, torch.rand(ROWS, device=device) + 0.5
    logits[:, 3:17] = float("-inf")
    labels = torch.randint(20, VOCAB, (ROWS,), device=device)
    labels[::4] = -1
    starts, ends = (0, *cuts), (*cuts, VOCAB)
    parts = [ops.fwd(logits[:, start:end], labels, scale, 0.0, start) for start, end in zip(starts, ends)]
    found = ops.joined(*(torch.stack(each) for each in zip(*parts)), labels)
    for one, other in zip(found, ops.fwd(logits, labels, scale, 0.0, 0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def check_parallel(group):
    torch.manual_seed(0)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    tensors = [torch.randn(*shape) for shape in ((40, FEATURES), (56, FEATURES), (56,))]
    labels = torch.randint(50, (40,))
    labels[::7] = -100
    hidden, weight, bias = tensors
    rows = slice(rank * 56 // world, (rank + 1) * 56 // world)
    for options in (dict(), dict(temperature=torch.linspace(0.5, 2, 40)), dict(softcap=2.0, temperature=0.5)):
        options |= dict(num_classes=50, chunk_size=12)
        expected = with_gradients(linear_log_probs, tensors, labels, **options)
        for sequence_parallel in (False, True):
            own = hidden.chunk(world)[rank] if sequence_parallel else hidden
            found = with_gradients(
                linear_log_probs,
                [own, weight[rows], bias[rows]],
                labels,
                process_group=group,
                sequence_parallel=sequence_parallel,
                **options,
            )
            dhidden = expected[3].chunk(world)[rank] if sequence_parallel else expected[3]
            right = [*expected[:3], dhidden, expected[4][rows], expected[5][rows]]
            for one, other in zip(found, right, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_divided_vocabulary(processes):
    over_processes(processes, check_parallel)


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_batch_invariance(chunk_size, device):
    """At level 2 the bits of a row do not depend on the other rows, or on chunks."""
    hidden, weight = torch.randn(9, 64, device=device), torch.randn(101, 64, device=device)
    labels = torch.randint(101, (9,), device=device)
    with batch_invariant(2):
        found = linear_log_probs(hidden, weight, labels, temperature=0.7, chunk_size=chunk_size)
        for i in (0, 5):
            alone = linear_log_probs(hidden[i : i + 1], weight, labels[i : i + 1], temperature=0.7)
            assert all(torch.equal(one[i : i + 1], other) for one, other in zip(found, alone))


def test_backward_twice_and_no_second_derivative(device):
    tensors, labels = inputs(device=device)
    hidden, weight, bias = tensors = [tensor.requires_grad_() for tensor in tensors]
    loss = linear_log_probs(hidden, weight, labels, bias).log_probs.sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors, create_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    with pytest.raises(RuntimeError, match="differentiate twice"):
        second[0].sum().backward()


def test_results_may_be_overwritten(device):
    tensors, labels = inputs(device=device)
    expected = with_gradients(linear_log_probs, tensors, labels, (2.0, 2.0, 2.0))[3:]

    def overwritten(*args):
        return [x.mul_(2) for x in linear_log_probs(*args)]

    found = with_gradients(overwritten, tensors, labels, (1.0, 1.0, 1.0))[3:]
    torch.testing.assert_close(found, expected)


def test_transforms_of_torch_func(device):
    (hidden, weight, bias), labels = inputs(device=device)

    def by(function):
        def loss(weight):
            log_probs, entropy, lse = function(hidden, weight, labels, bias, temperature=0.5)
            return log_probs.sum() + entropy.square().sum() + lse.sum()

        return torch.func.grad(loss)(weight), torch.func.jvp(loss, (weight,), (torch.ones_like(weight),))[1]

    for one, other in zip(by(linear_log_probs), by(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_without_gradient_autocast_and_shapes(device):
    tensors, labels = inputs(device=device)
    hidden, weight, bias = tensors
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        found = linear_log_probs(hidden[:36].view(4, 9, -1), weight, labels[:36].view(4, 9), bias)
    narrow = [tensor.bfloat16() for tensor in tensors]
    expected = linear_log_probs(*narrow[:2], labels, narrow[2])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32 and one.shape == (4, 9)
        torch.testing.assert_close(one.flatten(), other[:36])
    empty = linear_log_probs(hidden[:0].requires_grad_(), weight, labels[:0])
    assert all(x.shape == (0,) for x in empty)
    empty.log_probs.sum().backward()


def test_a_backward_under_autocast(device):
    """It computes the logits again as the forward did, outside of autocast."""
    tensors, labels = inputs(device=device)
    for chunk_size in (None, 10):
        found = []
        for enabled in (False, True):
            hidden, weight = (x.detach().requires_grad_() for x in tensors[:2])
            result = linear_log_probs(hidden, weight, labels, chunk_size=chunk_size)
            with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
                (result.log_probs + result.entropy).sum().backward()
            found.append((hidden.grad, weight.grad))
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_compiled(device):
    tensors, labels = inputs(device=device)
    compiled = torch.compile(linear_log_probs, fullgraph=True, backend="aot_eager")
    found = with_gradients(compiled, tensors, labels, chunk_size=16, temperature=0.5)
    for one, other in zip(found, with_gradients(linear_log_probs, tensors, labels, temperature=0.5), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (dict(temperature=0), ValueError, r"temperature must be above 0 and finite, found 0"),
        (dict(temperature=-1.0), ValueError, "temperature must be above 0 and finite, found -1.0"),
        (dict(temperature=torch.linspace(0, 1, ROWS)), ValueError, "temperature must be above 0 and finite, found 0.0"),
        (dict(temperature=torch.ones(5)), ValueError, r"temperature must have shape \(37,\), found \(5,\)"),
        (dict(temperature=torch.ones(ROWS).int()), TypeError, "temperature must have dtype torch.float32"),
        (dict(temperature=torch.ones(ROWS).requires_grad_()), ValueError, "temperature must not require grad"),
        (dict(temperature="0.7"), TypeError, "temperature must be a real number, found str"),
        (dict(labels=torch.full((ROWS,), VOCAB)), ValueError, "labels must be -100 or from 0 to 52, found 53"),
        (dict(labels=torch.full((ROWS,), -1)), ValueError, "labels must be -100 or from 0 to 52, found -1"),
        (dict(labels=torch.zeros(5, dtype=torch.int64)), ValueError, r"labels must have shape \(37,\), found \(5,\)"),
        (dict(weight=torch.randn(53, 8)), ValueError, r"weight must have shape \(\*, 16\), found \(53, 8\)"),
        (dict(chunk_bytes=211), ValueError, "chunk_bytes must be at least 212, the logits of a token, found 211"),
        (dict(softcap=-1.0), ValueError, "softcap must be at least 0, found -1.0"),
        (dict(num_classes=54), ValueError, "num_classes must be from 1 to 53, the rows of the weight, found 54"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_errors(change, error, says):
    (hidden, weight, bias), labels = inputs()
    with pytest.raises(error, match=says):
        linear_log_probs(**(dict(hidden=hidden, weight=weight, labels=labels, bias=bias) | change))
