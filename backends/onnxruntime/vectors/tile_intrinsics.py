"""AMX instructions as Numba's intrinsics: the functions of :mod:`.tiles` that multiply on matrix tiles.

They are written as assembly text, which LLVM takes whatever processor it compiles for; kernels with them are bound where
:func:`graphc.backends.host.processor.has_matrix_tiles` holds.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir as ll
from numba.core import cgutils, types
from numba.extending import intrinsic

from graphc.backends.onnxruntime.vectors.functions import BOOL, F32, I32, I64, POINTER, call
from graphc.backends.onnxruntime.vectors.tiles import PIXEL_BYTES, SIDE, STEP_BYTES

WIDTH = 16
"""Floats in a row of a tile."""

PLANE = STEP_BYTES // 3
"""Bytes from one part of the numbers of a step to the next."""

_HIGHEST = 3.4028234663852886e38
"""The largest finite float32."""

_LARGEST = 1e17
"""The largest number whose products overflow in no sum of 30,000: a part of one that overflows has any sign."""

_CONFIGURATION = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])
"""Palette 1: eight tiles of 16 rows of 64 bytes."""


@dataclass(frozen=True, slots=True)
class _Operand:
    """How the numbers of a step lie.

    Attributes:
        row, part, tile: bytes from one row of a tile to the next, from one part of the numbers to the next, and from the first
            tile to the second.
        listed: a table tells where each step lies, as bytes behind the address; else one follows another.
    """

    row: int
    part: int
    tile: int
    listed: bool


_PACKED = _Operand(64, PLANE, 1024, False)
_PIXELS = _Operand(PIXEL_BYTES, PIXEL_BYTES // 3, 16 * PIXEL_BYTES, True)
_PAIRS = _Operand(2 * PIXEL_BYTES, 2 * PIXEL_BYTES // 3, PIXEL_BYTES // 3, True)


_LOW, _MIDDLE, _HIGH = range(3)


def _product(a: _Operand, b: _Operand, half: int) -> str:
    """16 of the 32 columns: a step after another, each of six products of the operands' parts, the smallest first.

    The loop writes five of the eight tiles: two of results, two of a's rows and one of b's columns. All eight, with results of
    32 columns and fewer loads, take 3 % less time as long as nobody else uses the core. But while another system runs on its
    other hardware thread, loads take the longer the more tiles a loop writes: nanoseconds of a step of 32 columns in one run,
    alone and beside a neighbour, are 187 and 690 with eight tiles, 196 and 480 with six, and **192 and 405** with five. In
    another run three took 250 and 340 where five took 192 and 372. Each load follows the last product that reads its tile.
    """
    lines = ["movq $11, %rdx", "movq $11, %r11", "shlq $$4, %r11", "addq $10, %r11"]
    lines += [f"tileloadd {64 * half}({start},%rdx,1), %tmm{row}" for row, start in enumerate(("$10", "%r11"))]
    lines += [f"movl $${a.row}, %eax", f"movl $${b.row}, %edx", ".p2align 4", "1:"]
    places, following = ["$0", "$1"], ["addq $$8, $3"]
    for number, operand in enumerate((a, b)):
        if operand.listed:
            places[number] = "%r10"
            lines += ["movq ($3), %r10", f"addq ${number}, %r10"]
        else:
            following.append(f"addq $${STEP_BYTES}, ${number}")

    def left(row: int, part: int) -> str:
        return f"tileloadd {a.part * part + a.tile * row}({places[0]},%rax,1), %tmm{2 + row}"

    def right(part: int) -> str:
        return f"tileloadd {b.part * part + b.tile * half}({places[1]},%rdx,1), %tmm4"

    above, below = (f"tdpbf16ps %tmm4, %tmm{2 + row}, %tmm{row}" for row in range(2))
    lines += [right(_HIGH), left(0, _LOW), left(1, _LOW), above, left(0, _MIDDLE), below, left(1, _MIDDLE)]
    lines += [above, below, right(_MIDDLE), above, left(0, _HIGH), below, left(1, _HIGH)]
    lines += [above, below, right(_LOW), above, below, right(_HIGH), above, below]
    lines += [*following, "decq $2", "jnz 1b", "movq $9, %rax", "movq $9, %r11", "shlq $$4, %r11", "addq $8, %r11"]
    lines += [f"tilestored %tmm{row}, {64 * half}({result},%rax,1)" for row, result in enumerate(("$8", "%r11"))]
    return "\n".join(lines)


def _row_product() -> str:
    """As :func:`_product` for 16 rows and 32 columns: a tile of a, and two of b."""
    lines = ["movl $$64, %eax", "tilezero %tmm0", "tilezero %tmm1", ".p2align 4", "1:"]

    def left(part: int) -> str:
        return f"tileloadd {1024 * part}($0,%rax,1), %tmm2"

    def right(column: int, part: int) -> str:
        return f"tileloadd {PLANE * part + 1024 * column}($1,%rax,1), %tmm{3 + column}"

    first, second = (f"tdpbf16ps %tmm{3 + column}, %tmm2, %tmm{column}" for column in range(2))
    lines += [left(_HIGH), right(0, _LOW), right(1, _LOW), first, right(0, _MIDDLE), second, right(1, _MIDDLE)]
    lines += [first, second, left(_MIDDLE), first, right(0, _HIGH), second, right(1, _HIGH)]
    lines += [first, second, left(_LOW), first, second, left(_HIGH), first, second]
    lines += [f"addq $${STEP_BYTES // 2}, $0", f"addq $${STEP_BYTES}, $1", "decq $2", "jnz 1b", "movq $7, %rax"]
    lines += [f"tilestored %tmm{column}, {64 * column}($6,%rax,1)" for column in range(2)]
    return "\n".join(lines)


def row_product() -> Any:
    """See :data:`.tiles.row_product`."""
    text = _row_product()

    @intrinsic
    def run(typing_context, a, b, steps, c, c_row):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            a, b, steps, c, c_row = (context.cast(builder, v, t, types.int64) for v, t in given)
            kind = ll.FunctionType(ll.LiteralStructType([I64] * 3), [I64] * 5)
            kept = "=&r,=&r,=&r,0,1,2,r,r,~{rax},~{memory},~{dirflag},~{fpsr},~{flags}"
            builder.asm(kind, text, kept, [a, b, steps, c, c_row], True)
            return context.get_dummy_value()

        return types.void(a, b, steps, c, c_row), emit

    return run


def configure_tiles() -> Any:
    """See :data:`.tiles.configure_tiles`."""

    @intrinsic
    def run(typing_context):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = cgutils.alloca_once_value(builder, ll.Constant(ll.ArrayType(ll.IntType(8), 64), bytearray(_CONFIGURATION)))
            builder.asm(ll.FunctionType(ll.VoidType(), [POINTER]), "ldtilecfg ($0)", "r,~{memory}", [place], True)
            return context.get_dummy_value()

        return types.void(), emit

    return run


def release_tiles() -> Any:
    """See :data:`.tiles.release_tiles`."""

    @intrinsic
    def run(typing_context):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.asm(ll.FunctionType(ll.VoidType(), []), "tilerelease", "~{memory}", [], True)
            return context.get_dummy_value()

        return types.void(), emit

    return run


def tile_product(kind: str) -> Any:
    """See :func:`.tiles.tile_product`."""
    operands = {"packed": (_PACKED, _PACKED), "pixels": (_PIXELS, _PACKED), "pairs": (_PACKED, _PAIRS)}[kind]
    texts = [_product(*operands, half) for half in range(2)]

    @intrinsic
    def run(typing_context, a, b, steps, table, start, start_row, c, c_row):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            a, b, steps, table, start, start_row, c, c_row = (context.cast(builder, v, t, types.int64) for v, t in given)
            kind = ll.FunctionType(ll.LiteralStructType([I64] * 4), [I64] * 8)
            kept = "=&r,=&r,=&r,=&r,0,1,2,3,r,r,r,r,~{rax},~{rdx},~{r10},~{r11},~{memory},~{dirflag},~{fpsr},~{flags}"
            for text in texts:
                builder.asm(kind, text, kept, [a, b, steps, table, c, c_row, start, start_row], True)
            return context.get_dummy_value()

        return types.void(a, b, steps, table, start, start_row, c, c_row), emit

    return run


def take_next() -> Any:
    """See :data:`.tiles.take_next`."""

    @intrinsic
    def run(typing_context, address):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = context.cast(builder, arguments[0], signature.args[0], types.int64)
            return builder.atomic_rmw("add", builder.inttoptr(word, POINTER), I64(1), "monotonic")

        return types.int64(address), emit

    return run


def split_rows() -> Any:
    """See :data:`.tiles.split_rows`."""

    @intrinsic
    def run(typing_context, x, x_row, y, y_row, part, rows):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, x_row, y, y_row, part, rows = (context.cast(builder, v, t, types.int64) for v, t in given)
            upper = [2 * (lane % WIDTH) + 1 + 2 * WIDTH * (lane // WIDTH) for lane in range(2 * WIDTH)]
            large = _Large(builder)
            with cgutils.for_range(builder, rows, intp=I64) as loop:
                source = builder.add(x, builder.mul(loop.index, x_row))
                target = builder.add(y, builder.mul(loop.index, y_row))
                first, second = (_parts(builder, large.see(_floats(builder, source, 64 * half))) for half in range(2))
                _store_parts(builder, first, second, upper, target, part)
            return large.found()

        return types.boolean(x, x_row, y, y_row, part, rows), emit

    return run


def split_pairs() -> Any:
    """See :data:`.tiles.split_pairs`."""

    @intrinsic
    def run(typing_context, x, x_row, y, y_row, part, half, pairs):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, x_row, y, y_row, part, half, pairs = (context.cast(builder, v, t, types.int64) for v, t in given)
            upper = [lane // 2 * 2 + 1 + 2 * WIDTH * (lane % 2) for lane in range(2 * WIDTH)]
            large = _Large(builder)
            with cgutils.for_range(builder, pairs, intp=I64) as loop:
                source = builder.add(x, builder.mul(builder.shl(loop.index, I64(1)), x_row))
                target = builder.add(y, builder.mul(loop.index, y_row))
                for side in range(2):
                    first = _parts(builder, large.see(_floats(builder, source, 64 * side)))
                    second = _parts(builder, large.see(_floats(builder, builder.add(source, x_row), 64 * side)))
                    _store_parts(builder, first, second, upper, builder.add(target, half) if side else target, part)
            return large.found()

        return types.boolean(x, x_row, y, y_row, part, half, pairs), emit

    return run


def _floats(builder: ll.IRBuilder, address: Any, offset: int) -> Any:
    place = builder.inttoptr(builder.add(address, I64(offset)), POINTER)
    return builder.load(place, typ=ll.VectorType(F32, WIDTH), align=4)


def _parts(builder: ll.IRBuilder, x: Any) -> list[Any]:
    """What bfloat16 holds of x, of the rest and of the rest of that, in the upper halves of words; their sum is x."""
    words = ll.VectorType(I32, WIDTH)
    found: list[Any] = []
    for _ in range(2):
        half, mask = (ll.Constant(words, [I32(number)] * WIDTH) for number in (0x8000, 0xFFFF0000))
        part = builder.and_(builder.add(builder.bitcast(x, words), half), mask)
        x = builder.fsub(x, builder.bitcast(part, x.type))
        found.append(part)
    return [*found, builder.bitcast(x, words)]


def _store_parts(builder: ll.IRBuilder, first: list[Any], second: list[Any], upper: list[int], target: Any, part: Any) -> None:
    """Store the lowest parts of two vectors, then the middle and the highest ones: half words in the order of ``upper``."""
    halves = ll.VectorType(ll.IntType(16), 2 * WIDTH)
    order = ll.Constant(ll.VectorType(I32, 2 * WIDTH), [I32(n) for n in upper])
    for a, b in reversed(list(zip(first, second, strict=True))):
        merged = builder.shuffle_vector(builder.bitcast(a, halves), builder.bitcast(b, halves), order)
        builder.store(merged, builder.inttoptr(target, POINTER), align=64)
        target = builder.add(target, part)


def spread_rows(group: int) -> Any:
    """See :func:`.tiles.spread_rows`."""

    @intrinsic
    def run(typing_context, x, y, y_row, y_sample, rows):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, y, y_row, y_sample, rows = (context.cast(builder, v, t, types.int64) for v, t in given)
            kind, pixels = ll.VectorType(F32, SIDE), SIDE // group
            unknown = cgutils.alloca_once_value(builder, BOOL(0))
            with cgutils.for_range(builder, rows, intp=I64) as loop:
                place = builder.inttoptr(builder.add(x, builder.mul(loop.index, I64(4 * SIDE))), POINTER)
                row = builder.load(place, typ=kind, align=4)
                builder.store(builder.or_(builder.load(unknown), _any(builder, _is_above(builder, row, _HIGHEST))), unknown)
                for sample in range(group):
                    order = ll.Constant(ll.VectorType(I32, pixels), [I32(p * group + sample) for p in range(pixels)])
                    start = builder.add(builder.mul(loop.index, y_row), builder.mul(y_sample, I64(sample)))
                    taken = builder.shuffle_vector(row, ll.Constant(kind, ll.Undefined), order)
                    builder.store(taken, builder.inttoptr(builder.add(y, start), POINTER), align=4)
            return builder.load(unknown)

        return types.boolean(x, y, y_row, y_sample, rows), emit

    return run


def join_rows(group: int) -> Any:
    """See :func:`.tiles.join_rows`."""

    @intrinsic
    def run(typing_context, x, x_row, x_sample, y, rows):
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = zip(arguments, signature.args, strict=True)
            x, x_row, x_sample, y, rows = (context.cast(builder, v, t, types.int64) for v, t in given)
            pixels = SIDE // group
            with cgutils.for_range(builder, rows, intp=I64) as loop:
                start, parts = builder.add(x, builder.mul(loop.index, x_row)), []
                for sample in range(group):
                    place = builder.inttoptr(builder.add(start, builder.mul(x_sample, I64(sample))), POINTER)
                    parts.append(builder.load(place, typ=ll.VectorType(F32, pixels), align=4))
                while len(parts) > 1:  # numbers of two halves lie by turns: those of sample s and s + half of them
                    half, count = len(parts) // 2, 2 * parts[0].type.count
                    order = [lane // 2 + (count // 2 if lane % 2 else 0) for lane in range(count)]
                    mask = ll.Constant(ll.VectorType(I32, count), [I32(lane) for lane in order])
                    parts = [builder.shuffle_vector(parts[s], parts[s + half], mask) for s in range(half)]
                target = builder.inttoptr(builder.add(y, builder.mul(loop.index, I64(4 * SIDE))), POINTER)
                builder.store(parts[0], target, align=4)
            return context.get_dummy_value()

        return types.void(x, x_row, x_sample, y, rows), emit

    return run


class _Large:
    """Whether any number of some vectors is not finite, or too large."""

    def __init__(self, builder: ll.IRBuilder) -> None:
        self._builder, kind = builder, ll.VectorType(BOOL, WIDTH)
        self._place = cgutils.alloca_once_value(builder, ll.Constant(kind, [BOOL(0)] * WIDTH))

    def see(self, vector: Any) -> Any:
        """The vector, whose numbers count."""
        large = _is_above(self._builder, vector, _LARGEST)
        self._builder.store(self._builder.or_(self._builder.load(self._place), large), self._place)
        return vector

    def found(self) -> Any:
        return _any(self._builder, self._builder.load(self._place))


def _is_above(builder: ll.IRBuilder, vector: Any, bound: float) -> Any:
    """The numbers that are not within a bound; NaN is not."""
    kind = vector.type
    size = call(builder, "fabs", kind, vector)
    return builder.not_(builder.fcmp_ordered("<=", size, ll.Constant(kind, [ll.Constant(F32, bound)] * kind.count)))


def _any(builder: ll.IRBuilder, mask: Any) -> Any:
    lanes = ll.IntType(mask.type.count)
    return builder.icmp_unsigned("!=", builder.bitcast(mask, lanes), lanes(0))
