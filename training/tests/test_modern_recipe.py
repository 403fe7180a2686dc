"""The recipe `modern`: what it selects, that it learns, and that a run of it can be interrupted."""

import itertools
import math

import numpy as np
import pytest
import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from processes import over_processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from src.datamodules.language_modeling_hf import LMDataModule
from src.optim.muon import Muon
from src.tasks.seq import SequenceLMModel, _scheduler
from src.train import train
from src.utils.checkpoint import load_checkpoint
from training.first_run import unigram_entropy
from training.tests.standins import composed, small

TEXTS = [f"line {i} of text {j}\n" * 3 for j in range(40) for i in range(3)]


@pytest.mark.parametrize(
    ("name", "steps", "batch"), [("owt/gpt2s-modern", 400_000, 512), ("local/gpt2s-modern", 1000, 64)]
)
def test_what_it_selects(name, steps, batch):
    config = composed(f"experiment={name}", "trainer.devices=1")
    model, training = config.model.config, config.train
    assert (model.n_embd, model.n_head, model.n_layer) == (768, 12, 12)
    assert model.sliding_window == [256, 256, 256, None] * 3 and not model.tie_word_embeddings
    assert {model.embd_pdrop, model.resid_pdrop, model.attn_pdrop} == {0.0}
    assert (training.optimizer._target_, training.optimizer_param_grouping.orthogonalize) == (
        "src.optim.muon.Muon",
        True,
    )
    schedule = OmegaConf.to_container(training.scheduler, resolve=True)
    assert schedule == {
        "_target_": "transformers.get_wsd_schedule",
        "decay_type": "linear",
        "num_warmup_steps": steps // 50,
        "num_decay_steps": 2 * steps // 5,
        "num_training_steps": steps,
    }
    assert (training.global_batch_size, config.trainer.precision) == (batch, "bf16")
    assert config.datamodule.separate_documents and training.loss_fn == "linear"


@pytest.mark.parametrize("name", ["owt/gpt2s-flash", "local/gpt2s", "pile/gpt3s-flash", "pile/gpt3s-flash-rotary-30B"])
def test_the_schedule_alone(name):
    """Whatever options an experiment gives for a scheduler of its own."""
    config = composed(f"experiment={name}", "scheduler=warmdown", "trainer.devices=1")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule, steps = _scheduler(config.train.scheduler, optimizer).lr_lambdas[0], config.trainer.max_steps
    shares = (0, 0.1, 0.6, 0.8, 1)
    assert [schedule(int(share * steps)) for share in shares] == pytest.approx([0, 1, 1, 0.5, 0])


def test_options_of_another_schedule_are_named(caplog):
    """And an option that no schedule has is an error."""
    task = SequenceLMModel(small("scheduler=warmdown"))
    assert task.configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas[0](2) == 1  # of 4 steps
    names = "lr_min, t_in_epochs, t_initial, warmup_lr_init, warmup_t"
    assert f"With transformers.get_wsd_schedule, train.scheduler.{names} have no effect" in caplog.text
    task = SequenceLMModel(small("scheduler=warmdown", "+train.scheduler.num_decay_step=3"))
    with pytest.raises(InstantiationException, match="num_decay_step"):
        task.configure_optimizers()


def run_of(folder, *overrides):
    """A small run of the recipe on the texts of a folder."""
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for i, each in enumerate(TEXTS):
        (text / f"{i}.txt").write_text(each)
    config = composed(
        "experiment=local/gpt2s-modern",
        f"datamodule.dataset_name={text}",
        f"datamodule.cache_dir={folder}/cache",
        "datamodule.max_length=32",
        "datamodule.batch_size=4",
        "+datamodule.loader_workers=0",
        "datamodule.num_workers=0",
        "datamodule.val_ratio=0.1",
        "train.global_batch_size=4",
        "model.config.n_embd=64",
        "model.config.n_head=2",
        "model.config.n_layer=2",
        "model.config.sliding_window=[8,null]",
        "trainer.accelerator=cpu",
        "train.optimizer.lr=2e-2",
        "trainer.max_steps=24",
        "callbacks=[default,ema]",
        "callbacks.ema.decay=0.5",
        "++callbacks.model_checkpoint.every_n_train_steps=6",
        f"callbacks.model_checkpoint.dirpath={folder}/checkpoints",
        "callbacks.gpu_affinity=null",
        "callbacks.rich_model_summary=null",
        "callbacks.progress_bar=null",
        "__steps_per_validation=6",
        "print_config=false",
        "test_after_training=false",
        "logger=none",
        "+optimized_metric=val/loss",
        *overrides,
    )
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    return train(OmegaConf.create(OmegaConf.to_container(config, resolve=True)))


