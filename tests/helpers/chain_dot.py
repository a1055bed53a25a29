"""tl.dot of Triton's interpreter as the MMAs of a GPU do it: one ascending chain, whatever the shape."""

from __future__ import annotations

import numpy as np
import pytest


def use_chain_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces numpy's matmul, whose order of additions depends on the shapes, by additions in fp32 over ascending k.

    For fp32 and fp16: bf16 is held as integers there. Products of FP8 are left as they are.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="a CPU install has no Triton")
    matmul = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        if a.dtype.scalar.is_fp8():
            return matmul(builder, a, b, d, input_precision, max_num_imprecise_acc)
        columns, rows = a.data.astype(np.float32).T[:, :, None], b.data.astype(np.float32)[:, None, :]
        terms = np.empty((len(rows) + 1, *d.data.shape), np.float32)
        terms[0] = d.data
        np.multiply(columns, rows, out=terms[1:])
        assert d.data.size > 1, "numpy adds the terms of a single number in pairs"
        # Over its outermost axis numpy adds one after the other.
        return interpreter.TensorHandle(np.add.reduce(terms, axis=0), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
