"""The callbacks that log a number or two, or set something up."""

import logging
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from transformers import GPT2Config

from flash_attn.models.gpt import GPTLMHeadModel
from src.callbacks import gpu_affinity
from src.callbacks.causality_monitor import CausalityMonitor
from src.callbacks.flop_count import FlopCount
from src.callbacks.gpu_affinity import GpuAffinity
from src.callbacks.loss_scale_monitor import LossScaleMonitor
from src.callbacks.params_log import ParamsLog
from tests.callbacks.tiny import SEQLEN, VOCAB, WIDTH, Recorder, TinyModel, TinyTask, loader, trainer

GPT = dict(n_embd=8, n_head=2, n_layer=2, vocab_size=VOCAB, n_positions=16, bos_token_id=0, eos_token_id=0)


def test_loss_scale():
    recorder = Recorder()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    used = trainer([LossScaleMonitor()], recorder, plugins=MixedPrecision("16-mixed", "cpu", scaler), max_steps=8)
    used.fit(TinyTask(), loader())
    assert recorder.of("scaler/scale") == {1: 64.0, 3: 128.0, 5: 128.0, 7: 256.0}
    assert recorder.of("scaler/growth_tracker") == {1: 1, 3: 0, 5: 2, 7: 1}


def test_no_loss_scale():
    recorder = Recorder()
    trainer([LossScaleMonitor()], recorder, precision="bf16-mixed").fit(TinyTask(), loader())
    assert recorder.rows == []


@pytest.mark.parametrize("left_out", [None, "total", "trainable", "non_trainable"])
def test_numbers_of_parameters(left_out):
    recorder = Recorder()
    options = {f"{left_out}_params_log": False} if left_out else {}
    trainer([ParamsLog(**options)], recorder, max_steps=1).fit(TinyTask(), loader())
    trainable = VOCAB * WIDTH + 2 * WIDTH + VOCAB * WIDTH + VOCAB
    expected = {
        "total": ("model/params_total", trainable + 2),
        "trainable": ("model/params_trainable", trainable),
        "non_trainable": ("model/params_not_trainable", 2),
    }
    expected.pop(left_out, None)
    assert recorder.params == dict(expected.values())


@pytest.mark.parametrize("dtype", ["int64", "torch.int64", torch.int64])
@pytest.mark.parametrize("profilers", [["fvcore"], ["deepspeed"], ["fvcore", "deepspeed"], []])
def test_multiply_accumulates(profilers, dtype):
    recorder, task = Recorder(), TinyTask()
    callback = FlopCount(profilers, [SEQLEN], dtype, device="cpu")
    trainer([callback], recorder, max_steps=1).fit(task, loader())
    expected = {"GMACs": SEQLEN * WIDTH * VOCAB / 1e9} if profilers else {}
    if "fvcore" in profilers:
        expected["MActs"] = SEQLEN * VOCAB / 1e6
    assert recorder.params == expected
    assert task.model.training


def test_other_profilers_are_refused():
    with pytest.raises(NotImplementedError, match="profilers must be some of fvcore, deepspeed, found 'other'"):
        FlopCount(["other"])


MODELS = {
    "gpt": (lambda: GPTLMHeadModel(GPT2Config(**GPT)), 0),
    "rotary gpt": (lambda: GPTLMHeadModel(GPT2Config(**{**GPT, "n_positions": 0}, rotary_emb_fraction=1.0)), 0),
    "tiny": (TinyModel, 0),
    "layers": (lambda: torch.nn.GRU(5, 7, batch_first=True), 5),
}


class FirstOutput(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        output = self.model(x)
        return output[0] if isinstance(output, tuple) and not hasattr(output, "logits") else output


@pytest.mark.parametrize("make, input_dim", MODELS.values(), ids=MODELS)
def test_causal_models(make, input_dim):
    leaks = CausalityMonitor(6, input_dim).leaks(FirstOutput(make()))
    assert leaks.tolist() == [0.0] * 6


def test_a_model_that_looks_ahead():
    model = TinyModel(causal=False)
    leaks = CausalityMonitor(4).leaks(model)
    assert (leaks[:3] > 1e-6).all()
    assert leaks[3] == 0.0
    # By the definition, for each output alone: its gradient with respect to the inputs after it.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, WIDTH, generator=generator).requires_grad_()
    direction = torch.randn(VOCAB, generator=generator)
    y = model.head(model.norm(x + x.mean(dim=1, keepdim=True)))
    for i in range(3):
        (grad,) = torch.autograd.grad(y[0, i] @ direction, x, retain_graph=True)
        assert leaks[i].item() == pytest.approx(grad[0, i + 1 :].abs().mean().item(), rel=1e-4)


def test_causality_is_logged_at_the_end_of_an_epoch_and_leaves_no_trace():
    states = []
    for callbacks in ([], [CausalityMonitor(3)]):
        recorder, task = Recorder(), TinyTask(lambda: TinyModel(causal=False))
        task.model.add_module("dropout", torch.nn.Dropout())
        used = trainer(callbacks, recorder, max_epochs=2, max_steps=-1)
        used.fit(task, loader())
        states.append((torch.get_rng_state(), *task.parameters()))
    assert list(recorder.of("stats/causality_0")) == [8, 16]
    assert all(torch.equal(a, b) for a, b in zip(*states))
    assert task.model.dropout.training


def test_causality_needs_an_embedding_or_a_dimension():
    with pytest.raises(ValueError, match="CausalityMonitor needs input_dim"):
        CausalityMonitor().leaks(torch.nn.Linear(2, 2))


def fake_trainer(device):
    return SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device(device)), local_rank=1, num_devices=4, global_rank=5
    )


def test_affinity_of_each_gpu(monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(gpu_affinity, "set_affinity", lambda *args: calls.append(args) or {3, 4})
    with caplog.at_level(logging.INFO):
        GpuAffinity().setup(fake_trainer("cuda:1"), None, "fit")
        GpuAffinity().setup(fake_trainer("cpu"), None, "fit")
    assert calls == [(1, 4, "socket_unique_continuous")]
    assert "Rank 5 is bound to the CPU cores [3, 4]" in caplog.text


def test_failure_to_set_the_affinity_is_no_error(monkeypatch, caplog):
    def fails(*args):
        raise OSError("not permitted")

    monkeypatch.setattr(gpu_affinity, "set_affinity", fails)
    with caplog.at_level(logging.INFO):
        GpuAffinity().setup(fake_trainer("cuda:1"), None, "fit")
    assert "not permitted" in caplog.text
