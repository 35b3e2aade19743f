"""certvit predict: classes of image files, by the network as it is or behind a defence."""

from pathlib import Path
from typing import Annotated, Any

import typer

from certcli.certify.patch.options import Patches
from certcli.cli.shared import options
from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import Machine, Source, Talk
from certcli.system.errors import UsageError
from certcli.system.processes import require_one


@group()
class Pictures:
    """What is classified, and by what."""

    images: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGES", help="Image files, or folders of them."),
        options.Reads(),
    ]
    defence: Annotated[
        str,
        typer.Option(
            help="patch: the classifier that certify --method patch is about, with the same options."
        ),
    ] = "none"
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="With a defence: say of each image whether a patch can change its class.",
        ),
    ] = False


@command(
    "certvit predict m.safetensors FOLDER --defence patch --patch 32",
    "certvit predict m.safetensors photo.jpg --defence patch --patch 2% --prove",
    page="patch.md",
)
def predict(
    source: Source,
    pictures: Pictures,
    patches: Patches = Patches(),
    machine: Machine = Machine(),
    talk: Talk = Talk(),
) -> None:
    """The class of each image, by the network as it is, or by the classifier that was certified
    against patches.
    """
    import torch

    from certcli.certify.predicting import NO_DEFENCE, Predictor
    from certcli.images.folders import Decoder, image_files

    if pictures.defence == NO_DEFENCE and (patches.patches or pictures.prove):
        raise UsageError(
            "--patch and --prove are for --defence patch",
            "certvit predict ... --defence patch --patch 32",
        )
    require_one("images are classified", "certvit predict without torchrun")
    files, unreadable = image_files(pictures.images)
    sink = talk.sink()
    if unreadable:
        sink.doubt(
            f"{len(unreadable)} folders cannot be read, and their images are left out: {', '.join(unreadable[:3])}",
            first=True,
        )
    checkpoint = source.open(sink)
    record = checkpoint.record
    decode = Decoder(checkpoint.record.input)
    names = record.class_names if len(record.class_names or ()) == record.classes else None
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
                rows.append({**row, "proven": list(one.proven)} if pictures.prove else row)
            bar.advance(len(part))
    about = {} if defended is None else {**defended.about, "parameters": dict(defended.parameters)}
    about |= {"unreadable": len(unreadable)} if unreadable else {}
    sink.document(
        {"checkpoint": checkpoint.digest, "defence": pictures.defence, **about, "predictions": rows}
    )
    shown = [
        name
        for name in ("image", "prediction", "name", "proven")
        if any(name in row for row in rows)
    ]
    title = "the network as it is" if defended is None else defended.title
    sink.table(title, shown, [[_cell(row.get(name)) for name in shown] for row in rows])
    if defended is not None:
        sink.text(defended.statement)


def _cell(value: Any) -> str:
    return (
        " ".join(value) or "nothing"
        if isinstance(value, list)
        else "-"
        if value is None
        else str(value)
    )
