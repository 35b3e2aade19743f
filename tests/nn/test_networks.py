"""Layers of slope 1: MaxMin's own backward pass, token mixing and their constants. The papers' networks:
the parameters that CertViT's Table 1 counts, and what CoViT computes. The mean of networks: its
function, its constant, its lineage, and what is refused.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec
from certcli.evaluation.image_doubts import seen_by
from certcli.finetune.stiefel import orthogonal_parameters, orthogonalise
from certcli.lipschitz.network import bound_network, propagate, prove_network, trace_network
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.models import build
from certcli.models.build import OpenCheckpoint, create, initialise, load_double, with_network
from certcli.models.in_memory import mean_of
from certcli.models.open import open_checkpoint
from certcli.models.pixels import PixelModel
from certcli.nn.layers import (
    SOFTMAX_SLOPE,
    ChannelRoll,
    ClippedReLU,
    L2Pool,
    MaxMin,
    OrthogonalMixing,
    TokenMaxMin,
)
from certcli.nn.lipschitz_networks import LipschitzMixer, LipschitzPyramid, TokenMixer
from certcli.system.errors import ArchitectureError
from certcli.verification.report import compare_lineages, remake_means
from tests.helpers.commands import certvit, document

PARAMETERS = {
    "certvit_4c3f_mnist": 1_973_536,
    "certvit_4c3f_cifar10": 2_528_096,
    "certvit_6c2f_cifar10": 2_360_672,
    "certvit_8c2f_cifar100": 2_436_864,
    "certvit_8c2f_tinyimagenet": 5_257_984,
    "certvit_l2_vit_mnist": 1_094_528,
    "certvit_l2_vit_cifar10": 4_086_912,
    "certvit_l2_vit_cifar100": 4_916_736,
    "certvit_l2_vit_tinyimagenet": 9_060_864,
}
"""As Table 1 of the paper prints them."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_are_those_of_the_paper(name: str) -> None:
    with torch.device("meta"):
        net = build.create(name, {}, initialise=False)
    assert sum(parameter.numel() for parameter in net.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["certvit_4c3f_cifar10", "certvit_l2_vit_mnist"])
def test_a_small_one_has_a_finite_bound(name: str) -> None:
    shape = {"img_size": 8} if "4c3f" in name else {"img_size": 14, "depth": 1, "embed_dim": 32}
    model = build.load(build.initialise(name, shape))
    assert float(bound_network(model, model.input_size, 10).upper) < 1e20


COVIT = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2}


@pytest.mark.parametrize(
    ("name", "depth", "kernels"),
    [("t1", 4, 1), ("t2", 4, 4), ("t3", 8, 1), ("t4", 8, 4)],
)
def test_the_covits_have_the_depths_and_kernels_of_the_cauchy_paper(
    name: str, depth: int, kernels: int
) -> None:
    with torch.device("meta"):
        net = build.create(f"certvit_covit_{name}", {}, initialise=False)
    assert len(net.blocks) == depth
    for block in net.blocks:
        assert block.attn.convolution.weight.shape == (128 * kernels, 128, 3)
    small = build.load(build.initialise(f"certvit_covit_{name}", COVIT))
    assert float(bound_network(small, small.input_size, 10).upper) < 1e40


