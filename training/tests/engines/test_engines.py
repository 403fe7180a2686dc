"""Engines on several processes: the same steps as one process, and exact resume."""

import functools
import math
import pathlib
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_only
from processes import ON_GPUS, over_processes, stop_all
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config

from flash_attn.models.gpt import GPTLMHeadModel, combine_state_dicts_tp
from src import engines
from src.callbacks.ema import EMACallback
from src.callbacks.speed_monitor import SpeedMonitor
from src.engines import strategies
from src.optim.param_grouping import group_parameters_for_optimizer
from src.tasks.seq import SequenceLMModel
from src.utils.checkpoint import CheckpointError, load_checkpoint
from src.utils.flops import train_flops_per_token
from training.tests.engines import tiny
from training.tests.standins import small

STEPS, GLOBAL_BATCH = 7, 8


@pytest.fixture(scope="module", autouse=True)
def processes_of_their_own():
    """They make hundreds of groups."""
    yield
    stop_all()


class Started(ClusterEnvironment):
    """Processes that the test has started, and their group."""

    creates_processes_externally = True
    main_address, main_port = "", 0

    def __init__(self, group):
        self.group = group

    @staticmethod
    def detect():
        return False

    def world_size(self):
        return self.group.size()

    def global_rank(self):
        return self.group.rank()

    local_rank = global_rank

    def node_rank(self):
        return 0

    def set_world_size(self, size):
        pass

    def set_global_rank(self, rank):
        pass

    def validate_settings(self, num_devices, num_nodes):
        pass


def strategy(name, group, **options):
    if name == "single":
        return engines.strategy(name, "cpu", 1)
    if group is not None:
        options["cluster_environment"] = Started(group)
    return engines.STRATEGIES[name](**options)


