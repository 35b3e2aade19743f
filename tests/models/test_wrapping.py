"""State dicts are found by structure: wrapped, beside a normaliser, under any key; several that
differ are a question. Names with parts added are read as the network that they are, or refused by the
file's name of the cause.
"""

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.system.errors import ArchitectureError, CheckpointError
from tests.models.test_converters import STATISTICS, TRANSFORMERS, transformers_folder

ARCH = "vit_tiny_patch16_224"
SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
HINTS = Hints(ARCH, SMALL, (0.5,), (0.5,))
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module", name="tensors")
def network_tensors() -> Tensors:
    torch.manual_seed(0)
    return wrapped_network()


def wrapped_network(**arguments: Any) -> Tensors:
    arch = arguments.pop("arch", ARCH)
    arguments = {**SMALL, "num_classes": 10, **arguments}
    return dict(build.create(arch, arguments, initialise=True).state_dict())


def opened_wrapping(
    content: Any, folder: Path, hints: Hints = HINTS, suffix: str = ".pth"
) -> build.OpenCheckpoint:
    torch.save(content, folder / f"x{suffix}")
    return open_checkpoint(str(folder / f"x{suffix}"), hints)


WRAPPINGS = {
    "model_state": lambda s: {"model_state": s, "config": {}, "image_size": 32},
    "a list of one": lambda s: {"state_dict": [s], "err": 0.1},
    "any key": lambda s: {"weights_of_mine": s},
    "two levels": lambda s: {"trainer": {"net": s}, "epoch": 3},
    "with an optimiser": lambda s: {
        "net": s,
        "optimizer": {"state": {0: {"exp_avg": s["pos_embed"]}}, "param_groups": [{"lr": 0.1}]},
    },
    "with a small loss": lambda s: {"net": s, "loss": {"center": torch.zeros(1, 24)}},
    "the same twice": lambda s: {"model": s, "best": {k: v.clone() for k, v in s.items()}},
    "lightning": lambda s: {
        "state_dict": {f"model.{k}": v for k, v in s.items()},
        "hyper_parameters": {"lr": 0.1},
        "callbacks": {},
    },
    "nested": lambda s: {"model_ema": {"state_dict": {f"encoder.{k}": v for k, v in s.items()}}},
    "any prefix": lambda s: {f"whatever.{k}": v for k, v in s.items()},
    "two prefixes": lambda s: {f"module.classifier_net.{k}": v for k, v in s.items()},
}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_wrapped_weights_are_read(name: str, tensors: Tensors, tmp_path: Path) -> None:
    suffix = ".ckpt" if name == "lightning" else ".pth.tar"
    read = opened_wrapping(WRAPPINGS[name](tensors), tmp_path, suffix=suffix)
    assert read.tensors.keys() == tensors.keys()
    assert all(torch.equal(read.tensors[key], value) for key, value in tensors.items())
    assert read.reading.doubts == ()


def test_two_networks_in_one_file_are_a_question(tensors: Tensors, tmp_path: Path) -> None:
    other = {key: 1.5 * value for key, value in tensors.items()}
    content = {"model": tensors, "model_state_dict": other, "epoch": 3}
    with pytest.raises(ArchitectureError, match="'model', 'model_state_dict': which") as caught:
        opened_wrapping(content, tmp_path)
    assert caught.value.hint == "--weights model"
    chosen = Hints(ARCH, SMALL, (0.5,), (0.5,), weights="model_state_dict")
    assert torch.equal(
        opened_wrapping(content, tmp_path, chosen).tensors["pos_embed"], other["pos_embed"]
    )
    with pytest.raises(ArchitectureError, match="no weights 'x'"):
        opened_wrapping(content, tmp_path, Hints(ARCH, SMALL, weights="x"))


def test_a_file_without_tensors_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'epoch', 'a\?b', and none"):
        opened_wrapping({"epoch": 3, "a\x1bb": "text"}, tmp_path)


NORMALISED = {
    "buffers": ("", "mean", "std", "model."),
    "a module": ("", "normalize.mean", "normalize.std", "model."),
    "Sequential": ("", "0.mean", "0.std", "1."),
    "mu and sigma": ("", "mu", "sigma", ""),
    "within module.": ("module.", "normalizer.mean", "normalizer.std", "net."),
}