def test_several_kernels_of_one_size_compute_what_one_of_them_can() -> None:
    """The claim of `CoViT`, by which 4 x K3 against K3 compares two forms of the same functions."""
    several = build.initialise("certvit_covit_t2", COVIT)
    single = build.initialise("certvit_covit_t1", COVIT)
    tensors = {name: value.double() for name, value in several.tensors.items()}
    for block in range(2):
        path = f"blocks.{block}.attn"
        output = tensors[f"{path}.proj.weight"]
        kernel = torch.einsum("oi,idt->odt", output, tensors.pop(f"{path}.convolution.weight"))
        bias = output @ tensors.pop(f"{path}.convolution.bias")
        tensors[f"{path}.convolution.weight"] = kernel
        tensors[f"{path}.convolution.bias"] = bias
        tensors[f"{path}.proj.weight"] = torch.eye(12, dtype=torch.float64)
    merged = build.load(replace(single, tensors=tensors))
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    assert torch.allclose(
        merged(images), build.load(several, dtype=torch.float64)(images), atol=1e-12
    )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"kernel": 2}, "odd kernel"),
        ({"kernel": 0}, "odd kernel"),
        ({"kernels": [3, 5]}, "kernel=5 computes"),
    ],
)
def test_kernels_without_a_middle_and_of_several_sizes_are_refused(
    arguments: dict[str, object], match: str
) -> None:
    with pytest.raises(ArchitectureError, match=match):
        build.create("certvit_covit_t1", arguments, initialise=False)


def test_thresholds_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="thresholds"):
        ClippedReLU((5,))(torch.zeros(2, 1))


MEMBERS: dict[str, tuple[str, list[dict[str, Any]], bool]] = {
    "two": ("certvit_lip_digits", [{}, {}], False),
    "one and its mirror image": ("certvit_lip_digits", [{"rolls": True}], True),
    "of other shapes": ("certvit_lip_digits", [{"width": 16}, {"head": [12, 8]}, {}], True),
    "sorted tokens": (
        "certvit_sort_mnist",
        [{"img_size": 8, "patch": 2, "width": 16, "head": [8]}] * 2,
        True,
    ),
}
"""Each kind of mean: the architecture, its members' arguments, whether of mirror images too."""


def members_of(case: str) -> list[OpenCheckpoint]:
    arch, arguments, _ = MEMBERS[case]
    return [
        with_network(initialise(arch, shape, seed=seed)) for seed, shape in enumerate(arguments)
    ]


@pytest.mark.parametrize("case", MEMBERS)
def test_a_mean_has_the_mean_of_its_members_logits_and_pair_constants(case: str) -> None:
    arch, _, mirror = MEMBERS[case]
    members = members_of(case)
    found = mean_of(arch, members, mirror)
    assert (found.record.arch, found.net.num_classes) == (arch, 10)
    mean = load_double(found)
    each = [load_double(member) for member in members]
    images = torch.rand(5, *found.record.input.size, dtype=torch.float64)
    views = [images, images.flip(3)] if mirror else [images]
    expected = torch.stack([model(view) for view in views for model in each]).mean(0)
    # the heads are divided in float32: half a unit of 2^-24 in each of some hundred products near 1
    torch.testing.assert_close(mean(images), expected, rtol=0, atol=1e-5)
    features = [float(prove_network(model, 10).bound.parts[1].value) for model in each]
    apart = [
        torch.cdist(*[tensors["head.out.weight"].double()] * 2)
        for tensors in (m.tensors for m in members)
    ]
    rms = torch.stack(apart).square().mean(0).sqrt()
    pairs = prove_network(mean, 10).pairs
    assert bool(
        (pairs <= rms * torch.tensor(features).square().mean().sqrt() * (1 + 1e-6)).all()
    )  # float32, as above


