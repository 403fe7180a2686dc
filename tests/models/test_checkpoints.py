"""Checkpoints: folders that transformers writes and reads, files, shards, Meta's and Megatron's, what is wrong."""

import json
import logging
import shutil
import warnings
import weakref

import pytest
import torch
import transformers
from families import CASES, ids_of

from flash_attn.models._checkpoints import decoder, reading
from flash_attn.models._checkpoints.writing import number_of_bytes
from flash_attn.models.bert import BertModel
from flash_attn.models.gpt import (
    GPTLMHeadModel,
    GPTModel,
    combine_state_dicts_tp,
    inv_remap_state_dict_megatron,
    remap_state_dict_megatron,
    shard_state_dict_tp,
)
from flash_attn.models.llama import (
    config_from_checkpoint,
    inv_remap_state_dict_hf_llama,
    inv_remap_state_dict_meta_llama,
    llama_config_to_gpt2_config,
    remap_state_dict_hf_llama,
    remap_state_dict_meta_llama,
    state_dicts_from_checkpoint,
)
from flash_attn.ops.fused_dense import FusedDense
from flash_attn.utils import pretrained

pytest.importorskip("safetensors")
IN_TRANSFORMERS = [name for name in CASES if not name.startswith(("btlm", "baichuan"))]
OF_EACH_TYPE = {CASES[name].config().model_type: name for name in reversed(IN_TRANSFORMERS)}.values()
MODEL = "model.safetensors"
SMALL_BERT = transformers.BertConfig(
    vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
)


@pytest.fixture
def folder(tmp_path):
    """A function that has transformers write the model of a case, and returns (folder, model)."""

    def write(name, **options):
        _, reference, _ = CASES[name].build()
        reference.save_pretrained(tmp_path / "theirs", **options)
        return tmp_path / "theirs", reference

    return write


def logits_of(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in OF_EACH_TYPE or "tied" in name else pytest.mark.slow)
        for name in IN_TRANSFORMERS
    ],
)
def test_from_transformers_and_back(name, folder, tmp_path):
    path, reference = folder(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "these fields are not known")
        model = GPTLMHeadModel.from_pretrained(path)
    ids = ids_of(reference.config)
    expected = logits_of(reference, ids)
    assert (logits_of(model, ids)[..., : expected.shape[-1]] - expected).abs().max() < 1e-4
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.save_pretrained(tmp_path / "ours")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert (logits_of(again, ids) - expected).abs().max() < 1e-5
    assert torch.equal(logits_of(GPTLMHeadModel.from_pretrained(tmp_path / "ours"), ids), logits_of(model, ids))


@pytest.mark.parametrize("name", ["btlm", "baichuan"])
def test_families_that_transformers_does_not_have(name, tmp_path):
    """From a file beside a config.json, which need not be a class."""
    from safetensors.torch import save_file

    config, reference, _ = CASES[name].build()
    config.save_pretrained(tmp_path)
    state_dict = {key: tensor.clone() for key, tensor in reference.state_dict().items()}
    save_file(state_dict, tmp_path / "model.safetensors")
    ids = ids_of(config)
    for where in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        model = GPTLMHeadModel.from_pretrained(where)
        assert (logits_of(model, ids) - logits_of(reference, ids)).abs().max() < 1e-4
    model.save_pretrained(tmp_path / "ours")
    assert torch.equal(logits_of(GPTLMHeadModel.from_pretrained(tmp_path / "ours"), ids), logits_of(model, ids))


def test_shards(folder, tmp_path, monkeypatch, capsys):
    """One file is in memory at a time, though queries, keys and values lie in different ones."""
    path, reference = folder("llama gqa", max_shard_size="20KB")
    files = sorted(path.glob("model-*.safetensors"))
    assert len(files) > 3
    pending, real = [], decoder._give

    def give(model, tensors, device):
        pending.append(len(tensors))
        real(model, tensors, device)

    monkeypatch.setattr(decoder, "_give", give)
    model = GPTLMHeadModel.from_pretrained(path)
    assert len(pending) == len(files) and max(pending) < sum(pending) / 2
    assert "loading" in capsys.readouterr().err
    GPTLMHeadModel.from_pretrained(path, progress=False)
    assert not capsys.readouterr().err
    ids = ids_of(reference.config)
    assert (logits_of(model, ids) - logits_of(reference, ids)).abs().max() < 1e-4
    model.save_pretrained(tmp_path / "ours", max_shard_size=20_000)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert (logits_of(again, ids) - logits_of(reference, ids)).abs().max() < 1e-5


