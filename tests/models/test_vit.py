"""Vision transformers: timm's, a model of plain torch, state dicts both ways, graphs, what is refused.

Models in float32 stay on the CPU, where flash attention takes that dtype.
"""

import functools
import inspect
import json
import math

import pytest
import torch
import torch.nn.functional as F
from compare import assert_error_ratio
from torch import nn

from flash_attn.models import vit
from flash_attn.models.vit import VisionTransformer

SIZES = dict(img_size=32, patch_size=8, embed_dim=64, depth=3, num_heads=4, num_classes=10)
FUSED = dict(use_flash_attn=True, fused_bias_fc=True, fused_mlp=True, fused_dropout_add_ln=True)
VARIANTS = {
    "plain": {},
    "flash": dict(use_flash_attn=True),
    "fused": FUSED,
    "fused but for the MLP": dict(FUSED, fused_mlp=False),
    "no biases": dict(qkv_bias=False),
    "no embedding of the class": dict(no_embed_class=True),
    "no head": dict(num_classes=0),
    "other sizes": dict(img_size=(16, 24), patch_size=(4, 8), in_chans=1, mlp_ratio=2.5),
    "one block": dict(depth=1),
}
TIMM_ONLY = ("qkv_bias", "no_embed_class", "num_classes", "img_size", "patch_size", "in_chans", "mlp_ratio", "depth")