def test_members_of_constant_one_have_the_root_mean_square_of_their_pairs() -> None:
    net = create(
        "certvit_lip_digits",
        {"members": 2, "mirror": True, "head_2": [8], "rolls": True},
        initialise=True,
    )
    orthogonalise(net)
    assert [len(member.head.hidden) for member in net.members] == [2, 1]
    model = PixelModel(InputSpec((1, 8, 8), (0.0,), (1.0,)), net).double().eval()
    pairs = prove_network(model, 10).pairs
    apart = (
        torch.cdist(net.head.weight, net.head.weight) * 2
    )  # four parts of constant 1 stand side by side
    torch.testing.assert_close(pairs, apart, rtol=1e-5, atol=1e-12)  # orthogonal in float32


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no member": ({"members": 0}, "members cannot be 0"),
    "too many": ({"members": 33}, "members cannot be 33"),
    "a word": ({"members": "two"}, "members cannot be 'two'"),
    "a switch": ({"members": True}, "members cannot be True"),
    "no switch": ({"mirror": 1}, "mirror cannot be 1"),
    "a third of two": ({"members": 2, "head_3": [8]}, "head_3"),
    "a side of its own": ({"members": 2, "side_1": 16}, "side"),
    "members of members": ({"members": 2, "members_1": 2}, "members"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mean_of_anything_else_is_refused(case: str) -> None:
    arguments, told = REFUSED[case]
    with pytest.raises(ArchitectureError, match=told):
        create("certvit_lip_digits", arguments, initialise=False)


@pytest.fixture(name="files")
def member_files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{seed}.safetensors" for seed in range(2)]
    for seed, path in enumerate(paths):
        certvit("init", "certvit_lip_digits", "--seed", seed, "-o", path)
    return paths


def test_the_lineage_of_a_mean_tells_every_members_steps(files: list[Path], tmp_path: Path) -> None:
    trained = [path.with_name(f"trained{path.name}") for path in files]
    mean = tmp_path / "mean.safetensors"
    for path, after in zip(files, trained, strict=True):
        certvit("finetune", path, "--dataset", "digits", "--steps", 1, "--loss", "ce", "-o", after)
    certvit(
        "init",
        "certvit_lip_digits",
        *(word for path in trained for word in ("--member", path)),
        "-o",
        mean,
    )
    opened = {path.name: open_checkpoint(str(path)) for path in (*files, *trained, mean)}
    record = opened[mean.name].record
    assert [step.command for step in record.lineage] == [
        "init",
        "finetune",
        "init",
        "finetune",
        "mean",
    ]
    assert len(seen_by(record)) == 2  # what each was trained on is judged apart
    assert record.evidence == ()
    told = list(compare_lineages(opened))
    parents = [(claim.entry, claim.why) for _, claim in told if claim.entry == "lineage, step 5"]
    assert sorted(parents) == [
        ("lineage, step 5", f"trained{seed}.safetensors tells the same steps") for seed in range(2)
    ]
    assert {claim.status for _, claim in told} == {"verified"}
    first = opened["trained0.safetensors"]
    other = Checkpoint(first.tensors, replace(first.record, lineage=first.record.lineage[::-1]))
    told = list(compare_lineages({mean.name: opened[mean.name], "other": other}))
    assert "refuted" in {claim.status for _, claim in told}
    assert (
        "refuted" not in certvit("verify", mean, code=7).output
    )  # 7: a mean has no result yet to verify
    late = Checkpoint(
        opened[mean.name].tensors, replace(record, lineage=(*record.lineage, record.lineage[0]))
    )
    late.write(tmp_path / "late.safetensors")
    assert "only begins" in certvit("verify", tmp_path / "late.safetensors", code=7).output
    certvit(
        "certify", mean, "--dataset", "digits", "--limit", 20, "-e", 0.1, "--arithmetic", "float32"
    )


def test_a_mean_whose_members_are_given_is_made_again(files: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "mean.safetensors"
    certvit("init", "certvit_lip_digits", "--member", files[0], "--member", files[1], "-o", path)
    mean, members = Checkpoint.read(path), {file.name: Checkpoint.read(file) for file in files}
    record = mean.record
    first = members["0.safetensors"]
    *before, step = record.lineage

    def told(**parameters: Any) -> Checkpoint:
        edited = replace(step, parameters={**step.parameters, **parameters})
        return Checkpoint(mean.tensors, replace(record, lineage=(*before, edited)))

    trained = mean.derive(
        {**mean.tensors, "head.bias": mean.tensors["head.bias"] + 1}, "finetune", {}
    )
    bit = mean.tensors["head.weight"].clone()
    bit[0, 0] = bit[0, 0].nextafter(torch.tensor(1.0))
    found: dict[str, tuple[Checkpoint, list[str]]] = {
        "honest": (mean, ["verified"]),
        "trained after it": (trained, ["verified"]),
        "trained twice after it": (
            trained.derive(
                {**mean.tensors, "head.bias": mean.tensors["head.bias"] + 2}, "finetune", {}
            ),
            ["verified"],
        ),
        "one bit": (Checkpoint({**mean.tensors, "head.weight": bit}, record), ["refuted"]),
        "one bit, trained after it": (
            Checkpoint({**mean.tensors, "head.weight": bit}, record).derive(
                trained.tensors, "finetune", {}
            ),
            ["refuted"],
        ),
        "other order": (told(members=step.parameters["members"][::-1]), ["refuted"]),
        "mirrored": (told(mirror=True), ["refuted"]),
        "more members than a mean may have": (told(members=[first.digest] * 5000), ["refuted"]),
        "mirrored by a word": (told(mirror="yes"), ["refuted"]),
        "another architecture": (
            Checkpoint(mean.tensors, replace(record, arch="certvit_lip_mnist")),
            ["refuted"],
        ),
        "a member that is not here": (told(members=[first.digest, "0" * 64]), []),
    }
    for case, (checkpoint, statuses) in found.items():
        claims = list(remake_means({**members, path.name: checkpoint}))
        assert [(name, claim.status) for name, claim in claims] == [
            (path.name, status) for status in statuses
        ], case
        assert not any(claim.asked for _, claim in claims), "history, which proves no figure"
    found["one bit"][0].write(tmp_path / "bit.safetensors")
    whole = document("verify", tmp_path / "bit.safetensors", *files, code=7)
    assert any("not that of this step" in reason for reason in whole["gate"]["reasons"])


def test_what_makes_no_mean_is_refused_before_anything_is_written(
    files: list[Path], tmp_path: Path
) -> None:
    other = tmp_path / "other.safetensors"
    mean = tmp_path / "mean.safetensors"
    certvit("init", "certvit_lip_digits", "--arch-arg", "num_classes=3", "-o", other)
    plain = tmp_path / "plain.safetensors"
    certvit("init", "certvit_vit_digits", "-o", plain)
    for arch, words, code, told in (
        ("certvit_lip_digits", ("--member", other), 2, "another classes"),
        ("certvit_lip_mnist", (), 2, "not certvit_lip_mnist"),
        ("certvit_lip_digits", ("--arch-arg", "width=8"), 2, "--member takes"),
        ("certvit_lip_digits", ("--arch-arg", "mirror=1"), 2, "a mean cannot be built"),
        ("certvit_lip_digits", ("--member", tmp_path / "none.safetensors"), 3, "none.safetensors"),
    ):
        result = certvit("init", arch, "--member", files[0], *words, "-o", mean, code=code)
        assert told in str(result.exception)
        assert not mean.exists()
    result = certvit("init", "certvit_vit_digits", "--member", plain, "-o", mean, code=4)
    assert "certvit does not average such networks" in str(result.exception)
    before = files[0].read_bytes()
    certvit("init", "certvit_lip_digits", "--member", files[0], "-o", files[0], "--force", code=2)
    assert files[0].read_bytes() == before


def test_the_backward_pass_of_maxmin_is_that_of_its_formula() -> None:
    torch.manual_seed(0)
    act = MaxMin()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(act, x)
    assert torch.autograd.gradgradcheck(act, x)
    with torch.no_grad():
        plain = act(x)
    assert torch.equal(act(x), plain)
    columns = torch.func.vmap(torch.func.jacrev(act))(x.detach())
    ties = torch.func.jacrev(act)(torch.ones(8, dtype=torch.float64))
    for jacobian in (*columns, ties):  # a permutation, also where two entries are equal
        assert torch.equal(jacobian @ jacobian.mT, torch.eye(8, dtype=torch.float64))


def _tokens_of_norm(mixing: OrthogonalMixing) -> OrthogonalMixing:
    with torch.no_grad():
        for number, part in enumerate(mixing.maps):
            part.weight.copy_(torch.randn(4, 4) * (0.5 + number))
        mixing.shift.normal_()
    return mixing


def test_hard_attention_sorts_pairs_of_tokens_in_each_channel() -> None:
    mixing = TokenMaxMin(4, 1, 2)
    with torch.no_grad():
        mixing.shift.copy_(torch.tensor([[0.0], [0.0], [0.0], [9.0]]))
    tokens = torch.tensor([[[1.0], [5.0], [2.0], [3.0]]])
    assert mixing(tokens).flatten().tolist() == [2.0, 12.0, 1.0, 5.0]


def test_soft_pairs_are_softmax_averages_drawn_to_their_mean() -> None:
    torch.manual_seed(0)
    mixing = TokenMaxMin(2, 3, 1, soft=True).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    pair = (x + mixing.shift).transpose(1, 2)  # (b, channels, the pair)
    temperature = mixing.pair.log_temperature.exp()
    attended = torch.stack(
        [(sign * pair / temperature).softmax(-1).mul(pair).sum(-1) for sign in (1, -1)], dim=1
    )
    mean = pair.mean(-1).unsqueeze(1)
    torch.testing.assert_close(mixing(x), mean + (attended - mean) / SOFTMAX_SLOPE)
    assert abs(SOFTMAX_SLOPE * math.tanh(SOFTMAX_SLOPE) - 1) < 1e-6


def test_channels_that_do_not_meet_across_tokens_meet_within() -> None:
    mixing = TokenMaxMin(2, 4, 1, across=2)
    torch.nn.init.zeros_(mixing.shift)
    tokens = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [5.0, 0.0, 7.0, 6.0]]])
    assert mixing(tokens).tolist() == [[[5.0, 2.0, 4.0, 3.0], [1.0, 0.0, 7.0, 6.0]]]