def test_saving_replaces_a_model_and_nothing_else(tmp_path):
    model = GPTLMHeadModel.from_config(CASES["llama"].config())
    mine = ("model_ema.safetensors", "model-best.safetensors", "tokenizer.json")
    tmp_path.joinpath("folder").mkdir()
    for name in mine:
        (tmp_path / "folder" / name).write_bytes(b"mine")
    for size, is_divided in ((50_000, True), (10**9, False), (50_000, True), (100_000, True)):
        model.save_pretrained(tmp_path / "folder", max_shard_size=size)
        names = {path.name for path in (tmp_path / "folder").iterdir()} - {*mine, "config.json"}
        count = len(names) - 1
        shards = {f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)}
        assert names == ({"model.safetensors.index.json", *shards} if is_divided else {"model.safetensors"})
    assert all((tmp_path / "folder" / name).read_bytes() == b"mine" for name in mine)


def test_how_transformers_generates_is_kept(folder, tmp_path):
    path, reference = folder("llama")
    reference.generation_config.update(temperature=0.25, do_sample=True)
    reference.save_pretrained(path)
    GPTLMHeadModel.from_pretrained(path).save_pretrained(tmp_path / "ours")
    kept = transformers.GenerationConfig.from_pretrained(tmp_path / "ours")
    assert (kept.temperature, kept.do_sample, kept.eos_token_id) == (0.25, True, 2)
    (path / "generation_config.json").unlink()
    GPTLMHeadModel.from_pretrained(path).save_pretrained(tmp_path / "without")
    assert not (tmp_path / "without" / "generation_config.json").exists()


@pytest.mark.parametrize("size", [50_000, 10**9])
def test_a_full_disk_leaves_the_checkpoint_that_is_there(size, tmp_path, monkeypatch):
    import safetensors.torch

    GPTLMHeadModel.from_config(CASES["llama"].config()).save_pretrained(tmp_path, max_shard_size=50_000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, written = safetensors.torch.save_file, []

    def save_file(tensors, path, **kwargs):
        real({name: torch.zeros(1) for name in tensors}, path, **kwargs)
        written.append(path)
        if len(written) == 2 or size > 50_000:
            raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    with pytest.raises(OSError, match="No space left"):
        GPTLMHeadModel.from_config(CASES["gpt2"].config()).save_pretrained(tmp_path, max_shard_size=size)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_sizes_of_files_as_text(tmp_path):
    """As transformers has them."""
    sizes = {"5GB": 5 * 10**9, "1.5 gb": 15 * 10**8, "20KB": 20_000, "7MiB": 7 * 2**20, "2TB": 2 * 10**12, "9B": 9}
    assert {text: number_of_bytes(text) for text in sizes} == sizes
    GPTLMHeadModel.from_config(CASES["llama"].config()).save_pretrained(tmp_path, max_shard_size="50KB")
    assert max(path.stat().st_size for path in tmp_path.glob("model-*")) < 52_000


def test_saving_where_there_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"folder must be a folder or a new name, found the file .*/file$"):
        GPTLMHeadModel.from_config(CASES["gpt2"].config()).save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_pytorch_files(tmp_path):
    """Read with weights_only; tied weights may share memory there."""
    config, reference, _ = CASES["gpt2"].build()
    config.save_pretrained(tmp_path)
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    model = GPTLMHeadModel.from_pretrained(tmp_path)
    ids = ids_of(config)
    assert (logits_of(model, ids) - logits_of(reference, ids)).abs().max() < 1e-4
    assert model.lm_head.weight is model.transformer.embeddings.word_embeddings.weight


def test_dtype_and_marks(folder):
    path, _ = folder("llama")
    model = GPTLMHeadModel.from_pretrained(path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight._optim == {"lr_multiplier": 1.0}
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_configuration_that_is_given(folder):
    path, reference = folder("llama gqa")
    ids = ids_of(reference.config)
    config = llama_config_to_gpt2_config(reference.config)
    config.pad_vocab_size_multiple = 64
    for each in (config, reference.config):
        model = GPTLMHeadModel.from_pretrained(path, each)
        assert (logits_of(model, ids)[..., :96] - logits_of(reference, ids)).abs().max() < 1e-4
    assert isinstance(GPTLMHeadModel.from_config(reference.config, device="meta"), GPTLMHeadModel)
    with pytest.raises(ValueError, match=r"family must be one of gpt2, llama, .* found 'lama'"):
        GPTLMHeadModel.from_pretrained(path, family="lama")


def test_fields_of_the_configuration_by_name(folder):
    """They override those of the checkpoint, and change no configuration that is given."""
    path, reference = folder("llama gqa")
    ids = ids_of(reference.config)
    options = dict(use_flash_attn=True, fused_bias_fc=True, fused_dropout_add_ln=True, pad_vocab_size_multiple=64)
    ours = llama_config_to_gpt2_config(reference.config)
    for given in (None, reference.config, ours):
        model = GPTLMHeadModel.from_pretrained(path, given, **options, process_group=None)
        assert {name: getattr(model.config, name) for name in options} == options
        assert isinstance(model.transformer.layers[0].mixer.Wqkv, FusedDense)
        assert (logits_of(model, ids)[..., :96] - logits_of(reference, ids)).abs().max() < 1e-4
    for given in (reference.config, ours):
        model = GPTLMHeadModel.from_config(given, device="meta", use_flash_attn=True)
        assert model.config.use_flash_attn and not getattr(given, "use_flash_attn", False)
    with pytest.raises(ValueError, match=r"config.activation_function must be one of .* with config.fused_mlp"):
        GPTLMHeadModel.from_pretrained(path, fused_mlp=True)
    says = (
        r"fields of the configuration or arguments of GPTLMHeadModel, found 'use_flash_atn'; names like it: use_flash_"
    )
    with pytest.raises(TypeError, match=says):
        GPTLMHeadModel.from_pretrained(path, use_flash_atn=True)
    with pytest.raises(TypeError, match=says):
        GPTLMHeadModel.from_config(ours, use_flash_atn=True)
    for name, near in dict(zzz="none", attn_implementation="use_flash_attn", device_map="device").items():
        with pytest.raises(TypeError, match=f"found '{name}'; names like it: {near}$"):
            GPTLMHeadModel.from_pretrained(path, **{name: "cuda"})


def test_arguments_of_a_subclass(folder):
    """A field's name that the constructor has is the constructor's, and one that takes all gets the rest."""

    class Own(GPTLMHeadModel):
        def __init__(self, config, n_inner=3, **kwargs):
            self.own = n_inner, kwargs.pop("extra")
            super().__init__(config, **kwargs)

    path, _ = folder("llama")
    model = Own.from_pretrained(path, n_inner=7, extra=8, use_flash_attn=True)
    assert model.own == (7, 8) and model.config.n_inner == 96 and model.config.use_flash_attn


def test_names_of_dtypes(folder):
    path, reference = folder("llama")
    reference.to(torch.bfloat16).save_pretrained(path)
    for given, expected in (("auto", torch.bfloat16), ("float16", torch.float16), (None, torch.float32)):
        model = GPTLMHeadModel.from_pretrained(path, dtype=given)
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
    with pytest.warns(FutureWarning, match="torch_dtype is the older name of dtype") as notices:
        model = GPTLMHeadModel.from_pretrained(path, torch_dtype="auto")
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert [notice.filename for notice in notices] == [__file__]
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if "dtype" not in key}))
    assert GPTLMHeadModel.from_pretrained(path, dtype="auto").lm_head.weight.dtype == torch.bfloat16
    assert GPTLMHeadModel.from_config(reference.config, dtype="auto").lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="torch_dtype must not be given together with dtype, found auto and auto"):
        GPTLMHeadModel.from_pretrained(path, dtype="auto", torch_dtype="auto")
    for wrong in ("int8", "bfloat61", torch.int8, 3):
        with pytest.raises(ValueError, match=f"dtype must be a floating torch.dtype, its name, .* found {wrong!r}"):
            GPTLMHeadModel.from_pretrained(path, dtype=wrong)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_a_gpu_that_there_is_not(device, tmp_path, monkeypatch):
    """Before files are read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for model, config in ((GPTLMHeadModel, CASES["gpt2"].config()), (BertModel, SMALL_BERT)):
        config.save_pretrained(tmp_path)
        with pytest.raises(
            ValueError, match=r"device must be one that PyTorch can use, found 'cuda.*', while PyTorch "
        ):
            model.from_pretrained(tmp_path, device=device)


def test_two_tensors_for_one(folder):
    path, _ = folder("gpt2")
    change(path, lambda tensors: tensors.update({"wpe.weight": torch.zeros(64, 64)}))
    says = "tensors must have different names, found .*wpe.weight and .*wpe.weight for transformer.wpe.weight"
    with pytest.raises(ValueError, match=says):
        GPTLMHeadModel.from_pretrained(path)


def test_a_model_without_head(folder):
    path, reference = folder("gpt2")
    model = GPTModel.from_pretrained(path, strict=False).eval()
    ids = ids_of(reference.config)
    with torch.no_grad():
        assert (model(ids) - reference.transformer(ids).last_hidden_state).abs().max() < 1e-4


def test_hub(folder, tmp_path, monkeypatch):
    """The files are in the hub's cache, and there is no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    path, reference = folder("gpt_neox")
    repository, commit = tmp_path / "models--EleutherAI--pythia-tiny", "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    shutil.copytree(path, snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ids = ids_of(reference.config)
    model = GPTLMHeadModel.from_pretrained("EleutherAI/pythia-tiny")
    assert (logits_of(model, ids) - logits_of(reference, ids)).abs().max() < 1e-4
    (snapshot / "config.json").unlink()  # the name says which family it is
    with pytest.raises(OSError, match=r"config must be given, as there is no config.json in EleutherAI/pythia-tiny"):
        GPTLMHeadModel.from_pretrained("EleutherAI/pythia-tiny")
    model = GPTLMHeadModel.from_pretrained("EleutherAI/pythia-tiny", model.config)
    assert (logits_of(model, ids) - logits_of(reference, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("model", [GPTLMHeadModel, BertModel])
def test_arguments_of_the_hub(model, tmp_path, monkeypatch):
    """They reach it with each file that is asked for."""
    hub = pytest.importorskip("huggingface_hub")
    model(CASES["gpt2"].config() if model is GPTLMHeadModel else SMALL_BERT).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields = {key: value for key, value in fields.items() if "dtype" not in key}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    given, asked = dict(revision="v2", token="hf_", cache_dir="here", local_files_only=True), []

    def hf_hub_download(name, file, **options):
        assert name == "owner/name" and options == given
        asked.append(file)
        if not (tmp_path / file).exists():
            raise FileNotFoundError(file)
        return str(tmp_path / file)

    monkeypatch.setattr(hub, "hf_hub_download", hf_hub_download)
    assert isinstance(model.from_pretrained("owner/name", dtype="auto", **given), model)
    assert {"config.json", "model.safetensors"} <= set(asked)


def test_why_the_hub_does_not_have_it(monkeypatch):
    """A name that it does not know, one that is private, and no network are not the same."""
    hub, errors = pytest.importorskip("huggingface_hub"), pytest.importorskip("huggingface_hub.errors")
    for error, says in (
        ("HFValidationError", "it is neither a local folder nor known on the hub"),
        ("RepositoryNotFoundError", "it is neither a local folder nor known on the hub; a private one needs a token"),
        ("GatedRepoError", "access to it must be granted on the hub first"),
        ("RevisionNotFoundError", "it has no such revision on the hub"),
        (
            "LocalEntryNotFoundError",
            "the hub cannot be reached, or local_files_only is set, and the cache has no such file",
        ),
    ):
        kind = getattr(errors, error)

        def download(*args, kind=kind):
            raise kind.__new__(kind)

        monkeypatch.setattr(hub, "hf_hub_download", download)
        for model in (GPTLMHeadModel, BertModel):
            with pytest.raises(OSError, match=f"there is no config.json in owner/name: {says}"):
                model.from_pretrained("owner/name")
        with pytest.raises(OSError, match=f"Model name owner/name was not found: {says}"):
            GPTLMHeadModel.from_pretrained("owner/name", CASES["gpt2"].config(), family="gpt2")


def test_memory_of_loading(folder, monkeypatch):
    """When a file is read, the tensors of the one before are gone."""
    path, _ = folder("llama", max_shard_size="20KB")
    alive, references, real = [], [], pretrained.pieces_of_file

    def pieces_of_file(path):
        for piece in real(path):
            alive.append(sum(each() is not None for each in references))
            references.extend(weakref.ref(tensor) for tensor in piece.values())
            yield piece

    monkeypatch.setattr(pretrained, "pieces_of_file", pieces_of_file)
    GPTLMHeadModel.from_pretrained(path, progress=False)
    assert len(references) > 15 and max(alive) <= 2  # of queries, keys and values, those that wait for the others


def test_a_large_file_is_loaded_in_pieces(folder, monkeypatch, capsys):
    path, _ = folder("llama gqa")
    capsys.readouterr()
    whole = GPTLMHeadModel.from_pretrained(path)
    assert not capsys.readouterr().err
    monkeypatch.setattr(pretrained, "PIECE", 20_000)
    pieces = [sum(tensor.nbytes for tensor in piece.values()) for piece in reading.pieces([path / MODEL], True)]
    assert len(pieces) > 5 and max(pieces) < 60_000
    assert " 99%" in capsys.readouterr().err  # the rest is the head of the file
    model = GPTLMHeadModel.from_pretrained(path)
    assert " 99%" in capsys.readouterr().err  # the rest is the head of the file
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in model.state_dict().items())
    GPTLMHeadModel.from_pretrained(path, progress=False)
    assert not capsys.readouterr().err


def change(path, function):
    """Rewrite the tensors of a checkpoint."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    function(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_what_does_not_fit(folder):
    """All of it in one error, with what the family expects, before a tensor is loaded."""
    path, _ = folder("llama")

    def spoil(tensors):
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.extra"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(7)

    change(path, spoil)
    with pytest.raises(ValueError, match="does not fit the model, a GPTLMHeadModel of the family llama") as error:
        GPTLMHeadModel.from_pretrained(path)
    for line in (
        "transformer.layers.1.mixer.Wqkv.weight (from model.layers.1.self_attn.q_proj.weight, "
        "model.layers.1.self_attn.k_proj.weight, model.layers.1.self_attn.v_proj.weight)",
        "transformer.ln_f.weight: expected (64,), found (7,), made of model.norm.weight (7,)",
    ):
        assert f"\n    {line}\n" in f"{error.value}\n"
    assert "\n  not known:\n    model.layers.0.extra\n  of a wrong shape" in str(error.value)
    assert (
        "\n  left over, because other parts of the same tensor are missing:\n    model.layers.1.self_attn.q_proj.weight"
        "\n    model.layers.1.self_attn.v_proj.weight\n  not known:"
    ) in str(error.value)
    change(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64)}))
    with pytest.raises(ValueError, match="missing"):
        GPTLMHeadModel.from_pretrained(path)


def test_tensors_of_which_ours_cannot_be_made(folder):
    path, _ = folder("llama")
    change(path, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 60)}))
    with pytest.raises(
        ValueError, match=r"Wqkv.weight .* found .*k_proj.weight \(64, 60\), .*v_proj.weight \(64, 64\)"
    ):
        GPTLMHeadModel.from_pretrained(path)
    change(path, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(60, 64)}))
    with pytest.raises(
        ValueError,
        match=r"Wqkv.weight: expected \(192, 64\), found \(188, 64\), made of .*q_proj.weight"
        r" \(64, 64\), .*k_proj.weight \(60, 64\), .*v_proj.weight \(64, 64\)$",
    ):
        GPTLMHeadModel.from_pretrained(path)
    path, _ = folder("gpt_neox")
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    change(path, lambda tensors: tensors.update({name: torch.zeros(190, 64)}))
    with pytest.raises(ValueError, match=r"Wqkv.weight .* found .*query_key_value.weight \(190, 64\)"):
        GPTLMHeadModel.from_pretrained(path)


def test_tensors_of_integers_are_no_weights(folder):
    """Quantised weights may come without a configuration that says so."""
    path, _ = folder("llama")
    change(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=r"ln_f.weight: expected a floating-point dtype, found torch.int8"):
        GPTLMHeadModel.from_pretrained(path)


def test_parts_without_a_group(folder):
    path, _ = folder("llama")
    with pytest.raises(ValueError, match=r"world_size must be the number of processes of process_group, 1 without one"):
        GPTLMHeadModel.from_pretrained(path, world_size=2, rank=0)


def test_what_does_not_fit_may_be_left_out(folder, caplog):
    path, reference = folder("llama")
    change(path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with caplog.at_level(logging.WARNING):
        model = GPTLMHeadModel.from_pretrained(path, strict=False)
    assert "these keep their first, random weights:\n    transformer.layers.1.mlp.fc1.weight (from" in caplog.text
    assert "these are left out:\n    model.layers.1.mlp.gate_proj.weight" in caplog.text
    weight = model.transformer.layers[1].mlp.fc1.weight
    assert weight.std().item() == pytest.approx(0.3, rel=0.1)
    theirs = reference.model.layers[1].mlp.down_proj.weight
    assert torch.equal(model.transformer.layers[1].mlp.fc2.weight, theirs)


def test_no_checkpoint(tmp_path):
    with pytest.raises(OSError, match=r"config must be given, as there is no config.json in [^,]*$"):
        GPTLMHeadModel.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"no config.json in .*absent: it is neither a local folder nor known on the hub"):
        GPTLMHeadModel.from_pretrained(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config.json must be JSON, found: Expecting value"):
        GPTLMHeadModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(NotImplementedError, match="found 'bert'"):
        GPTLMHeadModel.from_pretrained(tmp_path)
    CASES["gpt2"].config().save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"was not found: none of model.safetensors"):
        GPTLMHeadModel.from_pretrained(tmp_path)


def test_a_configuration_that_does_not_fit(folder):
    path, reference = folder("llama")
    with pytest.raises(TypeError, match=r"config must be an object with the fields of .*, found a dict of them"):
        GPTLMHeadModel.from_config({"hidden_size": 64, "vocab_size": 96})
    for wrong in (torch.bfloat16, "config.json"):
        with pytest.raises(TypeError, match=f"config must have the fields of a model's .* {type(wrong).__name__}$"):
            GPTLMHeadModel.from_pretrained(path, wrong)
        with pytest.raises(TypeError, match="config must have the fields of a model's configuration"):
            GPTLMHeadModel.from_config(wrong)
    with pytest.raises(ValueError, match=r"config must be of the checkpoint's family, llama, .* found .*'gpt_neox'"):
        GPTLMHeadModel.from_pretrained(path, CASES["gpt_neox"].config())
    with pytest.raises(NotImplementedError, match=r"no family is known for this configuration: .* found 'bert'"):
        GPTLMHeadModel.from_config(transformers.BertConfig())
    (path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"family must be given, as neither config\.json nor the name says which"):
        GPTLMHeadModel.from_pretrained(path, CASES["llama"].ours())
    GPTLMHeadModel.from_pretrained(path, CASES["llama"].config())


def test_a_multimodal_configuration():
    """The text model in it is what can be had."""
    for kind in (transformers.Gemma3Config, transformers.Mistral3Config):
        config = kind()
        with pytest.raises(TypeError, match=rf"found {kind.__name__} of a multimodal one: config.text_config is the"):
            GPTLMHeadModel.from_config(config)
        assert GPTLMHeadModel.from_config(config.text_config, device="meta").config.n_embd > 0


def test_what_cannot_be_saved(tmp_path):
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96, n_positions=0)
    config.rotary_emb_fraction = 0.5
    with pytest.raises(ValueError, match=r"config.rotary_emb_fraction must be 0.0 to save in the format of GPT-2"):
        GPTLMHeadModel(config).save_pretrained(tmp_path)
    for options, says in ((dict(head_dim=8), "head_dim must be 16.0"), (dict(n_head_kv=2), "n_head_kv must be 4")):
        config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96, **options)
        with pytest.raises(ValueError, match=f"config.{says} to save in the format of GPT-2, found"):
            GPTLMHeadModel(config).save_pretrained(tmp_path)
    model = GPTLMHeadModel.from_config(CASES["llama"].config())
    for size, error, says in (
        ("5 lots", ValueError, "max_shard_size must be a number of bytes or text such as '5GB', found '5 lots'"),
        (5e9, TypeError, "max_shard_size must be an integer or text such as '5GB', found float"),
        (0, ValueError, "max_shard_size must be positive, found 0"),
        (-1, ValueError, "max_shard_size must be positive, found -1"),
        ("0GB", ValueError, "max_shard_size must be positive, found 0"),
    ):
        with pytest.raises(error, match=says):
            model.save_pretrained(tmp_path, max_shard_size=size)
    with pytest.raises(ValueError, match="family must be that of the model's configuration, found 'opt'"):
        model.save_pretrained(tmp_path, family="opt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", dict(rotary_emb_base=100.0)),
        ("llama", dict(rotary_emb_scaling=dict(rope_type="linear", factor=2.0))),
        ("llama", dict(activation_function="geglu")),
        ("llama", dict(sliding_window=3, use_flash_attn=True)),
        ("llama", dict(n_head_kv=2)),
        ("llama", dict(head_dim=32)),
        ("llama", dict(n_inner=80)),
        ("llama", dict(n_layer=1)),
        ("falcon new decoder", dict(parallel_block_tied_norm=True)),
        ("phi", dict(layer_norm_epsilon=0.1)),
        ("btlm", dict(mup_output_multiplier=2.0)),
    ],
)
def test_a_model_that_is_not_what_its_configuration_says_is_not_saved(name, options, tmp_path):
    """config.json would hold the family's configuration without what was overridden: loading gives another model."""
    model = GPTLMHeadModel.from_config(CASES[name].config(), **options)
    field = next(iter(options))
    with pytest.raises(ValueError, match=f"config.{field} must be .* that is saved with the model, found "):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["llama", "bigcode", "falcon alibi"])
