"""Outputs of transformers' networks on weights that names and shapes decide, for
tests/models/test_converters.py.

make test-converters     # asks transformers itself, in an environment of its own; prints the table of docs/checkpoints.md
python -m tests.models.transformers_logits --write      # after a new row
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from certcli.lipschitz.network import prove_checkpoint
from certcli.models import build
from certcli.models.in_memory import open_module
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints

FILE = Path(__file__).with_name("transformers_logits.json")
PIXELS = {
    "image_mean": [0.5, 0.375, 0.25],
    "image_std": [0.25, 0.5, 0.75],
    "resample": 3,
}  # binary fractions
_TOKENS = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 8, "num_labels": 3,
}  # fmt: skip
_DINO = {key: value for key, value in _TOKENS.items() if key != "intermediate_size"} | {
    "mlp_ratio": 2
}
_SWIN = {
    "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4,
    "num_labels": 3,
}  # fmt: skip
_CONVNEXT = {
    "hidden_sizes": [4, 6, 8, 10],
    "depths": [1, 1, 2, 1],
    "image_size": 32,
    "num_labels": 3,
}
ROWS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", _TOKENS),
    "vit, tanh, no bias": ("ViT", {**_TOKENS, "hidden_act": "gelu_new", "qkv_bias": False}),
    "deit": ("DeiT", _TOKENS),
    "deit, two heads": ("DeiT/WithTeacher", _TOKENS),
    "vit_msn": ("ViTMSN", _TOKENS),
    "beit": ("Beit", {**_TOKENS, "use_relative_position_bias": True}),
    "beit, shared": (
        "Beit",
        {
            **_TOKENS,
            "use_shared_relative_position_bias": True,
            "use_absolute_position_embeddings": True,
        },
    ),
    "dinov2": ("Dinov2", _DINO),
    "dinov2, registers": ("Dinov2WithRegisters", {**_DINO, "num_register_tokens": 2}),
    "swin": ("Swin", _SWIN),
    "swinv2": ("Swinv2", _SWIN),
    "swinv2, a window larger than a stage": ("Swinv2", {**_SWIN, "image_size": 16}),
    "swinv2, another window": ("Swinv2", {**_SWIN, "pretrained_window_sizes": [6, 6]}),
    "convnext": ("ConvNext", _CONVNEXT),
    "convnextv2": ("ConvNextV2", _CONVNEXT),
}


def weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return float32 tensors of the shapes, decided by their names' order alone; scales of norms
    lie around 1.
    """
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in sorted(shapes):
        value = torch.randn(tuple(shapes[name]), generator=generator)
        scale = "norm" in name and name.endswith("weight")
        found[name] = 1 + 0.2 * value if scale else 0.3 * value
    return found


