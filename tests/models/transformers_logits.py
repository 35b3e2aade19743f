"""Logits of transformers' image classifiers on weights that names and shapes decide, for tests/models/test_converters.py.

make test-converters     # asks transformers itself, in an environment of its own, and compares with the file
python tests/models/transformers_logits.py --write      # after a new row
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_name("transformers_logits.json")
PIXELS = {"image_mean": [0.5, 0.375, 0.25], "image_std": [0.25, 0.5, 0.75], "resample": 3}  # binary fractions
_TOKENS = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 8, "num_labels": 3,
}  # fmt: skip
_DINO = {key: value for key, value in _TOKENS.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
_SWIN = {
    "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4,
    "num_labels": 3,
}  # fmt: skip
ROWS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", _TOKENS),
    "vit, tanh, no bias": ("ViT", {**_TOKENS, "hidden_act": "gelu_new", "qkv_bias": False}),
    "deit": ("DeiT", _TOKENS),
    "deit, two heads": ("DeiT/WithTeacher", _TOKENS),
    "vit_msn": ("ViTMSN", _TOKENS),
    "beit": ("Beit", {**_TOKENS, "use_relative_position_bias": True}),
    "beit, shared": (
        "Beit",
        {**_TOKENS, "use_shared_relative_position_bias": True, "use_absolute_position_embeddings": True},
    ),
    "dinov2": ("Dinov2", _DINO),
    "dinov2, registers": ("Dinov2WithRegisters", {**_DINO, "num_register_tokens": 2}),
    "swin": ("Swin", _SWIN),
    "swinv2": ("Swinv2", _SWIN),
    "swinv2, a window larger than a stage": ("Swinv2", {**_SWIN, "image_size": 16}),
    "swinv2, another window": ("Swinv2", {**_SWIN, "pretrained_window_sizes": [6, 6]}),
    "convnext": (
        "ConvNext",
        {"hidden_sizes": [4, 6, 8, 10], "depths": [1, 1, 2, 1], "image_size": 32, "num_labels": 3},
    ),
}


def weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return float32 tensors of the shapes, decided by their names' order alone; scales of norms lie around 1."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in sorted(shapes):
        value = torch.randn(tuple(shapes[name]), generator=generator)
        scale = "norm" in name and name.endswith("weight")
        found[name] = 1 + 0.2 * value if scale else 0.3 * value
    return found


def images(size: Sequence[int]) -> Tensor:
    return torch.rand(2, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _answer(kind: str, arguments: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Save transformers' network as a file, put our weights into that file, and ask the network that reads it."""
    import transformers
    from safetensors.torch import load_file, save_file

    family, _, suffix = kind.partition("/")
    network = getattr(transformers, f"{family}ForImageClassification{suffix}")
    network(getattr(transformers, f"{family}Config")(**arguments)).save_pretrained(folder)
    file = folder / "model.safetensors"
    shapes = {name: list(value.shape) for name, value in load_file(file).items()}
    save_file(weights(shapes), file, {"format": "pt"})
    model = network.from_pretrained(folder).eval().double()
    config = json.loads((folder / "config.json").read_text())
    size = (3, config["image_size"], config["image_size"])
    mean, std = (torch.tensor(PIXELS[f"image_{name}"], dtype=torch.float64).view(-1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        logits = model((images(size) - mean) / std).logits
    return {"config": config, "shapes": shapes, "logits": logits.tolist()}


def main() -> None:
    import tempfile

    import transformers

    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    found = {}
    for name, (kind, arguments) in ROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = _answer(kind, arguments, Path(folder))
        if "--write" not in sys.argv:
            expected, logits = (torch.tensor(part[name]["logits"], dtype=torch.float64) for part in (known, found))
            assert found[name]["shapes"] == known[name]["shapes"], f"{name}: other tensors"
            torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
            print(f"{name}: as in {FILE.name}")
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(found, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(f"transformers {transformers.__version__}: {len(found)} networks")


if __name__ == "__main__":
    main()
