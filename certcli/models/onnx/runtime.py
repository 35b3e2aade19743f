"""ONNX Runtime beside the network: it runs the file itself, image by image, in float32."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from certcli.models.onnx.file import required
from certcli.models.pixels import PixelModel
from certcli.nn.layers import Rounded
from certcli.system.errors import CheckpointError, one_line

ROUNDING = 2.0**-12
"""Of an image's largest logit, what roundings in float32 may make: 1e-6 to 5e-5 in exports of ViT, DeiT and Swin."""


class Runtime:
    """A session with ONNX Runtime's own options, on the CPU. name: of the program and the session."""

    def __init__(self, path: Path, data: bytes) -> None:
        onnxruntime = required("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = torch.get_num_threads()
        self.name = f"ONNX Runtime {onnxruntime.__version__}, default session, CPU"
        self.path = path
        with self._refusing():
            self.session = onnxruntime.InferenceSession(
                data, options, providers=["CPUExecutionProvider"]
            )

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn its errors, which are of its own types, into a CheckpointError."""
        try:
            yield
        except Exception as failure:
            raise CheckpointError(
                f"{self.path}: {self.name}, does not run it ({one_line(failure)})"
            ) from failure

    def run(self, inputs: Tensor) -> Tensor:
        """Return the file's outputs (b, ...) in float64 for inputs (b, ...) of its own scale."""
        source: Any = self.session.get_inputs()[0]
        kind = torch.float64 if source.type == "tensor(double)" else torch.float32
        values = inputs.to(kind).numpy()
        with self._refusing():
            rows = [self.session.run(None, {source.name: one[None]})[0] for one in values]
            return torch.from_numpy(np.concatenate(rows)).double()

    def differences(self, model: PixelModel, batches: Iterable[Tensor]) -> list[str]:
        """Return a doubt where logits of images (b, c, h, w) in [0, 1] differ beyond rounding."""
        count, differing, turned, farthest = 0, 0, 0, 0.0
        weight = next(model.parameters(), torch.zeros(()))
        for pixels in batches:
            with torch.inference_mode():
                inputs = model.normalize(pixels.to(weight.device, weight.dtype))
                ours = model.net(inputs).double().cpu()
                theirs = self.run(inputs.cpu())
            if theirs.shape != ours.shape:
                raise CheckpointError(f"{self.path}: {self.name}, gives other shapes")
            distance = (ours - theirs).abs().amax(1)
            differs = ~(distance <= ROUNDING * ours.abs().amax(1))
            count += len(pixels)
            differing += int(differs.sum())
            turned += int((ours.argmax(1) != theirs.argmax(1)).sum())
            farthest = max(farthest, float(distance.amax()))
        if not differing:
            return []
        holds = "smoothing alone is of" if has_steps(model) else "nothing here holds for"
        return [
            f"{self.name}: of {count} images {differing} have other logits than the network that is read from the file, by "
            f"up to {farthest:.2g}, and {turned} another class: {holds} what it runs"
        ]


def has_steps(net: nn.Module) -> bool:
    """Tell whether a network rounds activations to steps, as a quantised file does."""
    return any(isinstance(part, Rounded) for part in net.modules())


class RunByRuntime(nn.Module):
    """What ONNX Runtime answers, with the gradients of the network that is read."""

    def __init__(self, net: nn.Module, runtime: Runtime) -> None:
        super().__init__()
        self.net = net
        self.runtime = runtime

    def forward(self, inputs: Tensor) -> Tensor:
        answers = self.runtime.run(inputs.detach().cpu()).to(inputs)
        if not torch.is_grad_enabled():
            return answers
        ours: Tensor = self.net(inputs)
        return answers + (ours - ours.detach())