def fit(folder, name, group=None, max_steps=STEPS, dropout=0.0, save_at=None, seed=1, model="tiny", tp=1, **options):
    """Train to max_steps; returns the task."""
    L.seed_everything(seed)
    world = 1 if group is None else group.size()
    parallel = {"tensor_parallel_size": tp} if tp > 1 else {}
    if name == "fsdp":
        parallel["reshard_after_forward"] = True  # ddp_zero2 is the other case
    if "ddp_comm_hook" in options:
        parallel["ddp_comm_hook"] = options.pop("ddp_comm_hook")
    with torch.device("meta") if name in DIVIDE and group.rank() > 0 else nullcontext():
        network = MODELS[model](dropout=dropout)
    task = tiny.Task(network, _zero if name == "ddp_zero1" else tiny.adamw)
    trainer_options = {"callbacks": [tiny.SaveAt(save_at, folder)] if save_at else []} | options
    trainer_options["accelerator"] = _device(group)
    ckpt_path = trainer_options.pop("ckpt_path", None)
    trainer = tiny.trainer(folder, strategy(name, group, **parallel), max_steps, world, **trainer_options)
    trainer.fit(task, datamodule=tiny.Data(batch_size=GLOBAL_BATCH * tp // world), ckpt_path=ckpt_path)
    return task


def _device(group):
    return "cuda" if group is not None and dist.get_backend(group) == "nccl" else "cpu"


def _zero(groups, **options):
    return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, eps=tiny.ADAM_EPS, **options)


LAYERS = 2 if torch.cuda.is_available() else 1  # a CPU takes seconds for each


def gpt(dropout=0.0, layers=LAYERS):
    """A small decoder that 4 processes can share. Its keys have no bias: the gradient would be but rounding."""
    config = GPT2Config(
        n_embd=32,
        n_layer=layers,
        n_head=4,
        n_positions=tiny.SEQLEN,
        vocab_size=tiny.VOCAB,
        activation_function="swiglu",
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=0.0,
        lm_head_bias=True,
        qkv_proj_bias=False,
    )
    return GPTLMHeadModel(config)


MODELS = {"tiny": tiny.Model, "gpt": gpt}
DIVIDE = ("fsdp", "ddp_zero2", "tp")
ENGINES = {  # how: (name of the strategy, tensor_parallel_size, model)
    "ddp": ("ddp", 1, "tiny"),
    "zero1": ("ddp_zero1", 1, "tiny"),
    "zero2": ("ddp_zero2", 1, "tiny"),
    "fsdp": ("fsdp", 1, "tiny"),
    "tp": ("tp", 2, "gpt"),
    "fsdp_tp": ("fsdp", 2, "gpt"),
}


def fit_engine(how, folder, group, **options):
    name, tp, model = ENGINES[how]
    return fit(folder, name, group, tp=tp, model=model, **options)


def whole_weights(task, group, tp):
    """The weights of the whole model, from the parts of all processes."""
    weights = tiny.weights(task)
    if tp == 1:
        return weights
    parts = [None] * group.size()
    dist.all_gather_object(parts, {k.removeprefix("model."): x for k, x in weights.items()})
    whole = combine_state_dicts_tp(parts[:tp], task.model.config)
    return {f"model.{name}": x for name, x in whole.items()}


def mean_losses(losses, group):
    losses = torch.tensor(losses, device=_device(group))
    dist.all_reduce(losses)
    return losses.cpu() / group.size()


def looser(group):
    """How much more parameters may differ: a GPU adds in another order, which Adam turns into larger differences."""
    return 1 if _device(group) == "cpu" else 20


def check_steps(group, how, folder):
    """Compare with what one process has written to the folder."""
    task, by = fit_engine(how, folder, group), looser(group)
    expected = torch.load(pathlib.Path(folder, f"{ENGINES[how][2]}.pt"))
    weights = whole_weights(task, group, ENGINES[how][1])
    losses = torch.tensor(expected["losses"])
    torch.testing.assert_close(mean_losses(task.losses, group), losses, rtol=1e-5 * by, atol=1e-6 * by)
    weights = {name: x.cpu() for name, x in weights.items()}
    torch.testing.assert_close(weights, expected["weights"], rtol=2e-5 * by, atol=5e-6 * by)


def averaged(folder, name, group=None):
    """Losses, weights and averages of a run that validates with averages, now and then and before its first step."""
    callback = EMACallback(0.5, use_num_updates=False)
    task = fit(folder, name, group, callbacks=[callback])
    task.trainer.test(task, tiny.Data(batch_size=4).val_dataloader(), verbose=False)
    losses = torch.tensor(task.losses) if group is None else mean_losses(task.losses, group)
    weights = {name: x.cpu() for name, x in tiny.weights(task).items()}
    return losses, weights, [tiny.whole(x).cpu() for x in callback.ema.shadow_params]


def check_averages(group, name, folder):
    expected, by = torch.load(folder / "averaged.pt"), looser(group)
    torch.testing.assert_close(averaged(folder, name, group), expected, rtol=2e-5 * by, atol=5e-6 * by)


@pytest.mark.parametrize("name", ["fsdp", "ddp_zero2"])
def test_averages_of_divided_parameters_are_those_of_one_process(name, tmp_path):
    torch.save(averaged(tmp_path, "single"), tmp_path / "averaged.pt")
    over_processes(2, check_averages, name, tmp_path)


@pytest.mark.parametrize("world", ON_GPUS)
@pytest.mark.parametrize("name", ["fsdp", "ddp_zero2"])
def test_averages_of_parameters_divided_over_gpus_are_those_of_one_process(name, world, tmp_path):
    torch.save(averaged(tmp_path, "single"), tmp_path / "averaged.pt")
    over_processes(world, check_averages, name, tmp_path, backend="nccl")


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """A folder with the weights and losses of runs on one process, and the samples of each step."""
    folder = tmp_path_factory.mktemp("serial")
    for name in ("tiny", "gpt"):
        task = fit(folder, "single", model=name)
        results = {"weights": tiny.weights(task), "losses": task.losses, "seen": task.seen}
        torch.save(results, folder / f"{name}.pt")
    return folder


class Rotary(tiny.Model):
    """Has a buffer that is not in checkpoints, and which the first process alone computes."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout=dropout)
        self.register_buffer("scale", torch.rand(3), persistent=False)


MODELS["buffers"] = Rotary
MODELS["deep"] = functools.partial(tiny.Model, width=32, layers=8)
MODELS["deeper gpt"] = functools.partial(gpt, layers=2)


def check_first_weights(group, folder):
    """Those of one process, bit for bit, though only the first process has made the model."""
    expected = torch.load(folder / "first.pt")
    for name in ("fsdp", "ddp_zero2"):
        task = fit(folder, name, group, max_steps=0, model="buffers")
        torch.testing.assert_close(tiny.weights(task) | dict(task.named_buffers()), expected["tiny"], rtol=0, atol=0)
        assert not task.model.layers[1].fc1.weight.is_meta and task.model.head.weight is task.model.embedding.weight
    for name in ("fsdp", "tp"):
        task = fit(folder, name, group, max_steps=0, model="gpt", tp=2)
        torch.testing.assert_close(whole_weights(task, group, 2), expected["gpt"], rtol=0, atol=0)


@pytest.mark.parametrize(
    "strategy, rank, meta",
    [
        ("strategy=fsdp", 1, True),
        ("strategy=fsdp", 0, False),
        ("trainer.strategy=fsdp", 1, True),
        ("strategy=fsdp-tp", 1, True),
        ("strategy=tp", 1, True),
        ("strategy=ddp", 1, False),
    ],
)
def test_other_processes_make_no_weights_that_are_divided(strategy, rank, meta, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    task = SequenceLMModel(small(strategy))
    assert {parameter.is_meta for parameter in task.parameters()} == {meta}


class HostMemory(TorchDispatchMode):
    """`most`: how many bytes the tensors had, at any moment within, that were made within on the CPU."""

    def __init__(self):
        super().__init__()
        self.sizes, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.device.type == "cpu":
                self.sizes[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        self.sizes = {each: size for each, size in self.sizes.items() if not each.expired()}
        self.most = max(self.most, sum(self.sizes.values()))
        return result


def check_host_memory(group, folder, name, tp):
    """No process but the first has more than its part of the model, and one whole tensor at a time."""
    model = "deep" if tp == 1 else "deeper gpt"
    with HostMemory() as memory:
        task = fit(folder, name, group, max_steps=0, model=model, tp=tp, num_sanity_val_steps=0)
    sizes = [4 * x.numel() for x in MODELS[model]().parameters()]
    if group.rank() > 0:
        assert not any(x.is_meta for x in task.parameters())
        assert sum(sizes) / group.size() < memory.most < sum(sizes) / group.size() + 3 * max(sizes) < sum(sizes)
    else:
        assert memory.most > sum(sizes)


@pytest.mark.parametrize("name, tp", [("fsdp", 1), ("tp", 4)])
def test_memory_of_the_host(name, tp, tmp_path):
    over_processes(4, check_host_memory, tmp_path, name, tp)


@pytest.mark.parametrize("world", [2, 4])
def test_first_weights_are_those_of_one_process(world, tmp_path):
    tasks = [fit(tmp_path, "single", max_steps=0, model=model) for model in ("buffers", "gpt")]
    weights = [tiny.weights(task) | dict(task.named_buffers()) for task in tasks]
    torch.save(dict(zip(("tiny", "gpt"), weights)), tmp_path / "first.pt")
    over_processes(world, check_first_weights, tmp_path)


CASES = [pytest.param(how, 2) for how in ENGINES if how != "fsdp_tp"] + [
    pytest.param(how, 4, marks=() if how == "fsdp_tp" else pytest.mark.slow) for how in ENGINES
]


@pytest.mark.parametrize(("how", "world"), CASES)
def test_steps_are_those_of_one_process(how, world, serial):
    over_processes(world, check_steps, how, serial)


@pytest.mark.parametrize("world", ON_GPUS)
@pytest.mark.parametrize("how", ENGINES)
def test_steps_on_gpus_are_those_of_one_process(how, world, serial):
    over_processes(world, check_steps, how, serial, backend="nccl")


def check_resume(group, how, folder):
    options = dict(dropout=0.1, accumulate_grad_batches=2, max_steps=6)
    whole = fit_engine(how, folder, group, save_at=2, **options)
    resumed = fit_engine(how, folder, group, ckpt_path=folder / "step_2.ckpt", seed=2, **options)
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert resumed.seen == whole.seen[-len(resumed.seen) :]
    assert 0 < len(resumed.losses) < len(whole.losses)
    torch.testing.assert_close(tiny.weights(resumed), tiny.weights(whole), rtol=0, atol=0)
    states = [task.trainer.strategy.optimizer_state(task.trainer.optimizers[0]) for task in (resumed, whole)]
    torch.testing.assert_close(*({k: tiny.whole(x) for k, x in _flat(s["state"])} for s in states), rtol=0, atol=0)
    assert states[0]["param_groups"] == states[1]["param_groups"]


def _flat(state):
    return [(f"{name}.{key}", value) for name, values in state.items() for key, value in values.items()]


@pytest.mark.parametrize(
    ("how", "world"),
    [
        ("ddp", 2),
        ("zero1", 2),
        ("fsdp", 2),
        ("fsdp_tp", 4),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("ddp", 4), ("zero1", 4), ("zero2", 2), ("tp", 4))),
    ],
)
def test_resumed_run_is_the_same(how, world, tmp_path):
    over_processes(world, check_resume, how, tmp_path)


@pytest.mark.parametrize("world", ON_GPUS)
@pytest.mark.parametrize("how", ENGINES)
def test_resumed_run_on_gpus_is_the_same(how, world, tmp_path):
    over_processes(world, check_resume, how, tmp_path, backend="nccl")


def check_broadcasts(group, folder):
    """Lightning would ask the first process at every batch whether to stop, and have the host wait for the answer."""
    broadcast, calls = dist.broadcast, []
    dist.broadcast = lambda *args, **kwargs: calls.append(args) or broadcast(*args, **kwargs)
    fit(folder, "ddp", group, max_steps=1, limit_val_batches=0)
    few = len(calls)
    fit(folder, "ddp", group, max_steps=3, limit_val_batches=0)
    assert len(calls) == 2 * few


@pytest.mark.parametrize(
    ("given", "precision", "device", "gigabytes", "reshards"),
    [
        (True, "32-true", "cuda", 80, True),
        (False, "32-true", "cuda", 1, False),
        (None, "32-true", "cuda", 3, True),
        (None, "bf16-mixed", "cuda", 3, False),
        (None, "bf16-mixed", "cuda", 1.5, True),
        (None, "bf16-mixed", "cpu", 3, True),
    ],
)
def test_layers_are_kept_if_they_take_little_memory(given, precision, device, gigabytes, reshards, monkeypatch):
    """The layer takes 0.4 GB in fp32 and 0.2 GB in bf16, and is kept if that is at most an eighth of the memory."""
    properties = SimpleNamespace(total_memory=gigabytes * 1e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda which: properties)
    monkeypatch.setattr(engines.FSDPStrategy, "root_device", torch.device(device))
    found = engines.strategy("fsdp", reshard_after_forward=given)
    found.precision_plugin = SimpleNamespace(precision=precision)
    layer = torch.nn.Linear(10_000, 10_000, device="meta")
    assert found._reshards(layer) == reshards
    if given is None and device == "cuda":  # if one process has too little memory, none keeps layers
        monkeypatch.setattr("src.utils.checkpoint.gather", lambda mine: [mine, True])
        assert found._reshards(layer)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("reshard_after_forward", 0, "true, false or null, found 0"),
        ("reshard_after_forward", "maybe", "true, false or null, found 'maybe'"),
        ("reduce_dtype", "float33", "one of float32, bfloat16, float16, found 'float33'"),
    ],
)
def test_options_of_fsdp(option, value, expected):
    with pytest.raises(ValueError, match=rf"trainer\.strategy\.{option} must be {expected}"):
        engines.strategy("fsdp", **{option: value})
    with pytest.raises(ValueError, match=rf"trainer\.strategy\.{option} must be "):
        engines.strategy("ddp_zero2", **{option: value})


class Odd(torch.nn.Module):
    """Parameters of many kinds, of which the last is used first."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.scale = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.turns = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.first = torch.nn.Linear(4, 4)

    def forward(self, x):
        return (self.norm(self.frozen(self.first(x))) * self.scale * self.turns).abs().sum()


def check_buckets(group):
    """The first step sends what later steps do, and nothing else has changed."""
    sent = []

    def hook(_, bucket):
        sent[-1].append(bucket.buffer().shape)
        return allreduce_hook(group, bucket)

    model = torch.nn.parallel.DistributedDataParallel(Odd(), bucket_cap_mb=1e-5)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    strategies._settle_buckets(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.register_comm_hook(None, hook)
    for _ in range(2):
        sent.append([])
        model(torch.randn(3, 4)).backward()
    assert sent[0] == sent[1] and len(sent[0]) > 3
    assert all((x.grad is not None) == x.requires_grad for x in model.parameters())
    for options in (dict(find_unused_parameters=True), dict(static_graph=True)):
        model = torch.nn.parallel.DistributedDataParallel(Odd(), **options)
        strategies._settle_buckets(model)
        model(torch.randn(3, 4)).backward()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(5, 4, sparse=True))
    strategies._settle_buckets(model)
    model(torch.tensor([1])).sum().backward()


def test_buckets_are_settled_before_the_first_step():
    over_processes(2, check_buckets)


@pytest.mark.parametrize(("given", "megabytes"), [({}, 100), ({"bucket_cap_mb": 25}, 25)])
def test_size_of_messages(given, megabytes):
    assert engines.strategy("ddp", **given)._ddp_kwargs["bucket_cap_mb"] == megabytes


def test_no_batch_waits_for_another_process(tmp_path):
    over_processes(2, check_broadcasts, tmp_path)


def check_signal(group, how, folder):
    """One process of all gets a signal; all of them save and stop at the same step."""
    options = dict(dropout=0.1, accumulate_grad_batches=2, max_steps=6)
    whole = fit_engine(how, folder, group, **options)
    signals = [tiny.SendSignal("SIGTERM", "before_backward", 5)] if group.rank() == 1 else []
    with pytest.raises(SystemExit) as stopped:
        fit_engine(how, folder, group, callbacks=signals, **options)
    assert stopped.value.code == 128 + 15
    resumed = fit_engine(how, folder, group, ckpt_path=folder / ".pl_auto_save.ckpt", seed=2, **options)
    assert resumed.losses == whole.losses[6:]
    torch.testing.assert_close(tiny.weights(resumed), tiny.weights(whole), rtol=0, atol=0)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_signal_stops_all_processes(how, tmp_path):
    over_processes(2, check_signal, how, tmp_path)


def check_evaluation(group, how, folder):
    """After training, and from a checkpoint alone, an engine validates its model as one process does."""
    (name, tp, model), rel = ENGINES[how], 1e-5 * looser(group)
    task = fit_engine(how, folder, group, max_steps=1, save_at=1)
    expected = torch.load(folder / "validated.pt")[model]
    task.noisy_validation = False
    (found,) = task.trainer.validate(task, datamodule=tiny.Data(batch_size=4), verbose=False)
    assert found["val/loss"] == pytest.approx(expected, rel=rel)
    other = tiny.Task(MODELS[model](), noisy_validation=False)
    parallel = {"tensor_parallel_size": tp} if tp > 1 else {}
    trainer = tiny.trainer(folder, strategy(name, group, **parallel), 1, group.size(), accelerator=_device(group))
    (found,) = trainer.validate(
        other, datamodule=tiny.Data(batch_size=4), ckpt_path=folder / "step_1.ckpt", verbose=False
    )
    assert found["val/loss"] == pytest.approx(expected, rel=rel)
    if name in ("fsdp", "ddp_zero2"):
        assert not trainer.validate_loop.inference_mode and not trainer.test_loop.inference_mode


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    folder, losses = tmp_path_factory.mktemp("validated"), {}
    for model in MODELS:
        task = fit(folder, "single", model=model, max_steps=1)
        task.noisy_validation = False
        (found,) = task.trainer.validate(task, datamodule=tiny.Data(batch_size=4), verbose=False)
        losses[model] = found["val/loss"]
    torch.save(losses, folder / "validated.pt")
    return folder


@pytest.mark.parametrize("how", [how for how in ENGINES if how != "fsdp_tp"])
def test_evaluation(how, validated):
    over_processes(2, check_evaluation, how, validated)


@pytest.mark.parametrize("world", ON_GPUS)
@pytest.mark.parametrize("how", ENGINES)
def test_evaluation_on_gpus(how, world, validated):
    over_processes(world, check_evaluation, how, validated, backend="nccl")


def check_throughput(group, folder):
    """Processes that share a model have the same tokens, and each does its share of the work."""
    task = fit_engine("tp", folder, group, max_steps=1)
    whole = train_flops_per_token(gpt(), tiny.SEQLEN)
    assert train_flops_per_token(task.model, tiny.SEQLEN) * group.size() == whole
    monitor, logged = SpeedMonitor(), {}
    monitor._log = lambda name, value, prog_bar=False: logged.update({name: value})
    batch = torch.zeros(1, tiny.SEQLEN, dtype=torch.int64)
    monitor._log_throughput(task.trainer, task, batch, items_per_s=10.0)
    assert logged == {"time/tokens_per_s": 10.0, "time/model_tflops": pytest.approx(5 * whole / 1e12)}


def test_throughput_of_a_tensor_parallel_model(tmp_path):
    over_processes(2, check_throughput, tmp_path)


def check_groups(group, folder):
    """Parameters keep their attributes, by which an optimiser groups them, however the model is divided."""
    groups = []
    for name in ("ddp", "fsdp", "ddp_zero2"):
        with torch.device("meta") if name != "ddp" and group.rank() > 0 else nullcontext():
            task = GroupedTask()
        trainer = tiny.trainer(folder, strategy(name, group), 1, group.size())
        trainer.fit(task, datamodule=tiny.Data(batch_size=4))
        names = {id(p): n for n, p in task.named_parameters()}
        found = task.optimizers().param_groups
        groups.append([(each["weight_decay"], [names[id(p)] for p in each["params"]]) for each in found])
    assert groups[0] == groups[1] == groups[2]
    assert [decay for decay, _ in groups[0]] == [0.1, 0.0, 0.3]
    assert groups[0][2][1] == ["model.layers.1.fc1.weight"]
    assert "model.layers.1.fc2.weight" in groups[0][1][1]


class GroupedTask(tiny.Task):
    def __init__(self):
        super().__init__()
        self.model.layers[1].fc1.weight._optim = {"weight_decay": 0.3}
        self.model.layers[1].fc2.weight._no_weight_decay = True

    def configure_optimizers(self):
        return torch.optim.AdamW(group_parameters_for_optimizer(self.model, {"weight_decay": 0.1}), lr=1e-2)


def test_groups_of_parameters_do_not_depend_on_the_engine(tmp_path):
    over_processes(2, check_groups, tmp_path)


def check_hook(group, folder):
    task = fit(folder, "ddp", group, ddp_comm_hook="fp16_compress_hook", max_steps=1, gradient_clip_val=None)
    plain = fit(folder, "ddp", group, max_steps=1, gradient_clip_val=None)
    moments = [each.trainer.optimizers[0].state[each.model.layers[0].fc1.weight]["exp_avg"] for each in (task, plain)]
    assert not torch.equal(*moments)
    torch.testing.assert_close(*moments, rtol=0.002, atol=1e-4)
    with pytest.raises(ValueError, match=r"trainer\.strategy\.ddp_comm_hook must be one of .*found 'no_hook'"):
        fit(folder, "ddp", group, ddp_comm_hook="no_hook")


def test_a_communication_hook_is_used(tmp_path):
    over_processes(2, check_hook, tmp_path)


def run_on(group, how, folder, max_steps, save_at, ckpt_path):
    """A part of a run, after which the samples of its steps are in the folder."""
    task = fit_engine(
        how, folder, group, max_steps=max_steps, save_at=save_at, ckpt_path=ckpt_path, seed=3 if ckpt_path else 1
    )
    seen = [None] * group.size()
    dist.all_gather_object(seen, task.seen)
    steps = [sorted(index for indices in step for index in indices) for step in zip(*seen)]
    torch.save(steps, folder / f"seen_{max_steps}.pt")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("fsdp", "zero1"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("ddp", "fsdp"), ("zero1", "zero2"))),
    ],
)  # on 4 processes, and on 2; then on one, and on 2 again
def test_another_number_of_processes_goes_on(first, second, tmp_path, serial):
    over_processes(4, run_on, first, tmp_path, 2, 2, None)
    over_processes(2, run_on, second, tmp_path, 4, 4, tmp_path / "step_2.ckpt")
    third = fit(tmp_path, "single", max_steps=6, save_at=6, ckpt_path=tmp_path / "step_4.ckpt")
    over_processes(2, run_on, first, tmp_path, STEPS, None, tmp_path / "step_6.ckpt")
    expected = torch.load(serial / "tiny.pt")
    seen = [each for n in (2, 4) for each in torch.load(tmp_path / f"seen_{n}.pt")]
    seen += [sorted(each) for each in third.seen] + torch.load(tmp_path / f"seen_{STEPS}.pt")
    assert seen == [sorted(each) for each in expected["seen"]]
    torch.testing.assert_close(third.losses, expected["losses"][4:6], rtol=1e-5, atol=1e-6)