def test_it_learns_and_goes_on_after_an_interruption(tmp_path, monkeypatch):
    """Weights, averages and the momentum of an interrupted run are those of one that was not."""
    monkeypatch.chdir(tmp_path)
    folders = [tmp_path / name for name in ("whole", "interrupted")]
    for folder in folders:
        folder.mkdir()
    loss = run_of(folders[0])
    assert loss < 0.9 * math.log(2) * unigram_entropy("".join(TEXTS).encode())  # it knows more than their frequencies
    signal = "{_target_: training.tests.engines.tiny.SendSignal, name: SIGTERM, place: train_batch_end, number: 9}"
    with pytest.raises(SystemExit):
        run_of(folders[1], f"+callbacks.signal={signal}")
    assert run_of(folders[1], "resume=true") == loss
    whole, interrupted = (load_checkpoint(folder / "checkpoints/last.ckpt") for folder in folders)
    assert all(torch.equal(interrupted[name], x) for name, x in whole.items())


def test_documents_in_batches(tmp_path):
    """They begin at end-of-text tokens and at the starts of rows, and what they predict is their own."""
    (tmp_path / "one.txt").write_text("abc" * 9)
    (tmp_path / "two.txt").write_text("de" * 9)
    options = dict(max_length=8, batch_size=2, val_ratio=0.5, loader_workers=0, num_workers=0)
    data = LMDataModule(
        {"train": str(tmp_path / "one.txt"), "validation": str(tmp_path / "two.txt")},
        "byte",
        separate_documents=True,
        **options,
    )
    data.prepare_data()
    data.setup()
    eos = data.tokenizer.eos_token_id
    x, _, cu_seqlens = next(iter(data.train_dataloader()))
    assert cu_seqlens.tolist() == [0, 8, 16] and cu_seqlens.dtype == torch.int32
    x, y, cu_seqlens = data.collate([(torch.tensor([1, eos, 2, 3]), torch.tensor([eos, 2, 3, 4]))] * 2)
    assert cu_seqlens.tolist() == [0, 1, 4, 5, 8] and x.shape == y.shape == (2, 4)


def test_the_loss_is_that_of_documents_alone():
    task = SequenceLMModel(small("train.loss_fn=linear", "+model.config.use_flash_attn=true"))
    task.eval()
    x, y = torch.randint(50, (2, 16)), torch.randint(50, (2, 16))
    ends = [0, 3, 16, 30, 32]
    loss, _, targets = task.step((x, y, torch.tensor(ends, dtype=torch.int32)))
    parts = [(x.view(1, -1)[:, a:b], y.view(1, -1)[:, a:b]) for a, b in itertools.pairwise(ends)]
    alone = sum(task.step(each)[0] * each[1].numel() for each in parts) / y.numel()
    torch.testing.assert_close(loss, alone)
    assert torch.equal(targets, y.flatten())


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ((), "GPTLMHeadModel"),
        (("model=gpt2-hf", "~model.config.pad_vocab_size_multiple"), "GPT2LMHeadModel"),
    ],
)
def test_models_that_do_not_keep_documents_apart(overrides, found, monkeypatch):
    monkeypatch.setattr("training.tests.standins.Data.separate_documents", True, raising=False)
    says = rf"datamodule\.separate_documents must be false for this model, found true: only .*, not {found}"
    with pytest.raises(ValueError, match=says):
        SequenceLMModel(small(*overrides))


