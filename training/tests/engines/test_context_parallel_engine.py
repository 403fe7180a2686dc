"""Sequences divided over processes: the steps of one process, exact resume, and resume on another number of ranks."""

import copy
import functools

import lightning as L
import pytest
import torch
import torch.distributed as dist
from processes import ON_GPUS, over_processes, stop_all
from transformers import GPT2Config

from flash_attn.models.gpt import GPTLMHeadModel
from src import engines
from src.tasks.seq import SequenceLMModel
from training.tests.engines import tiny
from training.tests.engines.test_engines import Started
from training.tests.standins import composed, small

STEPS, BATCH = 6, 4


@pytest.fixture(scope="module", autouse=True)
def processes_of_their_own():
    """They make many groups."""
    yield
    stop_all()


class Losses(L.Callback):
    """The mean loss of each step, and the tokens that were counted."""

    def __init__(self):
        self.losses, self.tokens, self.method = [], None, None

    def on_train_batch_end(self, trainer, module, *args):
        self.losses.append(float(trainer.callback_metrics["train/loss_step"]))
        self.seed = torch.initial_seed()
        if trainer.strategy.context_parallel_size > 1:
            self.method = trainer.strategy.plan(tiny.SEQLEN).method

    def on_train_epoch_end(self, trainer, module):
        self.tokens = int(trainer.callback_metrics["train/num-tokens_epoch"])


@functools.cache
def config_of(batch_size):
    """The configuration of the small run, which takes as long to compose as its steps."""
    return small(
        "metrics=[num-tokens]",
        f"datamodule.batch_size={batch_size}",
        f"train.global_batch_size={BATCH}",
        "++eval.log_on_step=true",
        "+model.config.use_flash_attn=true",
        *(f"+model.config.{kind}_pdrop=0" for kind in ("resid", "embd", "attn")),
    )


