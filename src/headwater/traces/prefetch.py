"""Asking the processor for memory before it is needed, in compiled code.

Knows one instruction, which neither NumPy nor Numba offers. Processors fetch ahead by themselves within a page of
memory, and the weights of a step are about a page. Where there is no such instruction, nothing is done.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LINE_BYTES = 64


@intrinsic
def prefetch(context, array, index):
    """Ask for the cache line of one element of an array; whether the element exists does not matter."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)

    def emit(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        ask = builder.module.declare_intrinsic(
            "llvm.prefetch", (byte,), ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        )
        to_read, second_level_cache, data_not_code = ir.Constant(word, 0), ir.Constant(word, 2), ir.Constant(word, 1)
        builder.call(ask, [place, to_read, second_level_cache, data_not_code])
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


@njit(nogil=True, cache=True)
def ask_for(values):
    """Ask for all of a contiguous array of one axis."""
    for place in range(0, len(values), LINE_BYTES // values.itemsize):
        prefetch(values, place)  # pyright: ignore[reportCallIssue]
