"""Outputs of transformers' networks on weights that names and shapes decide, for
tests/models/test_converters.py.

make test-converters     # asks transformers itself, in an environment of its own
python -m tests.models.transformers_logits --write      # after a new row
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
    print(f"transformers {transformers.__version__}: {len(found)} networks")


if __name__ == "__main__":
    main_of_transformers()
