"""certvit predict: classes of image files, by the network as it is or behind a defence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from certcli.certify.options import Patches
from certcli.cli.shared import groups, output
from certcli.cli.shared.command import Reads, command, group
from certcli.evaluation.threat import Defence
from certcli.system import errors, options, processes

if TYPE_CHECKING:
    from certcli.certify.patch.certifier import ClassProbability


@group()
class Pictures:
    """What is classified, and by what."""

    images: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGES", help="Image files, or folders of them."),
        Reads(),
    ]
    defence: Defence = options.option(
        "none", "patch: the defended classifier of certify --method patch, with the same options."
    )
    prove: bool = options.option(
        False, "With a defence: say for each image which patches provably cannot change its class."
    )


@command(
    "certvit predict m.safetensors photo.jpg",
    "certvit predict m.safetensors FOLDER --defence patch --patch 32",
    "certvit predict m.safetensors photo.jpg --defence patch --patch 2% --prove",
    page="patch.md",
    often=(
        "defence",
        "prove",
        "patches",
        "procedure",
    ),
)
def predict(
    source: groups.Source,
    pictures: Pictures,
    patches: Patches = Patches(),
    machine: groups.BatchDevice = groups.BatchDevice(),
    talk: groups.Talk = groups.Talk(),
) -> None:
    """Predict the class of each image, by the network itself or by its classifier defended against
    patches.
    """
    import torch

    from certcli.certify.patch.certifier import Predictor
    from certcli.images import decoding, folders
    from certcli.images.names import known_class_names

    if pictures.defence == "none" and (patches.patches or pictures.prove):
        raise errors.UsageError(
            "--patch and --prove are for --defence patch",
            "certvit predict ... --defence patch --patch 32",
        )
    processes.require_one("images are classified", "certvit predict without torchrun")
    files, unreadable, left_out = folders.image_files(pictures.images)
    sink = talk.sink()
    if left_out:
        sink.note(left_out)
    if unreadable:
        sink.doubt(
            f"{len(unreadable)} folders cannot be read, and their images are left out: {', '.join(unreadable[:3])}",
            first=True,
        )
    checkpoint = source.open(sink)
    record = checkpoint.record
    decode = decoding.Decoder(checkpoint.record.input)
    names = known_class_names(record.classes, record.class_names)
    if record.class_names is None and names is not None:
        if record.input.size[0] == 3:  # as ImageNet's images
            sink.note("the classes are named as those of ImageNet, since there are 1,000")
        else:
            names = None
    predictor = Predictor(checkpoint, machine.pick(), pictures.defence, patches)
    defended = predictor.defended
    rows: list[dict[str, Any]] = []
    with sink.progress("predict", total=len(files)) as bar:
        for start in range(0, len(files), predictor.at_once):
            part = files[start : start + predictor.at_once]
            predictions = predictor(torch.stack([decode(file) for file in part]), pictures.prove)
            for file, one in zip(part, predictions, strict=True):
                row: dict[str, Any] = {"image": str(file), "prediction": one.prediction}
                if names and one.prediction is not None:
                    row["name"] = names[one.prediction]
                if one.top:
                    row["top"] = [_named_choice(choice, names) for choice in one.top]
                rows.append({**row, "proven": list(one.proven)} if pictures.prove else row)
            bar.advance(len(part))
    about = {} if defended is None else {**defended.about, "parameters": dict(defended.parameters)}
    about |= {"unreadable": len(unreadable)} if unreadable else {}
    sink.document(
        {"checkpoint": checkpoint.digest, "defence": pictures.defence, **about, "predictions": rows}
    )
    shown = [
        name
        for name in ("image", "prediction", "name", "top", "proven")
        if any(name in row for row in rows)
    ]
    title = "the network as it is" if defended is None else defended.title
    sink.table(title, shown, [[_cell(row.get(name)) for name in shown] for row in rows])
    if defended is not None:
        sink.text(defended.statement)


def _named_choice(choice: ClassProbability, names: Sequence[str] | None) -> dict[str, Any]:
    words = {} if names is None else {"name": names[choice.prediction]}
    return {"class": choice.prediction, **words, "probability": choice.probability}


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, list):
        return str(value)
    if value and isinstance(value[0], dict):
        parts = [
            f"{one.get('name', one['class'])} {output.percent(one['probability'])}" for one in value
        ]
        return ", ".join(parts)
    return " ".join(value) or "nothing"
