"""`triton.jit` with types that let type checkers accept kernel launches. Import it only if Triton is installed."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import triton


class Kernel:
    """Result type of `jit`. For type checkers only; never instantiated.

    `kernel[grid](...)` launches it; `helper(...)` inlines it into another kernel. Kernel is a class and not a Protocol,
    because pyrefly 1.4 keeps only `__call__` of a Protocol that a decorator returns.
    """

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def __call__(self, *args: object, **kwargs: object) -> Any: ...


def jit(function: Callable[..., object], *, do_not_specialize: Sequence[str] = ()) -> Kernel:
    """Compile `function` with Triton on its first launch.

    do_not_specialize: names of integer arguments that stay arguments. Triton turns any other integer argument with
    value 1 into a constant.

    Triton 3.9 types a launch with the kernel's own signature, whose constants are `tl.constexpr`. A launch passes plain
    integers for these constants, and options such as `num_warps` that the signature does not have. A type checker
    rejects the integers and the options.
    """
    return cast(Kernel, triton.jit(do_not_specialize=list(do_not_specialize))(function))
