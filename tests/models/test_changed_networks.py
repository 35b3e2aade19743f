"""Networks that are changed as they are opened.

Adapters of PEFT: the merged network computes what base and adapter compute side by side.
`--image-size`: images of another size than the network's own, which its first layer resizes.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import interpolate

import certvit
from certcli.certify.smoothing.noise import smoothed_classifier
from certcli.certify.smoothing.pixel_denoiser import PixelDenoiser
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec, Record
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.models.origins import CONFIG, WEIGHTS, Hints, read_adapter
from certcli.models.pixels import PixelModel, PixelResize, ResizedPixels, seen_part
from certcli.system.errors import CheckpointError, UsageError
from tests.helpers.commands import certvit as command
from tests.helpers.commands import certvit as typed
from tests.helpers.commands import document
from tests.models.test_converters import TRANSFORMERS, transformers_folder

RANK = 2
SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 3,
    "target_modules": ["qkv"],
    "megatron_core": "megatron.core",
}
LAYERS = ("blocks.0.attn.qkv", "blocks.0.mlp.fc1", "patch_embed.proj")


def written_adapter(folder: Path, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(SETTINGS | settings))
    save_file(dict(tensors), folder / WEIGHTS)
    return folder


def adapter_of(
    net: nn.Module, layers: tuple[str, ...] = LAYERS, rank: int = RANK
) -> dict[str, Tensor]:
    """Return random A and B of each layer, under PEFT's names."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for path in layers:
        weight = net.get_submodule(path).weight
        ones = (1,) * (weight.dim() - 2)
        a = torch.randn(rank, *weight.shape[1:], generator=generator) / 8
        b = torch.randn(len(weight), rank, *ones, generator=generator) / 8
        tensors[f"base_model.model.{path}.lora_A.weight"] = a
        tensors[f"base_model.model.{path}.lora_B.weight"] = b
    return tensors


