"""torch.fx's tracer, whose proxies carry the concrete tensor of an example (batch of one).

timm's control flow on shapes runs as it does in use. A network that reads a value back into Python
(`.item()`, `bool(tensor)`) is refused, because the graph would hold the example's value. torch's
version counters track tensors that are overwritten in place: a later use of the old value is
refused, because the graph would not show the change.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import iadd, ifloordiv, imatmul, imul, ipow, isub, itruediv
from typing import Any

import torch
from torch import Tensor, fx, nn

from certcli.models.build import own_name
from certcli.models.weights import is_torch_tensor

_STATIC_ATTRIBUTES = frozenset(
    ("shape", "ndim", "dtype", "device", "is_cuda", "is_mps", "is_xla", "is_cpu", "layout", "requires_grad", "is_quantized",
     "is_sparse", "is_sparse_csr", "is_nested", "is_meta", "is_leaf", "names", "itemsize", "nbytes", "is_mkldnn")
)  # fmt: skip
_STATIC_METHODS = frozenset(
    ("size", "dim", "numel", "nelement", "ndimension", "stride", "is_floating_point", "is_complex", "is_contiguous",
     "element_size", "get_device", "type", "storage_offset", "__len__")
)  # fmt: skip
# made from a tensor's shape alone, whatever its values
_SHAPE_ONLY = frozenset(
    ("new_zeros", "new_ones", "new_full", torch.zeros_like, torch.ones_like, torch.full_like)
)


class Untraceable(Exception):
    """The network cannot be followed as a graph; the message names the place and the reason."""

    hint = "the operations that run may not depend on pixels, nor logits on the batch or on earlier calls"


@dataclass(frozen=True)
class ModuleScope:
    """A call of a module that is no leaf: nodes that enter and leave, for the block report."""

    path: str
    kind: str
    entry: fx.Node | None
    exit: fx.Node | None


def _in_place(operation: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    return apply


class Proxy(fx.Proxy):
    """A proxy with its concrete value: a tensor, or a tuple or list of tensors.

    It has the attributes of its value, but is no Tensor: torch would use it as one in C++, and
    crash. A network that branches on `isinstance` is found by running graph and network side by
    side.
    """

    tracer: "Tracer"
    value: Any
    versions: tuple[int, ...]

    def __getattr__(self, name: str) -> Any:
        if "value" not in self.__dict__:  # fx is still constructing the proxy
            return fx.Proxy.__getattr__(self, name)
        attribute_value = getattr(self.value, name)  # AttributeError where the tensor has none
        if name in _STATIC_ATTRIBUTES:
            return attribute_value
        if isinstance(attribute_value, Tensor):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        if callable(attribute_value):
            return fx.proxy.Attribute(self, name)
        raise self.tracer.refusal(f"the network reads '{name}' of a tensor")

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.value, Tensor):  # `q, k, v = x`: what a tensor does
            return iter(self.unbind(0))
        return iter([operator.getitem(self, index) for index in range(len(self.value))])

    # Python's `x += y` would silently fall back to `x = x + y`, which hides that views of x change
    # too
    __iadd__, __isub__, __imul__, __imatmul__ = map(_in_place, (iadd, isub, imul, imatmul))
    __itruediv__, __ifloordiv__, __ipow__ = map(_in_place, (itruediv, ifloordiv, ipow))

    def __setitem__(self, place: Any, value: Any) -> None:
        raise self.tracer.refusal(
            f"{self.tracer.where()}: an assignment into a part of a tensor (torch.cat and torch.where make a new one)"
        )

    def __bool__(self) -> bool:
        if isinstance(self.value, (tuple, list)):
            return bool(self.value)
        raise self.tracer.refusal("the network branches on the value of a tensor")


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value; proxies are none."""
    return [part for part in _leaves_in(value) if isinstance(part, Tensor)]


def _leaves_in(value: Any) -> list[Any]:
    """Return what tuples, lists, slices and dictionaries of any class hold; torch's own trees know
    neither slices nor subclasses."""
    leaves: list[Any] = []
    fx.node.map_aggregate(value, leaves.append)
    return leaves


def _holds_proxy(value: Any) -> bool:
    return any(isinstance(part, fx.Proxy) for part in _leaves_in(value))


@dataclass
class _State:
    constants: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    scopes: list[ModuleScope] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    entered: bool = False
    recording: bool = False
    result: Any = None
    refused: Untraceable | None = None