def test_a_model_that_computes_the_same_in_another_way_is_saved(name, tmp_path):
    options = dict(use_flash_attn=True, fused_bias_fc=True, residual_in_fp32=True, pad_vocab_size_multiple=64)
    options |= dict(resid_pdrop=0.1, gradient_checkpointing=True) | (dict(n_head_kv=1) if name == "bigcode" else {})
    model = GPTLMHeadModel.from_config(CASES[name].config(), **options)
    model.save_pretrained(tmp_path)
    ids = ids_of(model.config)
    expected = logits_of(model, ids)[..., : model.config.vocab_size]
    torch.testing.assert_close(logits_of(GPTLMHeadModel.from_pretrained(tmp_path), ids), expected)


# Meta's and Megatron's


def test_meta(tmp_path):
    """Its shards have the embedding by columns; queries and keys are not reordered."""
    _, reference, config = CASES["llama gqa"].build()
    whole = remap_state_dict_hf_llama(dict(reference.state_dict()), config)
    folder = tmp_path / "7B"
    folder.mkdir()
    fields = dict(dim=64, n_heads=4, n_kv_heads=2, n_layers=2, norm_eps=1e-6, multiple_of=32, ffn_dim_multiplier=0.5)
    (folder / "params.json").write_text(json.dumps(fields | dict(rope_theta=10000.0)))
    for rank in range(2):
        part = shard_state_dict_tp(dict(whole), config, 2, rank)
        part["transformer.embeddings.word_embeddings.weight"] = whole[
            "transformer.embeddings.word_embeddings.weight"
        ].chunk(2, dim=1)[rank]
        theirs = inv_remap_state_dict_meta_llama(part, config)
        theirs["rope.freqs"] = torch.zeros(8)
        torch.save({key: tensor.clone() for key, tensor in theirs.items()}, folder / f"consolidated.{rank:02}.pth")
    found = config_from_checkpoint(tmp_path, "7B")
    assert (found.intermediate_size, found.num_key_value_heads, found.vocab_size) == (96, 2, 32000)
    found.vocab_size = 96
    found = llama_config_to_gpt2_config(found)
    shards = [remap_state_dict_meta_llama(each, found) for each in state_dicts_from_checkpoint(tmp_path, "7B")]
    again = combine_state_dicts_tp(shards, found)
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in whole.items())
    model = GPTLMHeadModel(found)
    model.load_state_dict(again)
    ids = ids_of(reference.config)
    assert (logits_of(model, ids) - logits_of(reference, ids)).abs().max() < 1e-4
    with pytest.raises(FileNotFoundError, match=r"must have files consolidated"):
        state_dicts_from_checkpoint(tmp_path, ".")
    with pytest.raises(ValueError, match="checkpoint_format must be 'meta' or 'hf', found 'gguf'"):
        config_from_checkpoint(tmp_path, "7B", "gguf")