def saved_adapter_folder(
    net: nn.Module, tensors: Mapping[str, Tensor], scale: Mapping[str, float]
) -> None:
    """Add s B(A(x)) to what each layer computes: the adapter as it is trained, not merged."""
    for path, factor in scale.items():
        a, b = (tensors[f"base_model.model.{path}.lora_{part}.weight"] for part in "AB")

        def add(
            layer: Any,
            inputs: Any,
            output: Tensor,
            a: Tensor = a,
            b: Tensor = b,
            factor: float = factor,
        ) -> Tensor:
            (x,) = inputs
            if a.dim() == 2:
                return output + factor * (x @ a.double().T @ b.double().T)
            inner = nn.functional.conv2d(x, a.double(), None, layer.stride, layer.padding)
            return output + factor * nn.functional.conv2d(inner, b.double())

        net.get_submodule(path).register_forward_hook(add)


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, (1.5, 1.5, 1.5)),
        ({"use_rslora": True}, (3 / 2**0.5,) * 3),
        ({"alpha_pattern": {"fc1": 5, "blocks.0.attn.qkv": 1}}, (0.5, 2.5, 1.5)),
    ],
)
def test_the_merged_network_computes_base_and_adapter(
    tiny: Checkpoint, tmp_path: Path, settings: dict[str, Any], scales: tuple[float, ...]
) -> None:
    tensors = adapter_of(build.load_double(tiny).net)
    adapter = read_adapter(written_adapter(tmp_path / "a", tensors, **settings))
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    merged = adapter.merged(tiny.tensors)
    after = build.load_double(Checkpoint(merged, tiny.record))(images)
    reference = build.load_double(tiny)
    before = reference(images)
    saved_adapter_folder(reference.net, tensors, dict(zip(LAYERS, scales)))
    expected = reference(images)
    # weights are rounded to float32 once
    assert torch.allclose(after, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(before, expected, rtol=0, atol=1e-2)
    assert {n for n in merged if not merged[n].equal(tiny.tensors[n])} == {
        f"{n}.weight" for n in LAYERS
    }


def test_lengths_biases_and_whole_tensors_are_merged(tiny: Checkpoint, tmp_path: Path) -> None:
    """DoRA: each row of W + s B A has the length that was learned."""
    net = build.load_double(tiny).net
    layer = "base_model.model.blocks.0.attn.qkv"
    tensors = adapter_of(net, LAYERS[:1])
    weight = tiny.tensors["blocks.0.attn.qkv.weight"]
    lengths = torch.linspace(0.5, 2, len(weight))
    head = torch.ones_like(tiny.tensors["head.bias"])
    tensors |= {
        f"{layer}.lora_magnitude_vector.weight": lengths,
        f"{layer}.lora_B.bias": lengths.clone(),
    }
    tensors |= {"base_model.model.head.modules_to_save.bias": head}
    merged = read_adapter(written_adapter(tmp_path / "a", tensors, use_dora=True)).merged(
        tiny.tensors
    )
    a, b = (tensors[f"{layer}.lora_{part}.weight"] for part in "AB")
    rows = weight + 1.5 * b @ a
    expected = lengths[:, None] * rows / rows.norm(dim=1, keepdim=True)
    assert torch.allclose(merged["blocks.0.attn.qkv.weight"], expected, atol=1e-6)
    assert merged["head.bias"].equal(head)
    bias = tiny.tensors["blocks.0.attn.qkv.bias"] + 1.5 * lengths
    assert torch.allclose(merged["blocks.0.attn.qkv.bias"], bias, atol=1e-6)


LAYER = "base_model.model.blocks.0.attn.qkv"
REFUSED: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], object], str]] = {
    "another kind": ({"peft_type": "IA3"}, dict, "adapter_config.json: .*peft_type"),
    "unknown field": ({"layer_replication": [[0, 1]]}, dict, "'layer_replication' has no reader"),
    "weights that change the base": ({"init_lora_weights": "pissa"}, dict, "init_lora_weights"),
    "a pattern": ({"rank_pattern": {"(a+)+": 2}}, dict, "is no name"),
    "another rank": ({"r": 3}, dict, "another rank"),
    "rank pattern": ({"rank_pattern": {"qkv": 1}}, dict, "another rank"),
    "no lengths": ({"use_dora": True}, dict, "lengths are not there"),
    "infinite": ({"lora_alpha": 1e30}, dict, "lora_alpha"),
    "another base": ({}, lambda t: t.update({f"x.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}), "does not have"),
    "no B": ({}, lambda t: t.pop(f"{LAYER}.lora_B.weight"), "no lora_B"),
    "another size": ({}, lambda t: t.update({f"{LAYER}.lora_B.weight": torch.ones(5, RANK)}), "adds"),
    "twice": ({}, lambda t: t.update({"model.blocks.0.attn.qkv.weight": torch.ones(2)}), "twice"),
    "another head": ({}, lambda t: t.update({"head.bias": torch.ones(3)}), r"to the shape \(3,\)"),
    "NaN": ({}, lambda t: t.update({"head.bias": torch.full((10,), float("nan"))}), "NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged_is_refused(tiny: Checkpoint, tmp_path: Path, name: str) -> None:
    settings, change, message = REFUSED[name]
    tensors = adapter_of(build.load(tiny).net, LAYERS[:1])
    change(tensors)
    folder = written_adapter(tmp_path / "a", tensors, **settings)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(folder).merged(tiny.tensors)


def test_files_that_run_code_or_are_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=CONFIG):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match="runs code") as refusal:
        read_adapter(tmp_path)
    assert "save_pretrained" in refusal.value.hint


def test_the_lineage_names_the_adapter_and_evidence_is_stale(
    workshop: Path, tmp_path: Path
) -> None:
    base = workshop / "certified.safetensors"
    opened = certvit.load(base)
    layers = ("blocks.0.mlp.fc1",) if "blocks.0.mlp.fc1.weight" in opened.tensors else ("head",)
    tensors = adapter_of(certvit.network(opened).net, layers)
    folder = written_adapter(tmp_path / "adapter", tensors)
    out = tmp_path / "merged.safetensors"
    answer = document("merge", base, folder, "-o", out)
    merged = Checkpoint.read(out)
    step = merged.record.lineage[-1]
    assert (step.command, step.parent) == ("merge", opened.digest)
    assert step.parameters["adapter"] == answer["adapter"] == read_adapter(folder).digest
    assert len(merged.record.evidence) == len(opened.record.evidence) > 0
    assert all(entry.digest != merged.digest for entry in merged.record.evidence)
    assert typed("lipschitz", out).exit_code == 0


def test_a_base_of_transformers_has_its_own_names(tmp_path: Path) -> None:
    """Its query, key and value lie apart; in timm's network they are one matrix."""
    row = TRANSFORMERS["vit"]
    layer = "vit.encoder.layer.0.attention.attention.value"
    shape = row["shapes"][f"{layer}.weight"]
    tensors = {f"base_model.model.{layer}.lora_A.weight": torch.ones(RANK, shape[1])}
    tensors |= {f"base_model.model.{layer}.lora_B.weight": torch.ones(shape[0], RANK)}
    adapter = read_adapter(written_adapter(tmp_path / "a", tensors))
    folder = transformers_folder(row, tmp_path)
    base, merged = (open_checkpoint(folder, hints) for hints in (Hints(), Hints(adapter=adapter)))
    change = merged.tensors["blocks.0.attn.qkv.weight"] - base.tensors["blocks.0.attn.qkv.weight"]
    # s B A = 1.5 * RANK everywhere, in the last third of the rows; float32 rounds the sum
    expected = torch.zeros_like(change)
    expected[-shape[0] :] = 1.5 * RANK
    assert torch.allclose(change, expected, atol=1e-6)


DIGITS = "certvit/digits"
OWN = InputSpec(size=(1, 8, 8), mean=(0.5,), std=(0.5,))


def opened_at(side: int) -> Any:
    return open_checkpoint(DIGITS, Hints(image_size=side))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((12, 10), (8, 14)),
        ((1, 5), (3, 3)),
        ((7, 7), (7, 2)),
        ((2, 1), (7, 9)),
        ((32, 32), (56, 28)),
    ],
)
def test_the_resize_is_bilinear_interpolation_with_antialiasing(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    images = torch.rand(2, 3, *source, dtype=torch.float64)
    resize = PixelResize(source, target)
    expected = interpolate(images, target, mode="bilinear", antialias=True)
    assert resize(images).shape == expected.shape
    assert torch.allclose(resize(images), expected, rtol=0, atol=1e-15)


def test_a_record_keeps_the_size_and_one_without_it_keeps_its_bytes() -> None:
    own = open_checkpoint(DIGITS).record
    assert "resized" not in own.to_json()
    other = opened_at(12).record
    assert Record.from_json(other.to_json()) == other
    assert (other.input.size, other.input.resized) == ((1, 12, 12), (8, 8))
    assert other.input.perturbed_at(8) == own.input  # its own size again
    assert other.input.perturbed_at(16).resized == (8, 8)


def test_another_size_is_another_network() -> None:
    digests = {opened_at(side).digest for side in (8, 12, 16)} | {open_checkpoint(DIGITS).digest}
    assert len(digests) == 3


@pytest.mark.parametrize("sides", [[0, 8], [8], [8, 8, 8], [5000, 8], "8x8"])
def test_sides_that_no_network_has_are_refused(sides: Any) -> None:
    record = json.loads(opened_at(12).record.to_json())
    record["input"]["resized"] = sides
    with pytest.raises(CheckpointError):
        Record.from_json(json.dumps(record))


def test_a_network_loaded_from_its_module_is_the_same_function() -> None:
    """load(network(x)) is x, with the resize; not of a module whose matrices somebody changed."""
    checkpoint = opened_at(12)
    images = torch.rand(3, 1, 12, 12)
    module = certvit.network(checkpoint)
    for stated in ({}, {"mean": 0, "std": 1}, {"mean": 0.5, "std": 0.5}):
        loaded = certvit.load(module, **stated)
        assert loaded.record.input == checkpoint.record.input
        assert torch.equal(certvit.network(loaded)(images), module(images))
    assert isinstance(module.normalize, ResizedPixels)
    module.normalize.resize.rows.mul_(2)
    doubled = certvit.load(module, input_size=(1, 12, 12), mean=0, std=1)
    assert torch.equal(certvit.network(doubled)(images), module(images))


class Halves(PixelDenoiser):
    """Half of each pixel; tells the sizes that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, ...]] = set()

    def forward(self, pixels: Tensor) -> Tensor:
        self.sizes.add(tuple(pixels.shape[1:]))
        return pixels / 2


def test_a_denoiser_works_at_the_size_of_the_images_and_the_resize_comes_behind_it() -> None:
    denoiser = Halves()
    noisy = torch.randn(4, 1, 12, 12)
    smoothed = smoothed_classifier(opened_at(12), torch.device("cpu"), "float32", denoiser)
    own = certvit.network(DIGITS)
    small = interpolate(noisy / 2, (8, 8), mode="bilinear", antialias=True)
    with torch.no_grad():
        assert torch.allclose(smoothed(noisy), own(small), atol=1e-5)
    assert denoiser.sizes == {(1, 12, 12)}


def test_tokens_are_not_dropped_where_a_pixel_belongs_to_several() -> None:
    """Patches are certified in the pixels of the images; tokens are patches of the resized ones."""
    model = PixelModel(OWN.perturbed_at(16), _plain_network())
    with pytest.raises(UsageError, match="resizes the images"):
        seen_part(model, "tokens")
    assert seen_part(model, "auto").hides == "pixels"
    assert seen_part(PixelModel(OWN, _plain_network()), "auto").hides == "tokens"


def _plain_network() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, embed_dim=8, depth=1,
        num_heads=2, num_classes=3,
    ).eval()  # fmt: skip


def test_commands_take_images_of_that_size(tmp_path: Path) -> None:
    """A written checkpoint keeps the size; records are of the network at their size alone."""
    digits = ("--dataset", "digits")
    few = (*digits, "--limit", "3")
    written = tmp_path / "at12.safetensors"
    result = command("certify", DIGITS, "--image-size", 12, *few, "-e", 0.2, "-o", written)
    assert "resized to 8x8 by the first layer" in result.output
    assert Checkpoint.read(written).record.input.size == (1, 12, 12)
    command("verify", written, written, *digits)
    records = tmp_path / "r.jsonl"
    smoothing = ("--method", "smoothing", "--sigma", 0.25, "--n0", 10, "--samples", 50)
    command("certify", written, *few, *smoothing, "-e", 0.1, "--records", records)
    command("verify", records, DIGITS, "--image-size", 12, *digits)
    command("verify", records, DIGITS, *digits, code=6)
