"""`triton.jit` with types that a launch satisfies. Import it only where Triton is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import triton


class Kernel:
    """What `jit` returns, as a type checker sees it: never instantiated.

    `kernel[grid](...)` launches it; `helper(...)` inlines it into another kernel. Not a Protocol: pyrefly 1.4 reduces
    a decorator's result to its `__call__` where that is one.
    """

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def jit(function: Callable[..., Any]) -> Kernel:
    """Compile `function` with Triton on its first launch.

    Triton 3.9 types a launch with the kernel's own signature, whose constants are `tl.constexpr`. A launch passes plain
    integers for them, and options such as `num_warps` that the signature lacks: a type checker rejects both.
    """
    return cast(Kernel, triton.jit(function))
