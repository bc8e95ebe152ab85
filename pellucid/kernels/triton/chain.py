# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""How a kernel of a chain of dependent launches waits, and what it does before. Called by kernels.

The next kernel may start only behind the wait of this one. So when a kernel starts, all but the kernel right ahead has
ended, and what older ones wrote can be read before the wait. A program may end without waiting as long as one of its
launch always waits, or the launch could end before the one ahead; and nobody ahead may still read what it writes then.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_input(PDL: tl.constexpr):
    """Until the kernel ahead has ended; from then on the next may start, and waits likewise."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_to_l2(weight, row, there, first, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Asks the L2 for COLUMNS columns of 16-bit `weight` [*, K] from `first` on, 128 bytes at a time.

    `row` [rows] are the weight rows, as int64; rows not `there` ask for row 0 again.
    """
    LINES: tl.constexpr = triton.next_power_of_2((COLUMNS + 63) // 64)
    column = tl.minimum(first + tl.arange(0, LINES) * 64, K - 1)
    address = (weight + tl.where(there, row, 0)[:, None] * K + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