def seeded_images(size: Sequence[int]) -> Tensor:
    return torch.rand(2, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def headless(row: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a classifier's row as the file of its model without a classifier names
    them.
    """
    prefix = row["config"]["model_type"].removesuffix("_msn") + "."
    found = weights(row["shapes"])
    return {
        name.removeprefix(prefix): value
        for name, value in found.items()
        if "classifier" not in name
    }


def normalised(pixels: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(PIXELS[f"image_{name}"], dtype=torch.float64).view(-1, 1, 1)
        for name in ("mean", "std")
    )
    return (pixels - mean) / std


def features(network: Any, inputs: Tensor) -> Tensor:
    """Return the features of transformers' network: its pooled output where no layer of its own
    computes it.
    """
    found = network(inputs)
    dense = getattr(getattr(network, "pooler", None), "dense", None) is not None
    pooled = None if dense else getattr(found, "pooler_output", None)
    return found.last_hidden_state[:, 0] if pooled is None else pooled


def transformers_network(
    kind: str, arguments: Mapping[str, Any], folder: Path, model: bool = False
) -> nn.Module:
    """Save transformers' network as a file, put our weights into that file, and return the network
    that reads it.

    Args:
        model: The one without a classifier.
    """
    import transformers
    from safetensors.torch import load_file, save_file

    family, _, suffix = kind.partition("/")
    network = getattr(
        transformers, f"{family}Model" if model else f"{family}ForImageClassification{suffix}"
    )
    network(getattr(transformers, f"{family}Config")(**arguments)).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(
        weights({name: value.shape for name, value in load_file(file).items()}),
        file,
        {"format": "pt"},
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return network.from_pretrained(folder).eval().double()


def _transformers_answer(kind: str, arguments: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    network: Any = transformers_network(kind, arguments, folder)
    config = json.loads((folder / "config.json").read_text())
    inputs = normalised(seeded_images((3, config["image_size"], config["image_size"])))
    with torch.no_grad():
        found = {"logits": network(inputs).logits, "features": features(network.base_model, inputs)}
    shapes = {
        name: list(value.shape) for name, value in load_file(folder / "model.safetensors").items()
    }
    row = {
        "config": config,
        "shapes": shapes,
        **{name: value.tolist() for name, value in found.items()},
    }
    transformers_network(kind, arguments, folder / "headless", model=True)
    other = load_file(folder / "headless" / "model.safetensors").keys() ^ headless(row).keys()
    assert other <= {"pooler.dense.weight", "pooler.dense.bias"}, (
        f"{kind} without a classifier: {other}"
    )
    return row


class Tried(NamedTuple):
    """A file that was recognised: its outputs beside the original's, and its bound beside that of
    timm's module.
    """

    kind: str
    difference: float
    bound: float


def _tried(
    kind: str,
    path: str,
    hints: Hints,
    original: Callable[[Tensor], Tensor],
    own: nn.Module | None = None,
) -> Tried:
    """Read a file, and compare it with its original.

    Args:
        original: Pixels -> logits or features, by the library that wrote the file.
        own: timm's module, where the file was made of its weights; else a new one gets the
            converted weights.
    """
    found = open_checkpoint(path, hints)
    spec = found.record.input
    model = build.load(found, dtype=torch.float64)
    if own is None:
        own = build.build(found.record)
        own.load_state_dict(found.tensors)
    timms = open_module(own, spec.mean, spec.std, spec.size, features=hints.features)
    here, there = (prove_checkpoint(each).upper for each in (found, timms))
    assert here.finite
    apart = 0.0 if here == there else abs(10 ** (here.log10() - there.log10()) - 1)
    with torch.no_grad():
        difference = float(
            (model(seeded_images(spec.size)) - original(seeded_images(spec.size))).abs().max()
        )
    return Tried(kind, difference, apart)


def _of_transformers(name: str, folder: Path) -> Iterator[Tried]:
    kind, arguments = ROWS[name]
    family = "transformers: " + kind.partition("/")[0]
    whole: Any = transformers_network(kind, arguments, folder / "classifier")
    yield _tried(
        family, str(folder / "classifier"), Hints(), lambda pixels: whole(normalised(pixels)).logits
    )
    part = transformers_network(kind, arguments, folder / "model", model=True)
    yield _tried(
        family,
        str(folder / "model"),
        Hints(features=True),
        lambda pixels: features(part, normalised(pixels)),
    )


def _of_others(folder: Path) -> Iterator[Tried]:
    import timm

    from tests.models import test_converters as cases

    def timms(
        arch: str, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[nn.Module, Any]:
        net = timm.create_model(arch, **{"num_classes": 3, **arguments}).eval()
        net.load_state_dict(tensors)
        double = build.load(open_module(net), dtype=torch.float64)
        return net, double

    tiny = "vit_tiny_patch16_224"
    raw = cases.plain()
    averaged = {name: value + 1 for name, value in cases.plain().items()}
    for wrap in cases.WRAPPINGS.values():
        torch.save(wrap(), folder / "weights.ckpt")
        net, double = timms(tiny, cases.SMALL, raw)
        yield _tried(
            "timm, wrapped", str(folder / "weights.ckpt"), Hints(tiny, cases.SMALL), double, net
        )
    torch.save({"model": raw, "model_ema": averaged}, folder / "both.pth")
    for choice, tensors in (("raw", raw), ("ema", averaged)):
        net, double = timms(tiny, cases.SMALL, tensors)
        hints = Hints(tiny, cases.SMALL, weights=choice)  # type: ignore[arg-type]
        yield _tried(
            "timm, `--weights raw` and `ema`", str(folder / "both.pth"), hints, double, net
        )
    for name, (arch, arguments, names) in cases.ORIGINAL.items():
        net, double = timms(arch, arguments, cases.original_network(name).state_dict())
        path = cases.saved(folder, {"model": names(dict(net.state_dict()))})
        yield _tried(f"original names: {name}", path, Hints(arch, arguments), double, net)
    for name, (make, hints) in cases.TORCHVISION.items():
        theirs = make().eval()
        theirs.load_state_dict(
            weights({key: value.shape for key, value in theirs.named_parameters()}), strict=False
        )
        path = cases.saved(folder, dict(theirs.state_dict()))
        double = theirs.double()
        yield _tried(
            f"torchvision: {name}", path, hints, lambda pixels, of=double: of((pixels - 0.5) / 0.25)
        )


def logits_table() -> list[str]:
    """Return the lines of the table of docs/checkpoints.md: all files of a kind in one row."""
    found: list[Tried] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ROWS:
            found += _of_transformers(name, Path(folder) / name)
        found += _of_others(Path(folder))
    lines = [
        "| file | recognised and converted | largest difference of logits or features | bound |",
        "|---|---|---|---|",
    ]
    for kind in dict.fromkeys(each.kind for each in found):
        rows = [each for each in found if each.kind == kind]
        apart = max(each.bound for each in rows)
        difference = max(each.difference for each in rows)
        lines.append(
            f"| {kind} | {len(rows)} | "
            f"{f'{difference:.0e}' if difference else '0'} | {f'{apart:.0e} apart' if apart else 'equal'} |"
        )
    return lines


def main_of_transformers() -> None:
    import transformers

    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    found = {}
    for name, (kind, arguments) in ROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = _transformers_answer(kind, arguments, Path(folder))
        if "--write" not in sys.argv:
            assert found[name]["shapes"] == known[name]["shapes"], f"{name}: other tensors"
            for output in ("logits", "features"):
                expected, here = (
                    torch.tensor(part[name][output], dtype=torch.float64) for part in (known, found)
                )
                torch.testing.assert_close(here, expected, rtol=1e-9, atol=1e-9)
            print(f"{name}: as in {FILE.name}")
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(found, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    else:
        print("\n".join(logits_table()))
    print(f"transformers {transformers.__version__}: {len(found)} networks")


if __name__ == "__main__":
    main_of_transformers()
