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
        acc = d.data
        for column, row in zip(a.data.astype(np.float32).T, b.data.astype(np.float32), strict=True):
            acc = acc + column[:, None] * row[None, :]
        return interpreter.TensorHandle(acc, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