def test_tokens_that_are_divided_are_refused(monkeypatch):
    task = SequenceLMModel(small("train.loss_fn=linear"))
    monkeypatch.setattr(task, "plan_of", lambda x: object())
    x = torch.ones(2, 16, dtype=torch.int64)
    with pytest.raises(ValueError, match="separate_documents must be false with context_parallel_size above 1"):
        task.step((x, x, torch.tensor([0, 32], dtype=torch.int32)))


def test_a_strategy_that_divides_tokens_is_refused_before_the_first_step():
    class Trainer:
        class strategy:
            tensor_parallel_size, context_parallel_size = 1, 2

    task = SequenceLMModel(small("train.loss_fn=linear", "+model.config.use_flash_attn=true"))
    task._trainer = Trainer
    task.setup("fit")
    task._datamodule.separate_documents = True
    with pytest.raises(ValueError, match="must be false with context_parallel_size above 1, found true"):
        task.setup("fit")


def test_a_tokenizer_without_an_end(tmp_path, monkeypatch):
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text("abc" * 90)
    data = LMDataModule(str(tmp_path), "byte", max_length=4, separate_documents=True, num_workers=0)
    data.prepare_data()
    monkeypatch.setattr("src.datamodules.tokenizer.ByteTokenizer.eos_token_id", None)
    with pytest.raises(ValueError, match="separate_documents must be False for a tokenizer without an end-of-text"):
        data.setup()


def test_tokens_without_ends(tmp_path):
    """Rows would silently be one document each; ready ids may have ends of their own."""
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text("abc" * 90)
    options = dict(max_length=4, separate_documents=True, add_eos=False, num_workers=0)
    says = r"add_eos must be True with separate_documents, .* found False and no token 256 in dataset_name"
    with pytest.raises(ValueError, match=says):
        LMDataModule(str(tmp_path), "byte", **options).setup()
    files = {name: tmp_path / f"{name}.npy" for name in ("train", "validation")}
    for file in files.values():
        np.save(file, np.array([1, 2, 256, 3, 4, 5], np.uint16))
    data = LMDataModule({name: str(file) for name, file in files.items()}, "byte", **options)
    data.setup()
    assert next(iter(data.val_dataloader()))[2].tolist() == [0, 2, 4]
    np.save(files["train"], np.arange(6, dtype=np.uint16))
    np.save(files["validation"], np.arange(6, dtype=np.uint16))
    with pytest.raises(ValueError, match="unless the data have end-of-text tokens, found True"):
        LMDataModule({k: str(v) for k, v in files.items()}, "byte", **(options | {"add_eos": True})).setup()


def test_matrices_that_are_divided_are_refused():
    class Trainer:
        class strategy:
            tensor_parallel_size = 2

    task = SequenceLMModel(small("optimizer=muon"))
    assert isinstance(task.configure_optimizers()["optimizer"], Muon)
    task._trainer = Trainer
    with pytest.raises(
        ValueError, match=r"optimizer=muon .* tensor_parallel_size above 1, found 2: give strategy=fsdp"
    ):
        task.configure_optimizers()


def step_of_parts(group):
    """FSDP divides rows, which need not come out even, and stacked matrices anywhere."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 7, bias=False), torch.nn.Linear(7, 5, bias=False), torch.nn.Linear(5, 1, bias=False)]
    model, twin = (
        torch.nn.Sequential(*layers),
        torch.nn.Sequential(*(torch.nn.Linear(*s, bias=False) for s in ((6, 7), (7, 5), (5, 1)))),
    )
    twin.load_state_dict(model.state_dict())
    model = fully_shard(model, mesh=init_device_mesh("cpu", (group.size(),)))
    x = torch.randn(8, 6)
    for each in (model, twin):
        first, *others = each.parameters()
        groups = [
            {"params": [first], "stacked": [3, 4], "orthogonalize": True},
            {"params": others, "orthogonalize": True},
        ]
        optimizer = Muon(groups, lr=0.1)
        for _ in range(2):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=0.02, atol=0.005)


def test_divided_matrices_take_the_steps_of_whole_ones():
    over_processes(2, step_of_parts)