@pytest.mark.parametrize("mixing", ["sort", "soft", "none"])
def test_attention_between_maps_of_each_place_keeps_a_constant_of_1(mixing: str) -> None:
    shape = {"img_size": 8, "patch": 4, "width": 8, "across": 4, "depth": 2, "mixing": mixing}
    net = build.create("certvit_lip_attention_mnist", shape, initialise=True).double()
    orthogonalise(net)
    outcome = propagate(trace_network(net, (1, 8, 8)), Arithmetic())
    assert (
        float(outcome.logits.base) <= 1 + 1e-8
    )  # proven norms of three matrices and the patches, each rounded up by 5e-10
    image = torch.rand(1, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    tokens = []
    net.mixings[-1].register_forward_hook(lambda module, inputs, output: tokens.append(output))
    net(image)
    (gradient,) = torch.autograd.grad(tokens[0][:, 0].sum(), image)
    assert bool(gradient[..., 4:, 4:].any()) == (
        mixing != "none"
    )  # the last patch, seen by the first token


def test_orthogonal_mixing_applies_each_heads_matrix_to_its_channels() -> None:
    torch.manual_seed(0)
    mixing = _tokens_of_norm(OrthogonalMixing(4, 6, 3))
    x = torch.randn(2, 4, 6)
    expected = [part.weight @ x[..., 2 * h : 2 * h + 2] for h, part in enumerate(mixing.maps)]
    torch.testing.assert_close(mixing(x), torch.cat(expected, dim=-1) + mixing.shift)


def test_rolled_channels_show_a_linear_layer_its_window_of_tokens() -> None:
    tokens = torch.arange(9.0).view(1, 9, 1).expand(1, 9, 4)  # 0 1 2 / 3 4 5 / 6 7 8
    assert ChannelRoll(3, 4)(tokens)[0, 4].tolist() == [4, 1, 3, 0]
    assert ChannelRoll(3, 4, back=True)(tokens)[0, 8].tolist() == [8, 2, 6, 0]
    net = build.create("certvit_lip_digits", {"depth": 2, "rolls": True}, initialise=True).double()
    orthogonalise(net)
    base = propagate(trace_network(net, (1, 8, 8)), Arithmetic()).logits.base
    assert (
        1 <= float(base) <= 1 + 1e-8
    )  # seven proven norms, each rounded up by 5e-10; the last layer is pending


def test_a_pyramid_merges_neighbours_and_has_the_constant_1_while_orthogonal() -> None:
    shape = {"img_size": 16, "widths": [8, 12], "depths": [1, 2], "windows": 1, "head": [8]}
    net = build.create("certvit_lip_pyramid_cifar10", shape, initialise=True).double()
    orthogonalise(net)
    matrices = {id(parameter) for parameter in orthogonal_parameters(net)}
    assert {
        name for name, p in net.named_parameters() if p.dim() > 1 and id(p) not in matrices
    } == {
        *(f"stages.{stage}.position" for stage in range(2)),
        "head.out.weight",
    }
    base = propagate(trace_network(net, (3, 16, 16)), Arithmetic()).logits.base
    assert (
        1 <= float(base) <= 1 + 1e-8
    )  # six proven norms, each rounded up by 5e-10; the last layer is pending
    seen: list[torch.Tensor] = []
    net.stages[1].merge.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    net.stages[0].register_forward_hook(
        lambda module, inputs, output: torch.arange(16.0).view(1, 16, 1).expand(1, 16, 8).double()
    )
    net(torch.rand(1, 3, 16, 16, dtype=torch.float64))
    assert seen[0][0, :, ::8].tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]


