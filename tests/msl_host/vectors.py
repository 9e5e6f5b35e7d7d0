"""Writes msl_vectors.h: Metal's vector types as class templates with every swizzle.

Metal vectors are classes here, not compiler vectors: OpenCL's have other
constructors and conversions. A swizzle is a property, so 4 + 16 + 64 + 256
combinations are generated rather than written.
"""

import itertools

COMPONENTS = "xyzw"
COLOURS = dict(zip(COMPONENTS, "rgba"))
ARITHMETIC = "+ - * / % & | ^ << >>".split()
COMPARISONS = "== != < > <= >= && ||".split()
SCALARS = {
    "float": "float", "half": "half", "bfloat": "bfloat", "int": "int", "uint": "uint", "short": "short",
    "ushort": "ushort", "char": "char", "uchar": "uchar", "long": "long", "ulong": "ulong", "bool": "bool",
}  # fmt: skip


def _each(count, pattern):
    """`pattern` for each component, joined by commas; `{c}` is the component's name."""
    return ", ".join(pattern.format(c=c) for c in COMPONENTS[:count])


def _partitions(count):
    """Ways to build `count` components from scalars and smaller vectors, but for the trivial ones."""
    if count == 0:
        return [()]
    return [(n, *rest) for n in range(1, count + 1) for rest in _partitions(count - n)]


def _constructors(count):
    yield "MSL_F vec() = default;"
    yield f"template <int I = 0> MSL_F constexpr vec(const __constant vec& o) : {_each(count, '{c}(o.{c})')} {{}}"
    yield f"MSL_F constexpr vec(T s) : {_each(count, '{c}(s)')} {{}}"
    yield f"MSL_F constexpr vec({_each(count, 'T {c}_')}) : {_each(count, '{c}({c}_)')} {{}}"
    converted = _each(count, "{c}(T(o.{c}))")
    yield f"template <typename U> MSL_F constexpr explicit vec(vec<U, {count}> o) : {converted} {{}}"
    for parts in _partitions(count):
        if len(parts) in (1, count):
            continue
        arguments, initialisers, at = [], [], 0
        for i, width in enumerate(parts):
            arguments.append(f"vec<T, {width}> p{i}" if width > 1 else f"T p{i}")
            for j in range(width):
                initialisers.append(f"{COMPONENTS[at]}(p{i}{'.' + COMPONENTS[j] if width > 1 else ''})")
                at += 1
        yield f"MSL_F constexpr vec({', '.join(arguments)}) : {', '.join(initialisers)} {{}}"


def _operators(count):
    yield "MSL_F T& operator[](int i) { return (&x)[i]; }"
    yield "MSL_F const T& operator[](int i) const { return (&x)[i]; }"
    yield "MSL_F const __constant T& operator[](int i) const __constant { return (&x)[i]; }"
    for op in ARITHMETIC:
        result = _each(count, "T(a.{c} " + op + " b.{c})")
        yield f"MSL_F friend constexpr vec operator{op}(vec a, vec b) {{ return vec({result}); }}"
        yield f"MSL_F vec& operator{op}=(vec b) {{ *this = *this {op} b; return *this; }}"
    for op in "-~":
        yield f"MSL_F friend constexpr vec operator{op}(vec a) {{ return vec({_each(count, f'T({op}a.{{c}})')}); }}"
    flags = f"vec<bool, {count}>"
    for op in COMPARISONS:
        result = _each(count, "a.{c} " + op + " b.{c}")
        yield f"MSL_F friend constexpr {flags} operator{op}(vec a, vec b) {{ return {flags}({result}); }}"
    yield f"MSL_F friend constexpr {flags} operator!(vec a) {{ return {flags}({_each(count, '!a.{c}')}); }}"


def _swizzle(name, members):
    width = len(members)
    kind = f"vec<T, {width}>" if width > 1 else "T"
    yield f"MSL_F constexpr {kind} get_{name}() const {{ return {kind}({', '.join(members)}); }}"
    if len(set(members)) < width:
        yield f"__declspec(property(get = get_{name})) {kind} {name};"
        return
    stores = " ".join(f"{m} = v{'.' + COMPONENTS[i] if width > 1 else ''};" for i, m in enumerate(members))
    yield f"MSL_F void put_{name}({kind} v) {{ {stores} }}"
    yield f"__declspec(property(get = get_{name}, put = put_{name})) {kind} {name};"


def _swizzles(count):
    for width in (2, 3, 4):
        for members in itertools.product(COMPONENTS[:count], repeat=width):
            # Four-wide swizzles with repeats are rare, and cost most of the compile time.
            if width == 4 and len(set(members)) not in (1, 4):
                continue
            yield from _swizzle("".join(members), members)
    for member in COMPONENTS[:count]:
        yield from _swizzle(COLOURS[member], member)


def _vector(count):
    alignment = 4 if count == 3 else count
    lines = ["typedef T value_type;", f"static constexpr __constant int size = {count};", f"T {_each(count, '{c}')};"]
    lines += [*_constructors(count), *_operators(count), *_swizzles(count)]
    body = "\n".join("  " + line for line in lines)
    return f"template <typename T>\nstruct alignas({alignment} * sizeof(T)) vec<T, {count}> {{\n{body}\n}};"


_GENERAL = """
template <typename T, int N>
struct vec {
  typedef T value_type;
  T v[N];
  MSL_F vec() = default;
  MSL_F vec(T s) { for (int i = 0; i < N; i++) v[i] = s; }
  MSL_F T& operator[](int i) { return v[i]; }
  MSL_F const T& operator[](int i) const { return v[i]; }
};"""

_PACKED = """
template <typename T, int N>
struct packed_vec {
  T v[N];
  MSL_F packed_vec() = default;
  MSL_F packed_vec(vec<T, N> o) { for (int i = 0; i < N; i++) v[i] = o[i]; }
  MSL_F packed_vec(T a, T b) { v[0] = a; v[1] = b; }
  MSL_F packed_vec(T a, T b, T c) { v[0] = a; v[1] = b; v[2] = c; }
  MSL_F packed_vec(T a, T b, T c, T d) { v[0] = a; v[1] = b; v[2] = c; v[3] = d; }
  MSL_F operator vec<T, N>() const { vec<T, N> r; for (int i = 0; i < N; i++) r[i] = v[i]; return r; }
  MSL_F T& operator[](int i) { return v[i]; }
  MSL_F T operator[](int i) const { return v[i]; }
};"""


def header():
    """Text of msl_vectors.h."""
    parts = ["#pragma once", "namespace metal {", _GENERAL, *(_vector(n) for n in (2, 3, 4)), _PACKED]
    for name, scalar in SCALARS.items():
        for n in (2, 3, 4):
            parts.append(f"typedef vec<{scalar}, {n}> {name}{n};")
            parts.append(f"typedef packed_vec<{scalar}, {n}> packed_{name}{n};")
    return "\n".join([*parts, "}  // namespace metal", ""])
