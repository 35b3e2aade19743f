"""certvit merge: an adapter's changes, put into the weights of its base."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from certcli.cli.shared import groups
from certcli.cli.shared.command import Reads, command, group


@group()
class AdapterFolder:
    """What is merged into the base."""

    adapter: Annotated[
        Path,
        typer.Argument(
            metavar="ADAPTER",
            help="Folder that PEFT saved: adapter_config.json, adapter_model.safetensors.",
        ),
        Reads(folder=True),
    ]


@command(
    "certvit merge vit_tiny_patch16_224 ADAPTER -o merged.safetensors",
    page="checkpoints.md",
)
def merge(
    base: groups.Source,
    folder: AdapterFolder,
    output: groups.Output = groups.Output(),
    talk: groups.Talk = groups.Talk(),
) -> None:
    """Merge a LoRA or DoRA adapter into its base: the network that is deployed, to be certified.

    The lineage names the adapter; evidence about the base counts as stale.
    """
    from certcli.models import build, origins
    from certcli.models.open import open_checkpoint

    sink = talk.sink()
    path = output.target("merge", base.ckpt, base, folder)
    adapter = origins.read_adapter(folder.adapter)
    checkpoint = base.open(sink)
    merged = open_checkpoint(base.ckpt, replace(base.hints(), adapter=adapter))
    derived = checkpoint.derive(merged.tensors, "merge", {"adapter": adapter.digest})
    build.load(derived)  # refuses, as every later command would, what is no network
    output.write(derived, path)
    changed = sorted(
        name
        for name, tensor in merged.tensors.items()
        if not tensor.equal(checkpoint.tensors[name])
    )
    sink.document({"output": str(path), "adapter": adapter.digest, "changed": changed})
    sink.text(
        f"{path}: {len(changed)} of {len(merged.tensors)} tensors changed; evidence of the base is stale"
    )