def goes_on(group, folder, name, tp, max_steps, ckpt_path):
    """A part of a run of the decoder, whose layers tp processes share, saved at its end and compared with the whole."""
    task = fit(folder, name, group, model="gpt", tp=tp, max_steps=max_steps, save_at=max_steps, ckpt_path=ckpt_path)
    expected = torch.load(folder / "gpt.pt")
    losses = mean_losses(task.losses, group) if group else torch.tensor(task.losses)
    whole_losses = torch.tensor(expected["losses"])[max_steps - len(losses) : max_steps]
    torch.testing.assert_close(losses, whole_losses, rtol=1e-5, atol=1e-6)
    weights = whole_weights(task, group, tp)
    saved = load_checkpoint(folder / f"step_{max_steps}.ckpt")
    torch.testing.assert_close({f"model.{name}": x for name, x in saved.items()}, weights, rtol=0, atol=0)
    if max_steps == STEPS:
        torch.testing.assert_close(weights, expected["weights"], rtol=2e-5, atol=5e-6)


def test_another_number_of_processes_shares_the_model(tmp_path, serial):
    """Parts of layers are put together and cut anew: 2 share the model, then 4, none, and 2 of 4 with FSDP."""
    shutil.copy(serial / "gpt.pt", tmp_path)
    over_processes(2, goes_on, tmp_path, "tp", 2, 2, None)
    over_processes(4, goes_on, tmp_path, "tp", 4, 4, tmp_path / "step_2.ckpt")
    goes_on(None, tmp_path, "single", 1, 5, tmp_path / "step_4.ckpt")
    over_processes(4, goes_on, tmp_path, "fsdp", 2, 6, tmp_path / "step_5.ckpt")
    over_processes(2, goes_on, tmp_path, "fsdp", 1, STEPS, tmp_path / "step_6.ckpt")


def check_precision(group, name):
    """Layers of FSDP compute in 16 bits, and keep float32."""
    for precision in ({"precision": "bf16-mixed"}, {"plugins": [half_precision(2.0**10)]}):
        task = fit(".", name, group, max_steps=2, **precision)
        assert {x.dtype for x in task.parameters()} == {torch.float32}
        assert torch.isfinite(torch.tensor(task.losses)).all()


def half_precision(scale):
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3))


class Overflow(L.Callback):
    """Makes gradients of one process infinite, at one step."""

    def __init__(self, rank, step):
        self.rank, self.step = rank, step

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            gradient = pl_module.model.transformer.layers[0].mlp.fc1.weight.grad
            getattr(gradient, "_local_tensor", gradient).fill_(math.inf)


def check_scale(group, folder, name, tp):
    """All processes skip the step for which one of them has infinite gradients, and have the same scale."""
    kept = []
    for overflow in (None, Overflow(rank=1, step=2)):
        precision = half_precision(2.0**8)
        callbacks = [overflow] if overflow else []
        task = fit(folder, name, group, max_steps=3, model="gpt", tp=tp, plugins=[precision], callbacks=callbacks)
        kept.append((whole_weights(task, group, tp), precision.scaler.get_scale(), task.losses))
    before = fit(folder, name, group, max_steps=2, model="gpt", tp=tp, plugins=[half_precision(2.0**8)])
    assert [scale for _, scale, _ in kept] == [2.0**9, 2.0**7] and kept[0][2] == kept[1][2]
    torch.testing.assert_close(kept[1][0], whole_weights(before, group, tp), rtol=0, atol=0)
    assert not torch.equal(kept[0][0]["model.lm_head.bias"], kept[1][0]["model.lm_head.bias"])
    losses = mean_losses(task.losses, group)
    torch.testing.assert_close(losses, torch.tensor(torch.load(folder / "gpt.pt")["losses"][:3]), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "name, tp, world", [("fsdp", 1, 2), ("tp", 2, 2), pytest.param("fsdp", 2, 4, marks=pytest.mark.slow)]
)
def test_one_scale_of_the_loss(name, tp, world, serial):
    over_processes(world, check_scale, serial, name, tp)