def test_the_lengths_of_channels_have_a_gradient_everywhere() -> None:
    tokens = torch.randn(2, 16, 3, dtype=torch.float64, requires_grad=True)
    pool = L2Pool(4, 2)
    expected = torch.linalg.vector_norm(tokens.view(2, 2, 2, 2, 2, 3), dim=(2, 4)).view(2, 4, 3)
    torch.testing.assert_close(pool(tokens), expected)
    with torch.no_grad():
        torch.testing.assert_close(pool(tokens), expected)
    torch.autograd.gradcheck(pool, (tokens,))
    silent = torch.zeros(1, 16, 3, requires_grad=True)
    pool(silent).sum().backward()
    assert not silent.grad.any()


@pytest.mark.parametrize("arch", ["certvit_sort_mnist", "certvit_mix_mnist"])
def test_reference_nets_have_the_constant_of_their_pooling_while_orthogonal(arch: str) -> None:
    net = build.create(arch, {"width": 16, "head": [8], "depth": 2, "heads": 2}, initialise=True)
    orthogonalise(net)
    matrices = {id(parameter) for parameter in orthogonal_parameters(net)}
    assert all(
        id(part.weight) in matrices
        for mixing in net.mixings
        for part in getattr(mixing, "maps", [])
    )
    outcome = propagate(trace_network(net, (1, 28, 28)), Arithmetic())
    # sqrt(4 tokens) of the mean; 1e-5: the matrices are orthogonal in float32
    assert float(outcome.logits.base) <= 0.5 * (1 + 1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OrthogonalMixing(4, 8, 3),
        lambda: TokenMaxMin(6, 8, 2),
        lambda: ChannelRoll(2, 6),
        lambda: LipschitzMixer(1, 8, 2, 8, 1, [8], 3, rolls="no"),
        lambda: L2Pool(4, 3),
        lambda: L2Pool(4, 0),
        lambda: LipschitzPyramid(1, 8, 2, [8, 8], [1], 1, [8], 3),
        lambda: LipschitzPyramid(1, 8, 2, [8, 8, 8, 8], [1, 1, 1, 1], 1, [8], 3),
        lambda: TokenMaxMin(4, 8, 2, across=5),
        lambda: TokenMixer(1, 8, 4, 8, 2, "softmax", 2, [8], 3),
    ],
)
def test_impossible_shapes_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ArchitectureError):
        make()
