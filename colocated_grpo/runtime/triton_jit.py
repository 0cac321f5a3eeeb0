"""`triton.jit` without the types of kernels. Import it only if Triton is installed."""

from collections.abc import Callable, Sequence
from typing import Any

import triton


def jit(function: Callable[..., object], *, do_not_specialize: Sequence[str] = ()) -> Any:
    """Compile `function` with Triton on its first launch.

    do_not_specialize: names of integer arguments that stay arguments. Triton turns any other integer argument with
    value 1 into a constant.

    Triton 3.9 types a launch with the kernel's own signature. A type checker would reject plain integers for its
    `tl.constexpr` arguments, and options such as `num_warps`.
    """
    return triton.jit(do_not_specialize=list(do_not_specialize))(function)