META = dict(dim=64, n_heads=4, n_kv_heads=2, n_layers=2, norm_eps=1e-6, multiple_of=32, ffn_dim_multiplier=0.5)


def meta_config(folder, **params):
    """The configuration of Meta's params.json."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "params.json").write_text(json.dumps(META | params))
    return config_from_checkpoint(folder, "model")


def test_saving_what_meta_made(tmp_path):
    """transformers reads the base of the rotary embedding in a field of its own."""
    model = GPTLMHeadModel.from_config(meta_config(tmp_path, rope_theta=5e5, vocab_size=96), initializer_range=0.3)
    model.save_pretrained(tmp_path / "ours")
    ids = ids_of(model.config)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert (logits_of(again, ids) - logits_of(model, ids)).abs().max() < 1e-4


def test_what_params_of_meta_say(tmp_path):
    assert [meta_config(tmp_path, vocab_size=each).vocab_size for each in (128256, -1)] == [128256, 32000]
    assert meta_config(tmp_path, use_scaled_rope=False).hidden_size == 64
    with pytest.raises(ValueError, match=r"config.use_scaled_rope must be None or False, .* found True"):
        meta_config(tmp_path, use_scaled_rope=True)


def test_meta_and_transformers_have_the_same_weights():
    """The one reorders rotary pairs, which the other does not have to."""
    _, reference, config = CASES["llama gqa"].build()
    ours = remap_state_dict_hf_llama(dict(reference.state_dict()), config)
    meta = inv_remap_state_dict_meta_llama(ours, config)
    query = reference.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(meta["layers.0.attention.wq.weight"][:4], query[[0, 8, 1, 9]])
    back = inv_remap_state_dict_hf_llama(remap_state_dict_meta_llama(meta, config), config)
    assert all(torch.equal(back[key], tensor) for key, tensor in reference.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_megatron(tied):
    """Heads have their query, key and value together."""
    options = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=90, n_positions=0, rotary_emb_fraction=1.0)
    config = transformers.GPT2Config(**options, tie_word_embeddings=tied, pad_vocab_size_multiple=8)
    model = GPTLMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    state_dict = model.state_dict()
    for name in ("word_embeddings", "lm_head"):  # the padding
        for key in state_dict:
            if name in key:
                state_dict[key][90:] = 0
    theirs = inv_remap_state_dict_megatron(dict(state_dict), config)
    qkv = theirs["language_model.encoder.layers.0.self_attention.query_key_value.weight"]
    ours = state_dict["transformer.layers.0.mixer.Wqkv.weight"]
    assert torch.equal(qkv[16:32], ours[64:80])  # the first head's key
    assert ("language_model.output_layer.weight" in theirs) != tied
    theirs["language_model.encoder.layers.0.self_attention.rotary_emb.inv_freq"] = torch.zeros(8)
    again = remap_state_dict_megatron(
        {key.replace("language_model.encoder", "language_model.transformer"): x for key, x in theirs.items()}, config
    )
    assert again.keys() == state_dict.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in state_dict.items())