@pytest.mark.parametrize("name", ["fsdp", "ddp_zero2"])
def test_precisions_of_fsdp(name):
    over_processes(2, check_precision, name)


def check_bad_sizes(group, folder):
    with pytest.raises(ValueError, match=r"tensor_parallel_size must divide the number of processes, 2, found 3"):
        fit(folder, "tp", group, model="gpt", tp=3)
    with pytest.raises(ValueError, match="GPTLMHeadModel can be divided"):
        fit(folder, "tp", group, tp=2)
    fit(folder, "tp", group, model="gpt", tp=2, max_steps=1, save_at=1)
    with pytest.raises(CheckpointError, match=r"model\.embedding\.weight has shape no tensor in the checkpoint"):
        fit(folder, "fsdp", group, ckpt_path=folder / "step_1.ckpt")
    with pytest.raises(ValueError, match="ddp_zero1 needs a"):
        L.Trainer(accelerator="cpu", devices=2, strategy=strategy("ddp_zero1", group), logger=False).fit(
            tiny.Task(), datamodule=tiny.Data(batch_size=4)
        )


def test_what_does_not_fit_is_named(tmp_path):
    over_processes(2, check_bad_sizes, tmp_path)


def validated_text(folder, group=None, name="single"):
    """The validation metrics of a model that is not trained, on 11 sequences of a text."""
    torch.manual_seed(0)
    task = SequenceLMModel(
        small(
            "datamodule._target_=src.datamodules.language_modeling_hf.LMDataModule",
            "+datamodule.loader_workers=0",
            f"datamodule.dataset_name={folder}/text",
            f"datamodule.cache_dir={folder}/cache",
            "datamodule.batch_size_eval=1",
        )
    )
    assert len(task._datamodule.dataset_val) == 11
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if group is None else group.size(),
        strategy=strategy(name, group),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (metrics,) = trainer.validate(task, datamodule=task._datamodule, verbose=False)
    return metrics


def check_validated_text(group, folder, name, expected):
    metrics = validated_text(folder, group, name)
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_each_sequence_is_validated_once(tmp_path):
    """However many ranks there are: the last batch of some of them has none."""
    (tmp_path / "text").mkdir()
    for name, words in (("train", 40), ("valid", 11)):
        (tmp_path / "text" / f"{name}.txt").write_text("".join(f"word {i:3} of all\n" for i in range(words)))
    expected = validated_text(tmp_path)
    assert set(expected) == {"val/loss", "val/ppl", "val/num-tokens"} and expected["val/num-tokens"] == 11 * 16
    over_processes(2, check_validated_text, tmp_path, "ddp", expected)
    over_processes(4, check_validated_text, tmp_path, "fsdp", expected)