class Tracer(fx.Tracer):
    """Traces an image (1, c, h, w). `meta`: `path` (module, or the caller's), `shape`, `dtype`."""

    def __init__(self, example: Tensor, is_leaf: Callable[[nn.Module], bool]) -> None:
        # no function of `math` is wrapped while it traces: an interrupted trace would leave each
        # wrapped once more, and every later call of it slower
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self.example = example
        self.decide_leaf = is_leaf
        self.state = _State()
        self.parameter_names: dict[int, str] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.decide_leaf(m)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val  # parameters stay tensors: what depends on no input is computed, not traced

    def refusal(self, reason: str) -> Untraceable:
        """Return the error to raise; it stands even if the network catches it."""
        failure = Untraceable(reason)
        self.state.refused = self.state.refused or failure
        return failure

    def proxy(self, node: fx.Node) -> Proxy:
        return Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            if not self.state.recording and type(a) is Proxy:
                # the network's result, refused like any tensor that was overwritten
                self.state.result = self._concrete(a)
            return a.node
        if isinstance(a, Tensor):
            if not is_torch_tensor(a):
                raise self.refusal(
                    f"{self.where()}: a {type(a).__name__} is no tensor of torch's own"
                )
            # no module can have an attribute of this name: a dot in front
            name = self.parameter_names.get(id(a)) or f".{len(self.state.constants)}"
            if name not in self.state.constants:
                self.state.constants[name] = a
                self.state.versions[name] = a._version
            return self.create_node("get_attr", name, (), {})
        return super().create_arg(a)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not _holds_proxy((args, kwargs)):
            # inside a leaf, or a function of constants: computed, not traced
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return self.create_proxy("call_module", path, args, kwargs)
        name = own_name(self.root, path)
        self.state.stack.append(name)
        entry = next((a.node for a in args if isinstance(a, Proxy)), None)
        try:
            result = forward(*args, **kwargs)
        except Untraceable:
            raise
        except Exception as failure:
            raise Untraceable(
                f"{name or 'the network'} ({type(m).__name__}): {failure_reason(failure)}"
            ) from failure
        self.state.stack.pop()
        leave = result.node if isinstance(result, Proxy) else None
        self.state.scopes.append(ModuleScope(name, type(m).__name__, entry, leave))
        return result

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        if kind == "placeholder":
            if self.state.entered:
                if not args:
                    raise self.refusal("the network takes more than one input")
                return args[0]  # an option, at its default
            self.state.entered = True
            value: Any = self.example
        elif kind == "output":
            return super().create_proxy(
                kind, target, args, kwargs, name, type_expr, proxy_factory_fn
            )
        else:
            value = self._execute(kind, target, args, kwargs)
            if value is None and target is operator.getitem:
                return None  # one of several results, left out: attention weights that nobody needs
            if not tensors_in(value):
                if kind == "call_method" and target in _STATIC_METHODS:
                    return value
                if kind == "call_function" and target in (getattr, torch._assert, len):
                    return value
                # an assignment into a part of a tensor: the graph would not show it
                if value is None:
                    raise self.refusal(
                        f"{self.where()}: {target_name(target)} writes into a tensor"
                    )
                raise self.refusal(
                    f"{self.where()}: {target_name(target)} reads a tensor's value back into Python"
                )
            if (
                kind != "call_module"
                and target in _SHAPE_ONLY
                and not _holds_proxy((args[1:], kwargs))
            ):
                return value
        self.state.recording = True
        proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        self.state.recording = False
        assert isinstance(proxy, Proxy)
        proxy.value = value
        proxy.versions = tuple(tensor._version for tensor in tensors_in(value))
        proxy.node.meta["shape"] = _shape_of_value(value)
        proxy.node.meta["dtype"] = value.dtype if isinstance(value, Tensor) else None
        within = self.state.stack[-1] if self.state.stack else ""
        proxy.node.meta["path"] = own_name(self.root, target) if kind == "call_module" else within
        if (
            args
            and isinstance(args[0], Proxy)
            and args[0].value is value
            and args[0].versions != proxy.versions
        ):
            # written in place: all names of the operand mean the new value from here on; its views
            # stay refused
            args[0].node, args[0].versions = proxy.node, proxy.versions
            return args[0]
        return proxy

    def _execute(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        fixed = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs))]
        args = self._concrete(args)
        kwargs = self._concrete(kwargs)
        if kind == "call_module":
            # hooks were refused before
            value = self.root.get_submodule(target).forward(*args, **kwargs)
        elif kind == "call_method":
            value = getattr(args[0], target)(*args[1:], **kwargs)
        else:
            value = target(*args, **kwargs)
        if any(tensor._version != version for tensor, version in fixed):
            # its name in the graph would still mean a constant
            raise self.refusal(
                f"{self.where()}: {target_name(target)} writes into a tensor what depends on the image"
            )
        return value

    def _concrete(self, value: Any) -> Any:
        return fx.node.map_aggregate(value, self._value_of)

    def _value_of(self, part: Any) -> Any:
        if type(part) is not Proxy:
            return part
        if part.versions != tuple(tensor._version for tensor in tensors_in(part.value)):
            raise self.refusal(f"{self.where()}: uses a tensor after it was overwritten in place")
        return part.value

    def where(self) -> str:
        return self.state.stack[-1] if self.state.stack and self.state.stack[-1] else "the network"


def _shape_of_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return [_shape_of_value(item) for item in value]
    return None


_FAMILIES = ("fft", "linalg", "special")
_SYMBOLS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "mod": "%",
            "floordiv": "//", "and_": "&", "or_": "|", "xor": "^", "invert": "~"}  # fmt: skip


def target_name(target: Any) -> str:
    """Return an operation's name as a network writes it."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    family, _, rest = name.partition("_")
    if family in _FAMILIES and rest:
        return f"torch.{family}.{rest}"
    return _SYMBOLS.get(name, name) if getattr(target, "__module__", "") == "_operator" else name


def failure_reason(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:160]}"