@pytest.mark.parametrize("name", NORMALISED)
def test_the_normaliser_around_a_network_gives_the_statistics(
    name: str, tensors: Tensors, tmp_path: Path
) -> None:
    outer, mean_name, std_name, inner = NORMALISED[name]
    mean = torch.tensor([0.1, 0.2, 0.3])
    std = torch.tensor([0.25, 0.5, 0.75])
    content = {outer + mean_name: mean.view(1, 3, 1, 1), outer + std_name: std.view(1, 3, 1, 1)}
    content |= {outer + inner + key: value for key, value in tensors.items()}
    read = opened_wrapping(content, tmp_path, Hints(ARCH, SMALL))
    model = build.create(ARCH, {**SMALL, "num_classes": 10}, initialise=True)
    model.load_state_dict(tensors)
    pixels = torch.rand(2, 3, 16, 16)
    expected = model((pixels - mean.view(-1, 1, 1)) / std.view(-1, 1, 1))
    torch.testing.assert_close(build.load(read)(pixels), expected)
    assert f"the file's '{mean_name}'" in read.reading.line()
    other = opened_wrapping(content, tmp_path, HINTS)
    assert any("--mean says 0.5" in doubt for doubt in other.reading.doubts)
    assert other.record.input.mean == (0.5,) * 3


