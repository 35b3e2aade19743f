"""ONNX files as checkpoints: the network of the file, and ONNX Runtime beside it.

What is proven is about the torch network that the file's operators say. ONNX Runtime runs the file
itself: it rewrites graphs and computes in float32, so that its logits differ by rounding. Where they
differ by more, a doubt says so.
"""

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from certcli.checkpoint.file import Checkpoint
from certcli.models.build import OpenCheckpoint, load, with_network
from certcli.models.in_memory import open_module
from certcli.models.onnx.file import opset_of, read_model
from certcli.models.onnx.network import network_of_onnx
from certcli.models.onnx.runtime import Runtime
from certcli.models.origins import Fact, Hints
from certcli.system.errors import CheckpointError, UsageError, one_line


def open_onnx(path: Path, hints: Hints) -> OpenCheckpoint:
    """Open an ONNX file of images; their mean and std are in `hints`."""
    model, data = read_model(path)
    net, size = network_of_onnx(path, model)
    if len(size) != 3:
        raise CheckpointError(
            f"{path} takes inputs of size {size}, and an image has (channels, height, width)",
            "certvit certify NET.onnx --vnnlib SPEC answers queries about other inputs",
        )
    if hints.mean is None or hints.std is None:
        raise UsageError(
            f"{path} does not say the mean and std of its pixels",
            "give --mean and --std; 0 and 1 if it takes pixels in [0, 1]",
        )
    runtime = Runtime(path, data)
    opened = open_module(net, hints.mean, hints.std, size, features=hints.features)
    kinds = Counter(type(part).__name__ for part in net.children())
    parts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    digest = hashlib.sha256(data).hexdigest()
    facts = (
        Fact("architecture", f"ONNX, opset {opset_of(model)}: {parts}", f"sha256 {digest[:16]}"),
        Fact("mean", " ".join(f"{one:g}" for one in hints.mean), "--mean"),
        Fact("std", " ".join(f"{one:g}" for one in hints.std), "--std"),
        Fact("compared with", runtime.name, "on the images"),
    )
    ignored = [name for name in hints.given if name not in ("--mean", "--std")]
    doubts = [f"{path.name} describes its network: {', '.join(ignored)} ignored"] * bool(ignored)
    noise = torch.rand(2, *size, generator=torch.Generator().manual_seed(0))
    try:
        doubts += runtime.differences(load(opened), [noise])
    except (LookupError, RuntimeError, ValueError) as failure:
        raise CheckpointError(
            f"{path} does not take two images at once ({one_line(failure)})",
            "export it with an axis of any number of images",
        ) from failure
    reading = replace(opened.reading, facts=facts, doubts=tuple(doubts))
    record = reading.noted(opened.record)
    vars(opened.net)["num_classes"] = record.classes  # where every other network says it
    return with_network(Checkpoint(opened.tensors, record), opened.net, reading, runtime)
