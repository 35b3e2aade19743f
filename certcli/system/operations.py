"""See every operation of torch that a block of code runs."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):
    """In `with` this, each operation of aten goes through `seen`, which returns its result."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would load its compiler at the first call, to tell it not to compile this one
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.seen(func, args, kwargs or {})

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError
