"""Views of `certvit lipschitz` are all shown, or refused by name."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from certcli.cli.lipschitz.heads import PANELS
from certcli.cli.lipschitz.options import REFUSED, VIEWS, Views
from certcli.lipschitz.heads import MAPS
from certcli.report import heads
from certcli.system.errors import UsageError
from tests.helpers.commands import attempt, certvit, document
from tests.helpers.workshop import shape

KEYS = {
    "--heads": "heads",
    "--compare": "compare",
    "--jacobian": "jacobian",
}
"""Where a view stands in the JSON document; a plot is a file."""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views") / "m.safetensors"
    certvit("init", "certvit_vit_digits", *shape(), "-o", path)
    return path


def test_every_view_is_listed() -> None:
    fields = set(Views.__dataclass_fields__) - {"layers", "worst"}  # rows and order of one table
    assert set(VIEWS.values()) == fields
    assert {option for pair in REFUSED for option in pair} <= set(VIEWS)


@pytest.mark.parametrize(
    "chosen", [*combinations(VIEWS, 2), *combinations(VIEWS, 3), tuple(VIEWS)], ids=" ".join
)
def test_views_are_all_shown_or_refused(
    chosen: tuple[str, ...], network: Path, tmp_path: Path
) -> None:
    values: dict[str, list[Any]] = {
        "--compare": [network],
        "--plot": [tmp_path / "f.svg"],
    }
    words = ["lipschitz", network, "--no-estimate", "--limit", 1]
    for option in chosen:
        words += [option, *values.get(option, [])]
    refused = [together for together in REFUSED if set(together) <= set(chosen)]
    if refused:
        failure = attempt(*words).exception
        assert isinstance(failure, UsageError)
        assert all(option in str(failure) for option in refused[0])
        return
    shown = document(*words)
    for option in chosen:
        assert (tmp_path / "f.svg").exists() if option == "--plot" else shown[KEYS[option]]
    if {"--heads", "--compare"} <= set(chosen):
        assert shown["other_heads"] == shown["heads"]


def test_the_picture_has_a_panel_a_map_a_dot_a_head_and_the_largest_of_each_layer(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SpecFormer's Figure 2a: two networks side by side, here of different depths and attentions."""
    other = tmp_path / "other.safetensors"
    certvit("init", "certvit_vit_digits", "--arch-arg", "depth=2", "--seed", 1, "-o", other)
    panels: dict[str, dict[str, Any]] = {}
    draw = heads._draw_map

    def seen(axes: Any, layers: Any, color: str, label: str) -> None:
        draw(axes, layers, color, label)
        (line,) = (one for one in axes.lines if one.get_label() == label)
        dots = [spot.get_offsets() for spot in axes.collections if len(spot.get_offsets())]
        panels.setdefault(str(id(axes)), {})[label] = (list(line.get_ydata()), dots)

    monkeypatch.setattr(heads, "_draw_map", seen)
    words = ("lipschitz", network, "--no-estimate", "--heads", "--compare", other)
    shown = document(*words, "--plot", tmp_path / "heads.png")
    assert (tmp_path / "heads.png").read_bytes()[:4] == b"\x89PNG"
    assert len(panels) == 3
    for name, panel in zip("qkv", panels.values(), strict=True):
        for label, key, depth in (("m", "heads", 1), ("other", "other_heads", 2)):
            norms = [row["upper"] for row in shown[key] if row["map"] == name]
            assert len(norms) == depth
            assert panel[label][0] == [max(layer) for layer in norms]
        drawn = sorted(float(y) for offsets in panel["other"][1] for _, y in offsets)
        every = [
            row["upper"]
            for key in ("heads", "other_heads")
            for row in shown[key]
            if row["map"] == name
        ]
        assert drawn == sorted(norm for layer in every for norm in layer)


def test_maps_of_two_kinds_of_attention_share_the_panels_that_both_have(
    network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "l2.safetensors"
    small = ("img_size=14", "embed_dim=16", "depth=1", "num_heads=2")
    words = [word for pair in small for word in ("--arch-arg", pair)]
    certvit("init", "certvit_l2_vit_mnist", *words, "-o", other)
    calls: list[dict[str, list[str]]] = []
    monkeypatch.setattr(
        heads,
        "draw_heads",
        lambda networks, path, title: calls.append(
            {label: list(maps) for label, maps in networks.items()}
        ),
    )
    shown = document(
        "lipschitz",
        network,
        "--no-estimate",
        "--heads",
        "--compare",
        other,
        "--plot",
        tmp_path / "f.svg",
    )
    assert calls == [{"m": ["query", "key", "value"], "l2": ["query and key (tied)", "value"]}]
    assert {row["map"] for row in shown["other_heads"]} == {"query", "value"}
    assert set(PANELS) | {"qkv"} == set(MAPS)


def test_heads_that_a_network_lacks_are_not_drawn(tmp_path: Path, network: Path) -> None:
    lacking = tmp_path / "mixer.safetensors"
    certvit("init", "certvit_lip_digits", "-o", lacking)
    words = ("--no-estimate", "--heads", "--plot", tmp_path / "f.svg")
    for pair in ((lacking,), (network, "--compare", lacking)):
        failure = attempt("lipschitz", *pair, *words).exception
        assert isinstance(failure, UsageError)
        assert "mixer has no attention" in failure.message
    assert not (tmp_path / "f.svg").exists()