def test_a_normaliser_of_another_scale_is_named(tensors: Tensors, tmp_path: Path) -> None:
    content = {"mean": torch.full((3,), 127.5), "std": torch.full((3,), 127.5)}
    content |= {f"model.{key}": value for key, value in tensors.items()}
    with pytest.raises(ArchitectureError, match=r"normaliser.*127\.5.*another scale"):
        opened_wrapping(content, tmp_path)


ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "dist_token": ({"arch": "deit_tiny_distilled_patch16_224"}, "deit_tiny_distilled_patch16_224"),
    "reg_token": ({"reg_tokens": 2}, "reg_tokens=2"),
    "fc_norm.weight": ({"global_pool": "avg"}, "global_pool=avg"),
    "ls1.gamma": ({"init_values": 0.1}, "init_values=1e-5"),
    "q_norm.weight": ({"qk_norm": True}, "qk_norm=true"),
    "patch_embed.proj.weight": ({"in_chans": 1}, "in_chans=1"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_hint_follows_from_the_tensors_and_reads_the_file(name: str, tmp_path: Path) -> None:
    """The hint of a file that does not fit is typed, and then it fits."""
    arguments, advised = ADVICE[name]
    with pytest.raises(ArchitectureError, match=name) as caught:
        opened_wrapping(wrapped_network(**copy.copy(arguments)), tmp_path)
    assert advised in caught.value.hint
    arch = ARCH
    given = dict(SMALL)
    for option in caught.value.hint.split("--")[1:]:
        kind, value = option.split()
        if kind == "arch":
            arch = value
        else:
            key, _, text = value.partition("=")
            given[key] = {"true": True, "avg": "avg"}.get(text) or float(text)
            given[key] = (
                int(given[key]) if key in ("reg_tokens", "in_chans", "embed_dim") else given[key]
            )
    opened_wrapping(wrapped_network(**arguments), tmp_path, Hints(arch, given, (0.5,), (0.5,)))


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 110367416\n"
    for name in ("model.safetensors", "pytorch_model.bin", "x.pth"):
        (tmp_path / name).write_text(text)
        with pytest.raises(CheckpointError, match=r"git-lfs.*110,367,416") as caught:
            open_checkpoint(str(tmp_path / name), HINTS)
        assert "git lfs pull" in caught.value.hint


Wrap = Callable[[Tensors], dict[str, Any]]
QKV = "blocks.0.attn.qkv."
ONE = torch.ones(1)


def under(prefix: str) -> Wrap:
    return lambda state: {prefix + name: value for name, value in state.items()}


def within_module(part: str, *, at: str = "blocks.0.") -> Wrap:
    return lambda state: {name.replace(at, f"{at}{part}."): value for name, value in state.items()}


def head_as(prefix: str, rest: str = "") -> Wrap:
    return lambda state: {
        f"{prefix}.{name[5:]}" if name.startswith("head.") else rest + name: value
        for name, value in state.items()
    }


def with_more(prefix: str = "", **more: Tensor) -> Wrap:
    """The network under a prefix, and tensors; `__` stands for a dot."""
    added = {name.replace("__", "."): value for name, value in more.items()}
    return lambda state: {**under(prefix)(state), **added}


def weight_normed(first: str, second: str) -> Wrap:
    def wrap(state: Tensors) -> Tensors:
        rest = {name: value for name, value in state.items() if name != "head.weight"}
        weight = state["head.weight"]
        return {**rest, first: weight.norm(dim=1, keepdim=True), second: 2 * weight}

    return wrap


READ: dict[str, tuple[Wrap, str]] = {
    **{
        prefix: (under(prefix), f"without '{prefix}'")
        for prefix in (
            *("module.", "_orig_mod.", "model.", "net.", "backbone.", "student.", "encoder.", "0."),
            *("base_model.model.", "module.model.", "a.b.c.model."),
            "vit.pytorch_model.",
        )
    },
    **{
        prefix: (under(prefix), "")
        for prefix in (
            *("_orig_mod.module.", "module._orig_mod.", "_forward_module.model._orig_mod."),
            "_fsdp_wrapped_module._checkpoint_wrapped_module.",
        )
    },
    "FSDP in a block": (within_module("_fsdp_wrapped_module"), ""),
    "checkpoints in a block": (within_module("_checkpoint_wrapped_module"), ""),
    "a word in a block": (within_module("wrapped"), "'blocks.0.wrapped."),
    "compiled attention": (within_module("_orig_mod", at="attn."), ""),
    "the head beside": (head_as("head", "backbone."), ""),
    "the head in a Sequential": (head_as("head.1"), "'head.1."),
    "both": (head_as("model.head.1", "model.backbone."), "'model.head.1."),
    "thop": (with_more(total_ops=0 * ONE, blocks__0__total_params=ONE), "'blocks.0.total_params'"),
    "SWA": (with_more("module.", n_averaged=torch.tensor(7)), "'n_averaged'"),
    "Lightning": (with_more("model.", criterion__weight=torch.ones(5)), "'criterion.weight'"),
    "deep": (with_more("a.model.", a__loss_fn__weight=ONE, train_acc__tp=ONE), "'a.loss_fn.weight'"),
    "weight norm": (weight_normed(*(f"head.parametrizations.weight.original{i}" for i in (0, 1))), "'head.weight'"),
    "weight norm of old": (weight_normed("head.weight_g", "head.weight_v"), "'head.weight'"),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_added_parts_are_taken_off_and_said(name: str, tensors: Tensors, tmp_path: Path) -> None:
    wrap, said = READ[name]
    read = opened_wrapping(wrap(tensors), tmp_path)
    assert read.tensors.keys() == tensors.keys()
    for key, value in tensors.items():
        tolerance = 2**-22 if "norm" in name and key == "head.weight" else 0.0  # its two roundings
        torch.testing.assert_close(read.tensors[key], value, rtol=tolerance, atol=0.0)
    assert said in " ".join((read.reading.line(), *read.reading.doubts))


@pytest.mark.parametrize("classes", [3, 10])
def test_the_classes_of_a_wrapped_head_are_counted(classes: int, tmp_path: Path) -> None:
    read = opened_wrapping(
        head_as("head.1", "backbone.")(wrapped_network(num_classes=classes)), tmp_path
    )
    assert read.record.classes == classes


def in_two_keys(first: str, second: str) -> Wrap:
    return lambda state: {
        first: state,
        second: {name: value + 1 for name, value in state.items()},
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1),
    }


def under_two_names(first: str, second: str) -> Wrap:
    return lambda state: {
        **under(first)(state),
        **under(second)({name: value + 1 for name, value in state.items()}),
    }


REFUSED: dict[str, tuple[Wrap, str]] = {
    "student and teacher": (under_two_names("student.", "teacher."), "'student'.*'teacher'"),
    "raw and averaged": (in_two_keys("model", "model_ema"), "which network is meant"),
    "model and ema": (under_two_names("model.", "ema."), "'model'.*'ema'"),
    "a copy beside": (under_two_names("", "ema_model."), "'ema_model'"),
    "two of nobody's names": (under_two_names("first.", "second."), "'first', 'second'"),
    "two, deep": (under_two_names("a.first.", "a.second."), "'a/first', 'a/second'|'first', 'second'"),
    "LoRA of PEFT": (
        with_more("base_model.model.", **{f"base_model__model__{QKV}lora_A__default__weight": torch.ones(2, 24)}),
        "lora_A.*merged",
    ),
    "LoRA by another name": (with_more(**{f"{QKV}linear_a_q__weight": torch.ones(2, 24)}), "linear_a_q"),
    "an adapter with a base layer": (
        within_module("base_layer", at=QKV), "base_layer.*merged"
    ),
    "an adapter in a block": (with_more(blocks__0__adapter__down__weight=torch.ones(2, 24)), "adapter.down"),
    "a temperature": (with_more("model.", temperature=ONE), "'temperature'"),
    "another head": (with_more("model.", aux__weight=torch.ones(5, 24)), "'aux.weight'"),
    "two layers of the head": (
        lambda state: {**head_as("head.1")(state), "head.3.weight": torch.ones(10, 10)}, "head.1.weight.*head.3.weight"
    ),
    "a norm in the block's loss": (with_more(blocks__0__loss__weight=torch.ones(24)), "blocks.0.loss"),
    "a norm of a block": (
        lambda state: {
            **{name: value for name, value in state.items() if not name.startswith("norm.")},
            **{f"blocks.0.{name}": value for name, value in state.items() if name.startswith("norm.")},
        },
        "blocks.0.norm",
    ),
    "a norm twice": (
        lambda state: {**under("backbone.")(state), "norm.weight": ONE}, "'backbone.norm.weight' and 'norm.weight'"
    ),
    "one name by two wrappers": (with_more(_a__cls_token=ONE), "'cls_token' and '_a.cls_token'"),
    "a count that is none": (with_more(global_scale=1.5 * ONE), "global_scale"),
    "a flat shard": (lambda state: {"_fsdp_wrapped_module._flat_param": torch.ones(99)}, "_flat_param.*FSDP"),
    "pruned": (
        lambda state: {
            **{name: value for name, value in state.items() if name != "head.weight"},
            "head.weight_orig": state["head.weight"], "head.weight_mask": torch.ones(10, 24),
        },
        "head.weight_mask.*pruned",
    ),
    "scales": (with_more(head__weight_scale=ONE), "head.weight_scale.*quantised"),
    "spectral norm": (with_more(head__parametrizations__weight__0___u=torch.ones(10)), "parametrizations.*parametrized"),
    "half of it": (lambda state: {name: value for name, value in state.items() if "mlp" not in name}, "mlp.fc1"),
}  # fmt: skip


@pytest.mark.parametrize("by", ["--arch", "config.json"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_may_change_the_function_is_refused_by_its_name(
    name: str, by: str, tensors: Tensors, tmp_path: Path
) -> None:
    """The hint is made from what the file has, whoever named the architecture."""
    wrap, named = REFUSED[name]
    config = {"architecture": HINTS.arch, "num_classes": 10, "model_args": dict(HINTS.arch_args)}
    config["pretrained_cfg"] = {"mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 16, 16]}
    if by == "config.json":
        (tmp_path / by).write_text(json.dumps(config))
    with pytest.raises(ArchitectureError, match=named) as refused:
        opened_wrapping(wrap(tensors), tmp_path, HINTS if by == "--arch" else Hints())
    hint = refused.value.hint.lower()
    assert hint
    assert name != "raw and averaged" or "--weights ema" in hint
    assert "name the architecture" not in hint  # it is named
    assert "--arch" not in hint


CHOSEN = {
    "first": under_two_names("first.", "second."),
    "second": under_two_names("first.", "second."),
    "raw": under_two_names("", "ema_model."),
    "ema": under_two_names("", "ema_model."),
    "ema, inside": under_two_names("net.", "net.ema."),
    "raw, by its key": in_two_keys("model", "model_ema"),
    "ema, by its key": in_two_keys("model", "model_ema"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_network_of_two_is_chosen(name: str, tensors: Tensors, tmp_path: Path) -> None:
    weights_of = name.partition(",")[0]
    read = opened_wrapping(CHOSEN[name](tensors), tmp_path, replace(HINTS, weights=weights_of))
    expected = tensors["pos_embed"] + (weights_of in ("second", "ema"))
    assert torch.equal(read.tensors["pos_embed"], expected)


HEADS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "heads": (lambda: nn.Linear(24, 3), ""),
    "a Sequential": (lambda: nn.Sequential(nn.Dropout(), nn.Linear(24, 3)), "'heads.1.weight'"),
    "a Sequential of one": (lambda: nn.Sequential(nn.Linear(24, 3)), ""),
}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "net.vit."])
@pytest.mark.parametrize("name", HEADS)
def test_a_new_head_of_torchvision_is_read(name: str, prefix: str, tmp_path: Path) -> None:
    make, said = HEADS[name]
    theirs = VisionTransformer(16, 8, 1, 2, 24, 48, num_classes=9).eval()
    theirs.heads = make().eval()  # type: ignore[assignment]
    content = {**under(prefix)(dict(theirs.state_dict())), "criterion.weight": torch.ones(3)}
    read = opened_wrapping(content, tmp_path, Hints(None, {"num_heads": 2}, **STATISTICS))
    pixels = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in STATISTICS.values())
    torch.testing.assert_close(
        build.load(read).double()(pixels), theirs.double()((pixels - mean) / std)
    )
    line = " ".join((read.reading.line(), *read.reading.doubts))
    assert said in line
    assert "'criterion.weight'" in line


@pytest.mark.parametrize("kind", ["Siglip", "CLIP", "MobileViT", "Pvt", "ResNet", "MyOwn"])
def test_a_config_of_transformers_names_the_family(kind: str, tmp_path: Path) -> None:
    about: dict[str, Any] = {"architectures": [f"{kind}ForImageClassification"]}
    about |= {"model_type": kind.lower(), "hidden_act": None}
    tensors = {f"{kind.lower()}.conv.weight": ONE, "classifier.weight": 2 * ONE}
    folder = transformers_folder(TRANSFORMERS["vit"], tmp_path, tensors=tensors, **about)
    with pytest.raises(ArchitectureError, match=f"{kind}ForImageClassification") as refused:
        open_checkpoint(folder, Hints())
    assert "timm" not in f"{refused.value.message} {refused.value.hint}"
