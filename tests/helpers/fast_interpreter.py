"""Triton's interpreter, made for a run of thousands of small kernels: what each call did anew is done once."""

from __future__ import annotations

import functools
from typing import Any


def speed_up() -> None:
    """Keeps triton.language patched; for processes in which every kernel is interpreted.

    The interpreter patches it at each launch and at each call of a function by a kernel, which took half the time of
    most kernels. It also makes a table of numpy's types at each operation, describes the types of each shape, which
    nobody asks for, makes the type of each result again, and looks at integer results for an overflow, which it reports
    in debug mode alone.

    And it lets kernels loop to a bound that they have computed: it holds scalars as arrays of one element, of which
    numpy makes no int from 2.4 on. It rounds to FP8 as a GPU does, where it would truncate.
    """
    import torch
    import triton.language as tl
    from triton.language import core
    from triton.language.semantic import TritonSemantic as semantic
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

    make_type, same_type, common_type = core.block_type.__init__, core.dtype.__eq__, semantic.computation_type_impl
    broadcast, unwrap = semantic.broadcast_impl_value, core._unwrap_if_constexpr
    make_operands, make_constant = semantic.binary_op_type_checking_impl, semantic.scalar_constant
    types: dict[Any, dict[str, Any]] = {}
    common_types: dict[Any, Any] = {}
    constants: dict[Any, Any] = {}
    one, no_shape = core.constexpr(1), core.tuple([])

    def known_type(type: Any, element_ty: Any, shape: Any) -> None:
        """What a type with this name holds already, and the size and the shape of its tensors."""
        key = element_ty.name, *(size if size.__class__ is int else unwrap(size) for size in shape)
        if key not in types:
            make_type(type, element_ty, shape)
            type.of_tensor = core.constexpr(type.numel), core.tuple([core.constexpr(size) for size in type.shape])
            types[key] = type.__dict__
        type.__dict__ = types[key]

    def make_tensor(tensor: Any, handle: Any, type: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.numel, tensor.shape = type.of_tensor if type.is_block() else (one, no_shape)

    def is_same_type(one: Any, other: Any) -> bool:
        return one is other or same_type(one, other)

    def known_common_type(self: Any, *args: Any) -> Any:
        one, is_scalar, other, *more = args
        key = one.name, is_scalar, other.name, *more
        if key not in common_types:
            common_types[key] = common_type(self, *args)
        return common_types[key]

    def operands(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        """Operands of one type stay as they are; quotients and pointers have rules of their own."""
        is_plain = len(flags) < 4 and not named and lhs.__class__ is rhs.__class__ is core.tensor
        if is_plain and lhs.type.__dict__ is rhs.type.__dict__ and not lhs.dtype.is_ptr():
            return lhs, rhs
        return make_operands(self, lhs, rhs, *flags, **named)

    def known_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = value, dtype.name
        if key not in constants:
            constants[key] = make_constant(self, value, dtype)
        return constants[key]

    def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape.values == rhs.shape.values else broadcast(self, lhs, rhs)

    def unwrap_if_constant(it: Any) -> Any:
        kind = it.__class__
        return it if kind is int or kind is core.dtype else it.value if kind is core.constexpr else unwrap(it)

    core.block_type.__init__ = known_type
    core.tensor.__init__ = make_tensor
    core.dtype.__eq__ = is_same_type
    core._unwrap_if_constexpr = unwrap_if_constant
    semantic.computation_type_impl = known_common_type
    semantic.binary_op_type_checking_impl = operands
    semantic.scalar_constant = known_constant
    semantic.broadcast_impl_value = broadcast_unequal
    semantic.binary_op_sanitize_overflow_impl = lambda *_: None
    interpreter.InterpreterBuilder.create_fp_to_fp = round_to_fp8
    tl.core.tuple.__init__ = keep_values
    tl.core.tuple.type = property(type_of, lambda shape, type: setattr(shape, "given_type", type))
    interpreter._patch_lang = patch_once
    interpreter._patch_lang_tensor = patch_tensor_too
    interpreter._get_np_dtype = known_np_dtype
