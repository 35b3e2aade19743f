"""What `constrain` and `adapt` say first: what the network keeps, end to end, on images that took no part."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from certcli.cli.shared.output import Sink

if TYPE_CHECKING:
    from certcli.checkpoint.record import Record
    from certcli.evaluation.fidelity import Fidelity, Witness
    from certcli.images.labelled import Images
    from certcli.models.build import PixelModel

VOUCHED_FOR = 0.15
"""Error of the logits on synthetic photographs up to which it was seen to speak of real ones (`fidelity.ERROR_SHARE`).
Beyond: ViT-Tiny with its attention replaced, fitted without data, told 54 % of first choices at 40 % and kept 0 of 100."""


def witness(
    model: "PixelModel", images: "Images", held_out: "Images", record: "Record", batch_size: int, sink: Sink
) -> "Witness":
    """The original network's word on the held-out images; on all of them where there are too few to hold any out."""
    from certcli.evaluation.fidelity import Witness, known_labels

    judges = held_out if len(held_out) else images
    if not len(held_out):
        sink.warn(f"{len(images)} images are too few to hold any out: what is kept is measured on those that took part")
    labels, why = known_labels(judges, record)
    if why:
        sink.note(f"accuracy is not measured: {why}")
    found = Witness(model, judges, labels, batch_size)
    for doubt in found.doubts(record):
        sink.warn(doubt)
    return found


def told(
    witness: "Witness", model: "PixelModel", record: "Record", took_part: bool, found: "Fidelity | None" = None
) -> dict[str, Any]:
    """The JSON form of what `model` keeps (`found`, where that is known). trained_on: it has seen these images, it says."""
    images = witness.images
    trained = (
        record.dataset is not None
        and images.split == "train"
        and record.dataset in (images.name, f"torch/{images.name}")
    )
    about = {"dataset": images.name, "split": images.split, "took_part": took_part, "trained_on": trained}
    found = witness.compare(witness.logits(model)) if found is None else found
    return {**found.to_json(), **about}


def show(kept: Mapping[str, Any], sink: Sink) -> None:
    """The headline, in sentences."""
    where = "that took part" if kept["took_part"] else "that took no part in this"
    if kept.get("chose"):
        where += ", but in the choice of eta"
    if kept["trained_on"]:
        where += ", though in training"
    share = between(kept["agreement"], kept["agreement_interval"])
    sink.text(
        f"kept, on {kept['images']} images of {kept['dataset']} ({kept['split']}) {where}: first choice on {share}, "
        f"logits to {100 * kept['logits_error']:.1f} %"
    )
    if kept["dataset"] == "synthetic photographs":
        sink.note(
            "synthetic photographs have no class, their first choices are near ties: --dataset for a true agreement"
        )
        if kept["logits_error"] > VOUCHED_FOR:
            sink.warn(
                f"logits off by more than {100 * VOUCHED_FOR:.0f} % on synthetic photographs: on real ones nothing may be "
                "left; --dataset fits to images like yours and judges by them"
            )
    if kept["accuracy_after"] is not None:
        before, after = (
            between(kept[f"accuracy_{when}"], kept[f"accuracy_{when}_interval"]) for when in ("before", "after")
        )
        sink.text(f"accuracy on them: {before} -> {after}")


def between(share: float, interval: list[float]) -> str:
    """\"79.0 % (70 to 86)\": a share with its 95 % interval."""
    return f"{100 * share:.1f} % ({100 * interval[0]:.0f} to {100 * interval[1]:.0f})"
