"""How `certvit adapt` runs its two goals, and the trade that it shows: what is kept against digits of the bound."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.shared.output import Sink, percent
from certcli.system.processes import team

if TYPE_CHECKING:
    import torch

    from certcli.adapt.keep import Keeper
    from certcli.adapt.run import Adapter
    from certcli.adapt.settings import AdaptSettings
    from certcli.checkpoint.file import Checkpoint
    from certcli.images.labelled import Images

PARTS = "Adapted parts, with their relative output error on the calibration images"
PARTS_ALONE = "Adapted parts, with what each alone does to the network's logits"

KEEP = 0.98
MOST_CHOOSING = 100
"""Images that decide how much is changed: enough to tell 98 % from 93, and a third of the time that all would take."""


def check(keep: float | None, settings: "AdaptSettings") -> None:
    """UsageError for a share that is none, or one beside parts that are named."""
    from certcli.evaluation.fidelity import check_keep
    from certcli.system.errors import UsageError

    if keep is None:
        return
    check_keep(keep)
    if settings.refit:
        raise UsageError(
            "--keep belongs to --goal keep, which chooses the parts itself",
            "drop --keep, or the options that name parts",
        )


def usual_share(settings: "AdaptSettings", images: "Images", unseen: "Images") -> float:
    """0.98 of the first choices of a dataset's images; 1 where images have no class or none can be held out, and where the
    parts are named, so that there is nothing to choose.
    """
    from certcli.images.calibration import PHOTOGRAPHS

    return KEEP if len(unseen) and images.name != PHOTOGRAPHS and not settings.refit else 1.0


def begin(
    checkpoint: "Checkpoint",
    settings: "AdaptSettings",
    pixels: "torch.Tensor",
    device: "torch.device",
    keep: float,
    choosing: "Images | None",
) -> "Adapter | Keeper":
    """The one that does what the settings ask for."""
    from certcli.adapt.keep import Keeper
    from certcli.adapt.run import Adapter
    from certcli.evaluation.fidelity import Witness

    if settings.refit:
        return Adapter(checkpoint, settings, pixels, device, team())
    keeper = Keeper(checkpoint, settings, pixels, device, team())
    if choosing is not None and len(choosing):
        asked = choosing.limit(MOST_CHOOSING, settings.seed)
        keeper.choose_by(Witness(keeper.teacher, asked) if team().leads else None, keep)
    return keeper


def fit(adapter: "Adapter | Keeper", state_path: Path, resume: bool, sink: Sink) -> None:
    """Block by block, each one saved, so that an interrupted run can be gone on with; --goal keep is too quick for that."""
    from certcli.adapt.keep import Keeper
    from certcli.adapt.state import load_state, save_state

    if isinstance(adapter, Keeper):
        if resume:
            sink.note("--goal keep saves nothing on its way: it begins again")
        with sink.progress("adapt", total=adapter.steps) as bar:
            for remark in adapter.run():
                bar.advance(remark=remark)
        return
    if team().agree(lambda: resume and state_path.exists()):
        adapter.restore(load_state(state_path, adapter.identity))
        sink.note(f"going on after {adapter.records[-1].path if adapter.records else 'the start'}")
    with sink.progress("adapt", total=adapter.steps) as bar:
        bar.advance(adapter.steps_done)
        for record in adapter.run():
            if team().leads:
                save_state(state_path, adapter.state())
            bar.advance(remark=f"{record.path}: error {percent(record.error)}")


def trade_document(adapter: "Adapter | Keeper") -> dict[str, Any]:
    """{"trade": a row for each rung}, for the report and the record; nothing where no parts were chosen."""
    trade = getattr(adapter, "trade", None)
    return {"trade": [rung.to_json() for rung in trade.rungs]} if trade is not None and trade.rungs else {}


def options_document(adapter: "Adapter | Keeper") -> list[dict[str, Any]]:
    """Every option that was tried alone."""
    trade = getattr(adapter, "trade", None)
    return [] if trade is None else [option.to_json(trade.placed) for option in trade.options]


def show_trade(adapter: "Adapter | Keeper", sink: Sink) -> None:
    trade = getattr(adapter, "trade", None)
    if trade is None or not trade.rungs:
        return
    first = trade.rungs[0].log10_upper
    if first is None:
        sink.note("no bound is proven with floors alone, so there are no digits to gain: see `certvit lipschitz`")
        return
    sink.table(
        "The trade, on images that chose (not those above): > marks what was taken",
        ["", "floors raised", "attentions replaced", "log10 bound", "digits gained", "first choice kept", "logits off"],
        [
            (
                ">" if rung.taken else "",
                str(rung.floors),
                str(rung.attentions),
                "-" if rung.log10_upper is None else f"{rung.log10_upper:.1f}",
                "-" if rung.log10_upper is None else f"{first - rung.log10_upper:.1f}",
                f"{100 * rung.agreement:.1f} %",
                f"{100 * rung.error:.1f} %",
            )
            for rung in trade.rungs
        ],
    )
    sink.table(
        "Each option alone, the mean over the network's parts",
        ["kind", "tried", "taken", "digits", "logits off", "digits for each % of squared error"],
        trade.summary(),
    )