def fit(folder, group=None, cp=1, max_steps=STEPS, save_at=None, ckpt_path=None, loss="linear", **options):
    """Train the small run; returns the task and what `Losses` has kept."""
    ranks = 1 if group is None else group.size()
    L.seed_everything(1)
    config = copy.deepcopy(config_of(BATCH * cp // ranks))
    config.train.loss_fn = loss
    config.trainer.strategy = "fsdp" if group is not None else None
    task, losses = SequenceLMModel(config), Losses()
    if group is None:
        strategy = engines.strategy("single", "cpu", 1)
    else:
        strategy = engines.FSDPStrategy(
            cluster_environment=Started(group), context_parallel_size=cp, reshard_after_forward=True, **options
        )
    data = tiny_data(BATCH * cp // ranks)
    trainer = tiny.trainer(
        folder,
        strategy,
        max_steps,
        ranks,
        accelerator="cuda" if group is not None and dist.get_backend(group) == "nccl" else "cpu",
        callbacks=[losses, *([tiny.SaveAt(save_at, folder)] if save_at else [])],
        val_check_interval=None,
        log_every_n_steps=1,
        max_epochs=1,
    )
    trainer.fit(task, datamodule=data, ckpt_path=ckpt_path)
    return task, losses


def weights(task):
    """Those of the model, without counts of metrics."""
    return {name: x for name, x in tiny.weights(task).items() if name.startswith("model.")}


class Pairs(tiny.Data):
    """Batches (x, y) of the small run's tokens."""

    def train_dataloader(self):
        self.dataset_train = [(tokens[:-1], tokens[1:]) for _, tokens in self.dataset_train]
        return super().train_dataloader()

    def val_dataloader(self):
        return torch.utils.data.DataLoader([(x, x) for x in torch.zeros(2, tiny.SEQLEN, dtype=torch.int64)], 2)


def tiny_data(batch_size):
    return Pairs(batch_size, samples=BATCH * STEPS)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of a run of one process, which has saved after 3 steps."""
    folder = tmp_path_factory.mktemp("one")
    task, losses = fit(folder, save_at=3)
    torch.save((weights(task), losses.losses), folder / "end.pt")
    return folder


def assert_as_one(task, folder, found):
    """The weights, and the losses of the steps that this run has done, are those of the run of one process."""
    expected, losses = torch.load(folder / "end.pt")
    torch.testing.assert_close(weights(task), expected, rtol=1e-3, atol=1e-4)
    assert found.losses == pytest.approx(losses[-len(found.losses) :], rel=1e-4)


RUNS = {  # by the methods of their plans
    "gather": dict(recompute="block", offload=True, mlp_chunks=3, context_parallel=dict(method="gather")),
    "ulysses": dict(loss="torch"),  # which is chosen for this model
}


def check_steps(group, folder, one, methods):
    for method in methods:
        task, found = fit(folder, group, cp=2, **RUNS[method])
        assert_as_one(task, one, found)
        assert found.tokens == STEPS * BATCH * tiny.SEQLEN and found.method == method
        seeds = [None] * group.size()
        dist.all_gather_object(seeds, found.seed, group=group)
        assert len({*seeds[:2]}) == 2 and seeds[0] == 1, "dropout of the tokens of two ranks would be the same"


def check_refused(group, folder):
    for wrong, match in [
        (dict(cp=3), "context_parallel_size must divide the number of processes over tensor_parallel_size"),
        (dict(dp_replicate=2), "dp_replicate must divide the number of processes that read different samples, 1"),
        (dict(recompute="all"), "recompute must be one of none, block, found 'all'"),
        (dict(offload=True), "offload must be false with recompute=none, found true"),
    ]:
        with pytest.raises(ValueError, match=match):
            fit(folder, group, **{"cp": 2} | wrong)


def check_resume(group, folder, one):
    """After 3 steps of one process, the rest on ranks of a sequence; and the same bits on as many ranks."""
    task, found = fit(folder, group, cp=2, ckpt_path=one / "step_3.ckpt")
    assert_as_one(task, one, found)
    divided, losses = fit(folder, group, cp=2, save_at=3)
    again, others = fit(folder, group, cp=2, ckpt_path=folder / "step_3.ckpt")
    assert all(map(torch.equal, weights(again).values(), weights(divided).values()))
    assert others.losses == losses.losses[3:]


@pytest.mark.parametrize(("world", "methods"), [(2, ["gather", "ulysses"]), (4, ["gather"])], ids=["two", "four"])
def test_steps_are_those_of_one_process(world, methods, one, tmp_path):
    """Four: two groups of two, each with its own samples."""
    over_processes(world, check_steps, tmp_path, one, methods)


def test_what_is_refused(tmp_path):
    over_processes(2, check_refused, tmp_path)


def check_copies_resume(group, folder, one):
    """The last steps of a run that one process has begun, in two copies; saved for one process in between."""
    task, found = fit(folder, group, cp=2, dp_replicate=2, save_at=4, ckpt_path=one / "step_3.ckpt")
    assert_as_one(task, one, found)


@pytest.mark.parametrize(("world", "check", "step"), [(2, check_resume, 3), (4, check_copies_resume, 4)])
def test_runs_go_on_with_another_number_of_ranks(world, check, step, one, tmp_path):
    over_processes(world, check, tmp_path, one)
    task, found = fit(tmp_path / "alone", ckpt_path=tmp_path / f"step_{step}.ckpt")
    assert_as_one(task, one, found)


@pytest.mark.parametrize("world", ON_GPUS)
def test_resumed_run_on_gpus_is_the_same(world, tmp_path):
    over_processes(world, check_bits, tmp_path, backend="nccl")


def check_bits(group, folder):
    """With four GPUs, in two copies."""
    options = dict(cp=2, dp_replicate=group.size() // 2)
    divided, losses = fit(folder, group, save_at=3, **options)
    again, others = fit(folder, group, ckpt_path=folder / "step_3.ckpt", **options)
    assert others.losses == pytest.approx(losses.losses[3:], rel=1e-5)
    torch.testing.assert_close(weights(again), weights(divided), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "size", "expected"),
    [
        (dict(n_head_kv=2), 1, dict(heads=4, heads_k=2, window_size=(-1, -1))),
        (dict(n_head_kv=2, sliding_window=[4, 6]), 2, dict(heads=2, heads_k=1, window_size=(5, -1))),
        (dict(sliding_window=[4, None]), 1, dict(heads=4, heads_k=4, window_size=(-1, -1))),
        (dict(n_head_kv=1), 2, {}),
        (dict(use_flash_attn=False), 1, dict(heads=4, heads_k=4, window_size=(-1, -1))),
    ],
)
def test_plans_are_told_the_sizes_of_attention(config, size, expected):
    sizes = dict(vocab_size=8, n_embd=16, n_head=4, n_layer=2, n_positions=8, use_flash_attn=True)
    strategy = engines.FSDPStrategy(context_parallel_size=2, tensor_parallel_size=size)
    strategy._lightning_module = GPTLMHeadModel(GPT2Config(**sizes | config))
    assert strategy._sizes_of_attention() == expected


def test_models_that_cannot_divide_sequences(tmp_path):
    over_processes(2, check_other_models, tmp_path)


def check_other_models(group, folder):
    for options in (dict(context_parallel_size=2), dict(recompute="block"), dict(mlp_chunks=2)):
        (name,) = options
        strategy = engines.FSDPStrategy(cluster_environment=Started(group), **options)
        with pytest.raises(ValueError, match=rf"trainer.strategy.{name} must be (1|none) for this model"):
            tiny.trainer(folder, strategy, 1, 2).fit(tiny.Task(), datamodule=tiny.Data(2))


def test_configuration():
    config = composed("experiment=tiny/text", "strategy=long", "trainer.devices=4", "trainer.accelerator=cpu")
    assert config.trainer.strategy.context_parallel_size == 4 and config.trainer.accumulate_grad_batches == 1