def model_of(device="cpu", noise=0.2, **options):
    """A model with all parameters random: constant biases and norms would hide an error."""
    model = VisionTransformer(**SIZES | options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model.to(device).eval()


def images(model, batch=2):
    height, width = model.patch_embed.img_size
    channels = model.patch_embed.proj.in_features // math.prod(model.patch_embed.patch_size)
    return torch.randn(batch, channels, height, width, device=model.cls_token.device)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


class PlainViT:
    """The vision transformer of arXiv:2010.11929 as formulas, on a state dict with timm's names."""

    def __init__(self, state_dict, num_heads, no_embed_class=False, approximate="none"):
        self.parameters = state_dict
        self.num_heads = num_heads
        self.no_embed_class = no_embed_class
        self.approximate = approximate

    def features(self, x):
        p, kernel = self.parameters, self.parameters["patch_embed.proj.weight"]
        x = F.conv2d(x, kernel, p["patch_embed.proj.bias"], stride=kernel.shape[2:]).flatten(2).transpose(1, 2)
        first = p["cls_token"].expand(len(x), -1, -1)
        x = (
            torch.cat([first, x + p["pos_embed"]], 1)
            if self.no_embed_class
            else torch.cat([first, x], 1) + p["pos_embed"]
        )
        for i in range(sum(key.endswith("norm1.weight") for key in p)):
            x = x + self.attention(f"blocks.{i}.attn", self.norm(f"blocks.{i}.norm1", x))
            hidden = self.linear(f"blocks.{i}.mlp.fc1", self.norm(f"blocks.{i}.norm2", x))
            x = x + self.linear(f"blocks.{i}.mlp.fc2", F.gelu(hidden, approximate=self.approximate))
        return self.norm("norm", x)

    def logits(self, x):
        return self.linear("head", self.features(x)[:, 0])

    def attention(self, name, x):
        q, k, v = self.linear(f"{name}.qkv", x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return self.linear(f"{name}.proj", (weights @ v).transpose(1, 2).flatten(2))

    def linear(self, name, x):
        if f"{name}.weight" not in self.parameters:  # a model without a head
            return x
        return F.linear(x, self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias"))

    def norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"], 1e-6)


def plain_of(model, dtype=torch.float64):
    """The formulas with the parameters of a model; its MLPs tell the form of the activation."""
    parameters = {
        key: tensor.to(dtype)
        for key, tensor in vit.inv_remap_state_dict_timm(dict(model.named_parameters()), model).items()
    }
    approximate = "none" if isinstance(model.blocks[0].mlp.activation, nn.GELU) else "tanh"
    return PlainViT(parameters, model.blocks[0].mixer.num_heads, model.no_embed_class, approximate)


@pytest.mark.parametrize("variant", VARIANTS)
def test_formula(variant):
    model = model_of(**VARIANTS[variant])
    x = images(model)
    plain = plain_of(model)
    expected = plain.features(x.double()).float()
    torch.testing.assert_close(model.forward_features(x), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(model.forward_features(x, all_tokens=False), expected[:, :1], rtol=0, atol=1e-4)
    torch.testing.assert_close(model(x), plain.logits(x.double()).float(), rtol=0, atol=1e-4)
    assert torch.equal(model(x), model.forward_head(model.forward_features(x, all_tokens=False)))
    assert torch.equal(model.forward_head(expected, pre_logits=True), expected[:, 0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_timm(variant):
    timm = pytest.importorskip("timm")
    options = VARIANTS[variant]
    theirs = timm.models.vision_transformer.VisionTransformer(
        **SIZES | {name: value for name, value in options.items() if name in TIMM_ONLY},
        act_layer=functools.partial(nn.GELU, approximate="tanh") if options.get("fused_mlp") else None,
    )
    ours = model_of(**options)
    theirs.load_state_dict(vit.inv_remap_state_dict_timm(ours.state_dict(), ours), strict=True)
    again = VisionTransformer(**SIZES | options)
    again.load_state_dict(theirs.state_dict())
    theirs, again = theirs.eval(), again.eval()
    x = images(again)
    torch.testing.assert_close(again(x), theirs(x), rtol=0, atol=1e-4)
    torch.testing.assert_close(again.forward_features(x), theirs.forward_features(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in vars(vit) if name.startswith("vit_")])
def test_sizes_of_timm(name):
    """The functions that make a model of a size have timm's names for timm's names and shapes of tensors."""
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        theirs, ours = timm.create_model(name, num_classes=1000).state_dict(), getattr(vit, name)()
    expected = {key: tensor.shape for key, tensor in ours.state_dict().items()}
    assert {key: tensor.shape for key, tensor in vit.remap_state_dict_timm(theirs, ours).items()} == expected
    assert vit.inv_remap_state_dict_timm(ours.state_dict(), ours).keys() == theirs.keys()


@pytest.mark.parametrize("variant", ["plain", "flash", "fused"])
def test_gradients(variant):
    """The class token alone, as forward computes it, has the gradients of the whole."""
    model = model_of(**VARIANTS[variant])
    x = images(model)
    results = []
    for logits in (lambda: model(x), lambda: plain_of(model).logits(x.double())):
        model.zero_grad()
        logits().float().square().sum().backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_dropout(fused):
    """Rates grow from block to block; dropped paths leave the residual stream alone."""
    options = dict(drop_path_rate=0.2, drop_rate=0.1, attn_drop_rate=0.3, fused_dropout_add_ln=fused)
    model = model_of(**options)
    paths = [(block.drop_path1.p, block.drop_path2.p) for block in model.blocks]
    assert paths == [(0, 0), (0, 0.1), (0.1, 0.2)] and model.drop_path.p == 0.2
    assert {(block.dropout1.p, block.dropout2.p, block.mixer.inner_attn.drop.p) for block in model.blocks} == {
        (0.1, 0.1, 0.3)
    }
    x = images(model)
    torch.testing.assert_close(model(x), plain_of(model).logits(x.double()).float(), rtol=0, atol=1e-4)
    model.train()
    assert not torch.equal(model(x), model(x))
    model.drop_path.p = 1 - 1e-6  # of nearly all images, so that the last MLP goes nowhere
    model.dropout.p = 0.0
    model(x).sum().backward()
    assert (model.blocks[-1].mlp.fc2.weight.grad == 0).all() and (model.blocks[0].mlp.fc2.weight.grad != 0).any()


def test_initialisation():
    model = VisionTransformer(**SIZES | dict(embed_dim=256))
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std() == pytest.approx(0.02, rel=0.1) and (module.bias == 0).all(), name
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all() and (module.bias == 0).all() and module.eps == 1e-6
    assert model.pos_embed.std() == pytest.approx(0.02, rel=0.1) and model.cls_token.std() < 1e-5
    assert model.no_weight_decay() == {"pos_embed", "cls_token"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vit_tiny_patch16_224", 5717416),
        ("vit_small_patch16_224", 22050664),
        ("vit_base_patch16_224", 86567656),
        ("vit_base_patch32_224", 88224232),
        ("vit_large_patch16_224", 304326632),
        ("vit_huge_patch14_224", 632045800),
    ],
)
def test_sizes(name, parameters):
    with torch.device("meta"):
        model = getattr(vit, name)(use_flash_attn=True)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
        assert model.blocks[0].mixer.use_flash_attn
        assert len(getattr(vit, name)(depth=2).blocks) == 2
    with pytest.raises(ValueError, match="pretrained must be False, found True"):
        getattr(vit, name)(pretrained=True)
    assert getattr(vit, name).__name__ == name


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fused_mlp", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_half_precision(fused, fused_mlp, dtype, device):
    """Errors of at most twice those of the formulas in the same dtype; 8 times with the tanh form of the activation."""
    options = dict(FUSED, fused_mlp=fused_mlp) if fused else dict(use_flash_attn=True, fused_mlp=fused_mlp)
    model = model_of(device, noise=0.03, **options | dict(embed_dim=256, img_size=64))
    x = images(model, batch=4)
    exact, baseline = plain_of(model), plain_of(model, dtype)
    exact.approximate = baseline.approximate = "none"
    with torch.no_grad():
        expected, peer = exact.features(x.double()), baseline.features(x.to(dtype))
        expected_logits, peer_logits = exact.logits(x.double()), baseline.logits(x.to(dtype))
        found, logits = model.to(dtype).forward_features(x.to(dtype)), model(x.to(dtype))
    at_most = 8 if fused_mlp else 2
    assert_error_ratio(found, expected, peer, at_most=at_most, name="features")
    assert_error_ratio(logits, expected_logits, peer_logits, at_most=at_most, name="logits")


# ---------------------------------------------------------------------------------------------------------------------
# State dicts


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(variant):
    model = model_of(**VARIANTS[variant])
    state_dict = model.state_dict()
    theirs = vit.inv_remap_state_dict_timm(state_dict, model)
    assert theirs["patch_embed.proj.weight"].dim() == 4 and "blocks.0.attn.qkv.weight" in theirs
    assert not any("mixer" in key for key in theirs)
    again = vit.remap_state_dict_timm(theirs, model)
    torch.testing.assert_close(again, type(again)(state_dict), rtol=0, atol=0)
    torch.testing.assert_close(vit.inv_remap_state_dict_timm(again, model), theirs, rtol=0, atol=0)


def test_names_and_shapes():
    model = VisionTransformer(**SIZES | dict(depth=2))
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    expected = {
        "cls_token": (1, 1, 64),
        "pos_embed": (1, 17, 64),
        "patch_embed.proj": (64, 192),
        "blocks.0.mixer.Wqkv": (192, 64),
        "blocks.1.mixer.Wq": (64, 64),
        "blocks.1.mixer.Wkv": (128, 64),
        "norm": (64,),
        "head": (10, 64),
    }
    for i in range(2):
        block = {"mixer.out_proj": (64, 64), "norm1": (64,), "norm2": (64,), "mlp.fc1": (256, 64), "mlp.fc2": (64, 256)}
        expected |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    for name, shape in expected.items():
        if name in shapes:
            assert shapes.pop(name) == shape
        else:
            assert (shapes.pop(f"{name}.weight"), shapes.pop(f"{name}.bias")) == (shape, shape[:1])
    assert not shapes


def test_state_dicts_are_left_as_they_are():
    model, other = model_of(), model_of()
    own = model.state_dict()
    theirs = vit.inv_remap_state_dict_timm(own, model)
    for state_dict in (own, theirs):
        before = dict(state_dict)
        assert other.load_state_dict(state_dict) == ([], [])
        assert state_dict.keys() == before.keys() and all(state_dict[key] is before[key] for key in before)
        x = images(model)
        assert torch.equal(other(x), model(x))
        nn.init.zeros_(other.head.weight)
    del theirs["patch_embed.proj.weight"], theirs["blocks.2.attn.qkv.bias"]
    missing, unexpected = other.load_state_dict(theirs | {"more": torch.ones(1)}, strict=False)
    assert missing == ["patch_embed.proj.weight", "blocks.2.mixer.Wq.bias", "blocks.2.mixer.Wkv.bias"]
    assert unexpected == ["more"]


class Convolution(nn.Module):
    """An embedding of patches of a user's own."""

    def __init__(self, img_size, patch_size, in_chans, embed_dim, bias):
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size, bias=bias)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


def test_another_embedding_of_patches():
    model = model_of()
    theirs = vit.inv_remap_state_dict_timm(model.state_dict(), model)
    other = VisionTransformer(**SIZES, embed_layer=Convolution).eval()
    other.load_state_dict(theirs)
    x = images(model)
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=1e-4)
    torch.testing.assert_close(vit.inv_remap_state_dict_timm(other.state_dict(), other), theirs, rtol=0, atol=0)


def test_state_dicts_that_do_not_fit():
    model = model_of()
    theirs = vit.inv_remap_state_dict_timm(model.state_dict(), model)
    theirs["patch_embed.proj.weight"] = torch.zeros(64, 3, 4, 4)
    theirs["fc_norm.weight"] = torch.zeros(64)
    del theirs["blocks.2.attn.qkv.weight"]
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(theirs)
    for told in (
        'Missing key(s) in state_dict: "blocks.2.mixer.Wq.weight", "blocks.2.mixer.Wkv.weight"',
        'Unexpected key(s) in state_dict: "fc_norm.weight"',
        "size mismatch for patch_embed.proj.weight: copying a param with shape torch.Size([64, 48])",
    ):
        assert told in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


CONFIG = dict(
    architecture="vit_tiny_patch16_224",
    num_classes=10,
    num_features=64,
    global_pool="token",
    label_names=[f"label {i}" for i in range(10)],
    model_args=dict(patch_size=8, embed_dim=64, depth=3, num_heads=4),
    pretrained_cfg=dict(
        input_size=[3, 32, 32], fixed_input_size=True, mean=[0.5, 0.4, 0.3], classifier="head", num_classes=10
    ),
)


@pytest.fixture
def checkpoint(tmp_path):
    """(folder, model): a folder as timm writes it."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    model = model_of()
    save_file(vit.inv_remap_state_dict_timm(model.state_dict(), model), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path, model


def changed(folder, **fields):
    """Change the config.json of a folder, in which fields that are None are left out."""
    config = {name: value for name, value in (CONFIG | fields).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "bin"])
def test_from_pretrained(kind, checkpoint, capsys):
    folder, expected = checkpoint
    where = [folder, str(folder), folder / "model.safetensors"]
    if kind == "sharded":
        expected.save_pretrained(folder, max_shard_size="50KB")
        where = [folder]
        assert len(list(folder.glob("model-*.safetensors"))) > 3
    if kind == "bin":
        (folder / "model.safetensors").unlink()
        where = [folder, folder / "pytorch_model.bin"]
        torch.save(vit.inv_remap_state_dict_timm(expected.state_dict(), expected), where[1])
    x = images(expected)
    for path in where:
        model = VisionTransformer.from_pretrained(path)
        assert model.training and torch.equal(model.eval()(x), expected(x))
    assert ("loading" in capsys.readouterr().err) == (kind == "sharded")
    VisionTransformer.from_pretrained(folder, progress=False)
    assert not capsys.readouterr().err
    fused = VisionTransformer.from_pretrained(folder, use_flash_attn=True, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in fused.parameters()} == {torch.bfloat16}
    assert fused.blocks[0].mixer.use_flash_attn
    assert {p.dtype for p in VisionTransformer.from_pretrained(folder, dtype="auto").parameters()} == {torch.float32}


def test_what_a_config_says(checkpoint):
    """model_args are over what the pretrained_cfg says, and keyword arguments over both; older files have only that."""
    folder, expected = checkpoint
    x, args = images(expected), CONFIG["model_args"]
    older = dict(CONFIG["pretrained_cfg"], architecture="vit_tiny_patch16_224", input_size=[3, 32, 32])
    (folder / "config.json").write_text(json.dumps(older))
    assert torch.equal(VisionTransformer.from_pretrained(folder, **args).eval()(x), expected(x))
    larger = dict(CONFIG["pretrained_cfg"], input_size=[1, 64, 64], num_classes=7)
    for fields in (
        dict(num_classes=None, model_args=dict(args, img_size=32, in_chans=3, num_classes=10), pretrained_cfg=larger),
        dict(model_args=dict(args, img_size=[32, 32], in_chans=3), pretrained_cfg=larger),
        dict(model_args=dict(args, img_size=32), pretrained_cfg=dict(CONFIG["pretrained_cfg"], fixed_input_size=False)),
    ):
        changed(folder, **fields)
        assert torch.equal(VisionTransformer.from_pretrained(folder).eval()(x), expected(x))
    changed(folder, architecture="vit_relpos_base_patch16_224")  # which is not read if another is given
    given = VisionTransformer.from_pretrained(folder, "vit_small_patch8_32", num_classes=10, **args)
    assert torch.equal(given.eval()(x), expected(x))


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_pretrained(variant, tmp_path):
    pytest.importorskip("safetensors")
    options = VARIANTS[variant]
    model = model_of(**options)
    model.save_pretrained(tmp_path)
    kernels = {name: value for name, value in options.items() if name in FUSED}
    again = VisionTransformer.from_pretrained(tmp_path, **kernels).eval()
    x = images(model)
    assert torch.equal(again(x), model(x))
    again.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("variant", VARIANTS)
def test_timm_loads_what_is_saved(variant, tmp_path):
    timm = pytest.importorskip("timm")
    model = model_of(**VARIANTS[variant])
    model.save_pretrained(tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images(model)
    atol = 1e-2 if "fused_mlp" in VARIANTS[variant] else 1e-4  # which has tanh in its activation
    torch.testing.assert_close(theirs(x), model(x), rtol=0, atol=atol)


def test_what_else_a_config_has_is_kept(checkpoint, tmp_path):
    folder, _ = checkpoint
    model = VisionTransformer.from_pretrained(folder)
    for classes in (10, 4):
        model.head = nn.Linear(64, classes)
        model.save_pretrained(tmp_path / "ours")
        written = json.loads((tmp_path / "ours" / "config.json").read_text())
        assert written["architecture"] == "vit_tiny_patch16_224" and written["model_args"] == CONFIG["model_args"]
        assert written["pretrained_cfg"]["mean"] == [0.5, 0.4, 0.3]
        assert written["num_classes"] == written["pretrained_cfg"]["num_classes"] == classes
        assert written.get("label_names") == (CONFIG["label_names"] if classes == 10 else None)
        assert VisionTransformer.from_pretrained(tmp_path / "ours").head.out_features == classes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(norm_layer=nn.LayerNorm), "norm_layer must be left at its default to be saved for timm"),
        (dict(act_layer=nn.ReLU), "act_layer must be left at its default"),
    ],
    ids=["norm", "activation"],
)
def test_layers_that_a_config_cannot_describe(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        model_of(**options).save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("head", [nn.Sequential(nn.Linear(64, 5)), nn.Linear(64, 5, bias=False)], ids=["two", "bias"])
def test_heads_that_a_config_cannot_describe(head, tmp_path):
    model = model_of()
    model.head = head
    with pytest.raises(ValueError, match=r"head must be an nn.Linear with a bias, or nn.Identity, .* found"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(architecture="vit_base_patch16_clip_224"), "architecture must be vit_SIZE_patchN_M .* found 'vit_base_"),
        (dict(architecture=None), "architecture must be given, as the config.json of .* is not timm's and has none"),
        (dict(global_pool="avg"), "global_pool must be 'token', the one supported variant, found 'avg'"),
        (dict(model_args=dict(init_values=1e-5)), "init_values must be None, .* found 1e-05"),
        (dict(model_args=dict(reg_tokens=4)), "model_args must be among img_size, .* found 'reg_tokens'"),
        (dict(model_args=dict(act_layer="relu")), "model_args must be among img_size, .* found 'act_layer'"),
    ],
    ids=["architecture", "none", "pool", "variant", "tokens", "activation"],
)
def test_configs_that_are_not_covered(fields, message, checkpoint):
    folder, _ = checkpoint
    changed(folder, **fields)
    with pytest.raises(ValueError, match=message):
        VisionTransformer.from_pretrained(folder)


def test_checkpoints_without_what_is_needed(checkpoint):
    folder, _ = checkpoint
    with pytest.raises(TypeError, match="found 'use_flash_attention'; names like it: use_flash_attn"):
        VisionTransformer.from_pretrained(folder, use_flash_attention=True)
    (folder / "config.json").unlink()
    with pytest.raises(OSError, match=r"architecture must be given, as there is no config.json in .*"):
        VisionTransformer.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"was not found: none of model.safetensors, .* is there"):
        VisionTransformer.from_pretrained(folder, "vit_tiny_patch16_224")


def test_checkpoints_that_do_not_fit(checkpoint, caplog):
    """All of it in one error; with strict=False, what is missing is drawn as in a new model."""
    folder, expected = checkpoint
    with pytest.raises(ValueError, match=r"not known:\n    head.bias\n    head.weight"):
        VisionTransformer.from_pretrained(folder, num_classes=0)
    assert isinstance(VisionTransformer.from_pretrained(folder, num_classes=0, strict=False).head, nn.Identity)
    with pytest.raises(ValueError, match=r"architecture must be vit_SIZE_patchN_M of timm's, .* found 3"):
        VisionTransformer.from_pretrained(folder, 3)
    tensors = vit.inv_remap_state_dict_timm(expected.state_dict(), expected)
    del tensors["blocks.1.attn.proj.bias"], tensors["blocks.2.norm1.weight"], tensors["cls_token"]
    (folder / "model.safetensors").unlink()
    torch.save(tensors | {"fc_norm.weight": torch.zeros(64)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError) as error:
        VisionTransformer.from_pretrained(folder)
    for told in (
        "the checkpoint does not fit the model, a VisionTransformer:",
        "missing:\n    cls_token\n    blocks.1.mixer.out_proj.bias\n    blocks.2.norm1.weight",
        "not known:\n    fc_norm.weight",
    ):
        assert told in str(error.value)
    model = VisionTransformer.from_pretrained(folder, strict=False)
    assert "these keep their first, random weights:\n    cls_token" in caplog.text and "left out" in caplog.text
    assert (model.blocks[2].norm1.weight == 1).all() and model.cls_token.std() < 1e-5
    assert torch.equal(model.pos_embed, expected.pos_embed)
    torch.save(tensors | {"norm.bias": torch.zeros(64).int()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError) as error:
        VisionTransformer.from_pretrained(folder, num_classes=5, strict=False)
    assert "head.weight: expected (5, 64), found (10, 64)" in str(error.value)
    assert "norm.bias: expected a floating-point dtype, found torch.int32" in str(error.value)


@pytest.mark.parametrize(
    ("name", "pixels", "patch", "shape"),
    [
        ("deit_small_patch16_224", (224, 224), (16, 16), (1536, 384)),
        ("vit_base_patch16_384", (384, 384), (16, 16), (3072, 768)),
        ("vit_giant_patch14_224", (224, 224), (14, 14), (6144, 1408)),
        ("vit_gigantic_patch14_224", (224, 224), (14, 14), (8192, 1664)),
    ],
)
def test_sizes_by_name(name, pixels, patch, shape):
    with torch.device("meta"):
        model = VisionTransformer(**vit.checkpoints.sizes_of(name) | dict(depth=1))
    assert (model.patch_embed.img_size, model.patch_embed.patch_size) == (pixels, patch)
    assert model.blocks[0].mlp.fc1.weight.shape == shape


# ---------------------------------------------------------------------------------------------------------------------
# Options and inputs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(global_pool="avg"), "global_pool must be 'token', the one supported variant, found 'avg'"),
        (dict(init_values=1e-5), "init_values must be None, .* found 1e-05"),
        (dict(class_token=False), "class_token must be True, .* found False"),
        (dict(pre_norm=True), "pre_norm must be False, .* found True"),
        (dict(fc_norm=True), "fc_norm must be None, .* found True"),
        (dict(weight_init="jax"), "weight_init must be '', .* found 'jax'"),
        (dict(depth=0), "depth must be at least 1, found 0"),
        (
            dict(act_layer=nn.SiLU, fused_mlp=True),
            r"act_layer must give an nn.GELU or nn.ReLU with fused_mlp, found SiLU",
        ),
        (dict(img_size=30), "img_size must be a multiple of patch_size, 8, found 30"),
        (dict(num_heads=5), "embed_dim must be a multiple of num_heads, 5, found 64"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_is_not_covered(options, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**SIZES | options)


def test_other_ways_to_draw_parameters_are_refused():
    with pytest.raises(ValueError, match=r"weight_init must be '', .* found 'jax'"):
        model_of().init_weights("jax")


def test_other_activations():
    for options, activation in ((dict(act_layer=nn.ReLU), "relu"), (dict(act_layer=nn.GELU), "gelu_approx")):
        fused = VisionTransformer(**SIZES, **options, fused_mlp=True)
        assert {block.mlp.activation for block in fused.blocks} == {activation}
    relu = VisionTransformer(**SIZES, act_layer=nn.ReLU)
    fused = VisionTransformer(**SIZES, act_layer=nn.ReLU, fused_mlp=True)
    fused.load_state_dict(relu.state_dict())
    x = images(relu)
    torch.testing.assert_close(fused(x), relu(x), rtol=1e-4, atol=1e-4)


def test_images_of_another_size():
    model = model_of()
    with pytest.raises(ValueError, match=r"x must have shape \(\*, 3, 32, 32\), found \(2, 3, 32, 31\)"):
        model(torch.randn(2, 3, 32, 31))


SIGNATURES = {
    "VisionTransformer": (
        "img_size=224 patch_size=16 in_chans=3 num_classes=1000 global_pool='token' embed_dim=768 depth=12 "
        "num_heads=12 mlp_ratio=4.0 qkv_bias=True init_values=None class_token=True no_embed_class=False "
        "pre_norm=False fc_norm=None drop_rate=0.0 attn_drop_rate=0.0 drop_path_rate=0.0 weight_init='' embed_layer "
        "norm_layer=None act_layer=None use_flash_attn=False fused_bias_fc=False fused_mlp=False "
        "fused_dropout_add_ln=False"
    ),
    "VisionTransformer.init_weights": "self mode=''",
    "VisionTransformer._pos_embed": "self x",
    "VisionTransformer.forward_features": "self x all_tokens=True",
    "VisionTransformer.forward_head": "self x pre_logits=False",
    "VisionTransformer.load_state_dict": "self state_dict strict=True assign=False",
    "init_weights_vit_timm": "module name=''",
    "vit_base_patch16_224": "pretrained=False kwargs",
    "create_mixer_cls": "num_heads qkv_bias attn_drop use_flash_attn fused_bias_fc cross_attn=False",
    "create_mlp_cls": "embed_dim mlp_ratio act_layer fused_mlp",
    "create_block": (
        "embed_dim num_heads mlp_ratio qkv_bias drop_rate attn_drop_rate drop_path1 drop_path2 norm_layer act_layer "
        "use_flash_attn fused_bias_fc fused_mlp fused_dropout_add_ln layer_idx=None n_layer=None "
        "last_layer_subset=False"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(functools.reduce(getattr, name.split("."), vit)).parameters.values()
    found = [
        p.name if p.default is p.empty or isinstance(p.default, type) else f"{p.name}={p.default!r}" for p in parameters
    ]
    assert " ".join(found) == SIGNATURES[name]


# ---------------------------------------------------------------------------------------------------------------------
# Graphs, the meta device, autocast


@pytest.mark.parametrize("variant", ["plain", pytest.param("flash", marks=pytest.mark.slow), "fused"])
def test_compiles_whole(variant):
    model = model_of(**VARIANTS[variant], depth=1)
    x = images(model)
    results = []
    for function in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
        model.zero_grad()
        logits = function(x)
        logits.square().sum().backward()
        results.append((logits, {name: parameter.grad for name, parameter in model.named_parameters()}))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_meta_device():
    with torch.device("meta"):
        model = VisionTransformer(**SIZES, **FUSED, drop_path_rate=0.1)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.eval()(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)


@pytest.mark.parametrize("variant", ["plain", "flash", "fused"])
def test_autocast(variant, device):
    model = VisionTransformer(**SIZES | VARIANTS[variant])
    x = images(model)
    expected = model(x)
    model, x = model.to(device), x.to(device)
    with torch.autocast(device.type, torch.bfloat16):
        found = model(x)
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    torch.testing.assert_close(found.float().cpu(), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.cuda
def test_compiles_with_inductor(device):
    model = VisionTransformer(**SIZES, **FUSED).to(device)
    x = images(model)
    with torch.autocast("cuda", torch.bfloat16):
        found, expected = torch.compile(model, fullgraph=True)(x), model(x)
    found.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
