"""Triton's interpreter, made for a run of thousands of small kernels: what each call did anew is done once."""

from __future__ import annotations

import functools
from typing import Any


def speed_up() -> None:
    """Keeps triton.language patched; for processes in which every kernel is interpreted.

    The interpreter patches it at each launch and at each call of a function by a kernel, which took half the time of
    most kernels. It also makes a table of numpy's types at each operation, and describes the types of each shape, which
    nobody asks for.

    And it lets kernels loop to a bound that they have computed: it holds scalars as arrays of one element, of which
    numpy makes no int from 2.4 on. It rounds to FP8 as a GPU does, where it would truncate.
    """
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    if hasattr(interpreter._patch_lang, "__wrapped__"):
        return
    patch_lang, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    np_dtype, convert = interpreter._get_np_dtype, interpreter.InterpreterBuilder.create_fp_to_fp
    modules: set[str] = set()
    np_dtypes: dict[str, Any] = {}

    @functools.wraps(patch_lang)
    def patch_once(fn: Any) -> Any:
        if (module := fn.__globals__["__name__"]) not in modules:
            patch_lang(fn)
            modules.add(module)
        return interpreter._LangPatchScope()  # which restores nothing

    def patch_tensor_too(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    def known_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(dtype)
        return np_dtypes[name]

    def keep_values(shape: Any, args: Any, type: Any = None) -> None:
        shape.values, shape.given_type = list(args), type

    def type_of(shape: Any) -> Any:
        if shape.given_type is None:
            return tl.core._type_for_tuple_values(shape.values)
        given = shape.given_type
        return given if isinstance(given, tl.core.tuple_type) else tl.core.tuple_type(given)

    def round_to_fp8(builder: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if dst_type.scalar != tl.float8e4nv:
            return convert(builder, src, dst_type, rounding_mode)
        rounded = torch.from_numpy(src.data).to(torch.float8_e4m3fn).view(torch.uint8)
        return interpreter.TensorHandle(rounded.numpy(), dst_type.scalar)

    interpreter.InterpreterBuilder.create_fp_to_fp = round_to_fp8
    tl.core.tuple.__init__ = keep_values
    tl.core.tuple.type = property(type_of, lambda shape, type: setattr(shape, "given_type", type))
    interpreter._patch_lang = patch_once
    interpreter._patch_lang_tensor = patch_tensor_too
    interpreter._get_np_dtype = known_np_dtype
