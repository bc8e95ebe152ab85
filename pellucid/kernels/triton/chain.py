# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""How a kernel of a chain of dependent launches waits, and what it does before. Called by kernels.

The next kernel may start only behind the wait of this one. So when a kernel starts, all but the kernel right ahead has
ended, and what older ones wrote can be read before the wait. A program may end without waiting as long as one of its
launch always waits, or the launch could end before the one ahead; and nobody ahead may still read what it writes then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


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
    _ask_l2(weight + tl.where(there, row, 0)[:, None] * K + column[None, :])


@triton.jit
def fetch_share_to_l2(weight, program, LINES: tl.constexpr, PROGRAMS: tl.constexpr):
    """Asks the L2 for this program's share of the first LINES x 128 bytes of a contiguous 16-bit `weight`."""
    SHARE: tl.constexpr = triton.next_power_of_2((LINES + PROGRAMS - 1) // PROGRAMS)
    _ask_l2(weight + tl.minimum(program.to(tl.int64) * SHARE + tl.arange(0, SHARE), LINES - 1) * 64)


@triton.jit
def _ask_l2(address):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


def lines_of(weight: torch.Tensor | None, kib: int, pdl: bool) -> int:
    """The LINES of `fetch_share_to_l2` for up to `kib` KiB of a weight; 0: nothing is fetched."""
    return 0 if weight is None or not pdl else min(kib * 1024, weight.numel() * weight.element_size()) // 128
