"""The Triton kernel of `word_sums`. Importing this module needs triton."""

import triton
import triton.language as tl


@triton.jit
def summed(
    owners, table, rows, columns, out,
    TENSORS: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """A program has EACH rows of ROW words of the tensor `owners` names, and reads the columns' factors for all of them
    once; `table` (3, TENSORS) has the tensors' addresses, sizes and first programs. Whole numbers are added: in which
    order makes no difference."""
    program = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + program)
    words = tl.load(table + owner).to(tl.pointer_type(tl.int32))
    size = tl.load(table + TENSORS + owner)
    row = (program - tl.load(table + 2 * TENSORS + owner)) * EACH + tl.arange(0, EACH)
    total = tl.zeros([EACH, BLOCK], tl.int64)
    for start in range(0, ROW, BLOCK):
        column = start + tl.arange(0, BLOCK)
        at = row[:, None] * ROW + column[None, :]
        word = tl.load(words + at, mask=at < size, other=0).to(tl.int64)
        total += word * tl.load(columns + column)[None, :]
    tl.atomic_add(out + owner, tl.sum(tl.sum(total, axis=1) * tl.load(rows + row % ROWS), axis=0))


INTERPRETED = not isinstance(summed, triton.JITFunction)
"""Whether triton interprets kernels in numpy (TRITON_INTERPRET=1 when it was imported): they then take CPU tensors."""
