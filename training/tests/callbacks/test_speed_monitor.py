"""Times and throughput, with a clock that the tests turn."""

import lightning as L
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from src.callbacks import speed_monitor
from src.callbacks.speed_monitor import SpeedMonitor
from src.utils.flops import train_flops_per_token
from tests.callbacks.tiny import SEQLEN, VOCAB, Recorder, TinyModel, TinyTask, loader, trainer

TOKENS = 2 * SEQLEN  # of a batch


class TimedTask(TinyTask):
    """Each training step takes 3 s, the batch of the next one 1 s to load, and each validation 100 s."""

    def __init__(self, clock, make_model):
        super().__init__(make_model)
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.now += 3
        return super().training_step(batch, batch_idx)

    def on_validation_start(self):
        self.clock.now += 100


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(speed_monitor, "time", clock)
    return clock


class Loads(torch.utils.data.IterableDataset):
    def __init__(self, clock, samples):
        self.clock, self.samples = clock, samples

    def __iter__(self):
        for sample in self.samples:
            self.clock.now += 0.5
            yield sample


def fit(clock, callback, make_model=TinyModel, **options):
    recorder = Recorder()
    data = torch.utils.data.DataLoader(Loads(clock, loader(64).dataset), 2)  # more than is used: it is read ahead
    task = TimedTask(clock, make_model)
    used = trainer([callback], recorder, **options)
    used.fit(task, data, loader() if options.get("limit_val_batches") else None)
    return recorder, used


def test_times_and_throughput(clock):
    recorder, used = fit(clock, SpeedMonitor(), max_steps=8)
    assert recorder.of("time/intra_step (ms)") == {1: 3000, 3: 3000, 5: 3000, 7: 3000}
    assert set(recorder.of("time/tokens_per_s").values()) == {TOKENS / 4}
    assert used.progress_bar_metrics["time/tokens_per_s"] == TOKENS / 4
    assert recorder.of("time/inter_step (ms)") == {1: 1000, 3: 1000, 5: 1000, 7: 1000}
    assert list(recorder.of("time/epoch (s)").values()) == [8 * 4]


def test_validation_is_no_training(clock):
    recorder, _ = fit(clock, SpeedMonitor(), max_steps=8, limit_val_batches=1, val_check_interval=3)
    assert len(recorder.of("time/tokens_per_s")) >= 2
    assert max(recorder.of("time/inter_step (ms)").values()) <= 1000
    assert min(recorder.of("time/tokens_per_s").values()) >= TOKENS / 4


def test_all_batches_of_an_accumulation_count(clock):
    recorder, _ = fit(clock, SpeedMonitor(), max_steps=4, accumulate_grad_batches=2)
    assert set(recorder.of("time/tokens_per_s").values()) == {TOKENS / 4}


class SaveAfter(L.Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def test_an_epoch_that_goes_on_is_timed_from_there(clock, tmp_path):
    first = trainer([SaveAfter(3, tmp_path / "third.ckpt")], max_steps=4)  # of the 8 steps of an epoch
    first.fit(TimedTask(clock, TinyModel), loader())
    clock.now, recorder = 1e6, Recorder()
    second = trainer([SpeedMonitor()], recorder)
    second.fit(TimedTask(clock, TinyModel), loader(), ckpt_path=tmp_path / "third.ckpt", weights_only=True)
    assert list(recorder.of("time/epoch (s)").values()) == [3 * (8 - 3)]


@pytest.mark.parametrize("name", ["intra_step_time", "inter_step_time", "epoch_time"])
def test_each_time_can_be_left_out(clock, name):
    recorder, _ = fit(clock, SpeedMonitor(**{name: False}))
    logged = {metric for _, row in recorder.rows for metric in row if metric.startswith("time/")}
    expected = {"intra_step_time": "time/intra_step (ms)", "inter_step_time": "time/inter_step (ms)"}
    expected["epoch_time"] = "time/epoch (s)"
    assert logged == {*expected.values(), "time/tokens_per_s"} - {expected[name]}


def test_verbose_prints_every_batch(clock, capsys):
    fit(clock, SpeedMonitor(verbose=True), max_steps=5)
    assert capsys.readouterr().out.count("time/intra_step (ms): 3000.00") == 5


def test_model_flops(clock):
    config = GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=VOCAB, n_positions=8, bos_token_id=0, eos_token_id=0)
    recorder, _ = fit(clock, SpeedMonitor(), lambda: GPT2LMHeadModel(config))
    expected = train_flops_per_token(GPT2LMHeadModel(config), SEQLEN) * TOKENS / 4 / 1e12
    assert list(recorder.of("time/model_tflops").values()) == pytest.approx([expected] * 4)
    assert not recorder.of("time/mfu")  # there is no peak of a CPU


def test_a_model_with_another_config_has_no_flops(clock):
    class Other(TinyModel):
        config = "of another kind"

    recorder, _ = fit(clock, SpeedMonitor(), Other)
    assert recorder.of("time/tokens_per_s")
    assert not recorder.of("time/model_tflops")


def test_batches_of_other_things_are_samples():
    assert speed_monitor._items([torch.zeros(4, 3, 8, 8), torch.zeros(4)]) == (4, None)
    assert speed_monitor._items({"input_ids": torch.zeros(4, 7, dtype=torch.int64)}) == (28, 7)
    assert speed_monitor._items("text") == (0, None)
