"""The smallest of Triton kernels: whether triton works here is told by any.

Importing this module needs triton.
"""

import triton
import triton.language as tl


@triton.jit
def doubled(x, out):
    """out = 2 x, of one number."""
    tl.store(out, 2 * tl.load(x))
