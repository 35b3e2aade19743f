"""Fields of configs, and the record's images, by themselves."""

import json

import pytest

from certcli.checkpoint.config_fields import decode_config, plain_names
from certcli.checkpoint.record import InputSpec
from certcli.system.errors import Refused


def test_a_field_that_is_null_is_not_there() -> None:
    """timm writes null where a network has no such number."""
    about = {"input_size": [3, 64, 64], "mean": [0.5, 0.5, 0.5]}
    empty = {"std": None, "crop_pct": None, "interpolation": None, "test_crop_pct": None}
    config, same = (
        decode_config(json.dumps({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": cfg}))
        for cfg in (about, {**about, **empty})
    )
    assert same == config


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (("cat", "dog"), True),
        (("cat", "a/b"), False),
        (("cat", ""), False),
        (("cat", "d" * 129), False),
        (("cat", "d\n"), False),
        (("cat", "cat"), False),
        (("LABEL_0", "LABEL_1"), False),
        (("0", "1"), False),
        (("0", "dog"), True),
    ],
)
def test_names_of_classes_could_name_folders(names: tuple[str, ...], plain: bool) -> None:
    assert plain_names(names) == (names if plain else None)


def test_images_of_another_size_are_resized_to_the_networks() -> None:
    own = InputSpec((3, 224, 224), (0.5,), (0.5,))
    small = own.perturbed_at(32)
    assert (small.size, small.resized) == ((3, 32, 32), (224, 224))
    smaller = small.perturbed_at(16)
    assert (smaller.size, smaller.resized) == ((3, 16, 16), (224, 224))
    assert small.perturbed_at(224) == own


@pytest.mark.parametrize("value", [[], "x", 3])
def test_pixels_that_are_no_dictionary_are_refused(value: object) -> None:
    text = json.dumps({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": value})
    with pytest.raises(Refused, match="pretrained_cfg is no dictionary"):
        decode_config(text)
