"""Turns preprocessed Metal source into C++ for OpenCL, and reads kernel signatures.

Most of Metal is already valid: address spaces become OpenCL's through macros
(shim/msl_types.h) and the rest of the language through the shim's headers. What
macros cannot express is rewritten here, on text that has been through the
preprocessor, so there are no comments and no macros left. Line markers stay:
findings and compiler messages name the original file and line.
"""

import re
from dataclasses import dataclass

# Kernel input attributes, in the order of enum Attribute in runtime/runtime.c.
ATTRIBUTES = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threads_per_grid",
    "threadgroups_per_grid",
    "dispatch_threads_per_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "thread_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "quadgroup_index_in_threadgroup",
    "thread_index_in_quadgroup",
    "quadgroups_per_threadgroup",
)
BUFFERS = 31
ATTRIBUTE_ALIASES = {"thread_execution_width": "threads_per_simdgroup", "grid_size": "threads_per_grid"}

_TYPE = r"(?:const\s+)?[\w:]+(?:\s*<[^;{}()]*?>)?"
_LINE_MARKER = re.compile(r'^# \d+ "[^\n]*$', re.M)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    kind: "buffer", "threadgroup" or "attribute"; index: buffer or threadgroup index, or place in
    ATTRIBUTES; writable: a non-const device pointer; scalar: what a buffer points to, one word.
    """

    name: str
    kind: str
    index: int
    writable: bool
    scalar: str = ""


@dataclass(frozen=True)
class Rewritten:
    """Rewritten source, and the explicit instantiations it held: host name -> C++ name."""

    text: str
    host_names: dict


def rewrite(text, function_constants):
    """Rewrite preprocessed Metal `text`.

    function_constants: values by index or by name; the others count as not defined.
    """
    text, host_names = _take_instantiations(text)
    text = _place_threadgroup_variables(text)
    text = _fix_function_constants(text, function_constants)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    return Rewritten(text, host_names)


def _take_instantiations(text):
    """Drop `template [[host_name("h")]] [[kernel]] decltype(f<..>) f<..>;` and note h -> f<..>."""
    pattern = re.compile(
        r'template\s*\[\[\s*host_name\("([^"]+)"\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]|kernel)?'
        r"\s*decltype\(([^;]*?)\)[^;]*;"
    )
    names = {m.group(1): " ".join(m.group(2).split()) for m in pattern.finditer(text)}
    return pattern.sub(";", text), names


_THREADGROUP_VARIABLE = re.compile(
    r"(?<=[;{}])((?:\s|(?<=\n)#[^\n]*(?=\n))*)threadgroup\s+((?:const\s+)?(?:typename\s+)?[A-Za-z_][\w:]*"
    r"(?:\s*<[^;{}()]*?>)?)\s+([A-Za-z_]\w*\s*(?:\[[^;{}]*?\])?\s*(?:,\s*[A-Za-z_]\w*\s*(?:\[[^;{}]*?\])?\s*)*);"
)


def _place_threadgroup_variables(text):
    """`threadgroup T x[N];` becomes a reference into the memory of the running threadgroup."""
    count = 0

    def place(match):
        nonlocal count
        lines = match.group(1)
        for declarator in split_arguments(match.group(3)):
            name, array = re.match(r"\s*(\w+)\s*((?:\[.*\])?)\s*$", declarator, re.S).groups()
            count += 1
            kind = f"typename msl_type<{match.group(2)} {array}>::type"
            lines += f'auto& {name} = *msl_threadgroup_variable<{kind}>({count}, "{name}");'
        return lines

    return _THREADGROUP_VARIABLE.sub(place, text)


_FUNCTION_CONSTANT = re.compile(
    r"\b(?:(?:static|constexpr|const)\s+)*constant\s+(?:(?:constexpr|const)\s+)*([A-Za-z_][\w:]*)\s+([A-Za-z_]\w*)"
    r"\s*\[\[\s*function_constant\((\w+)\)\s*\]\]\s*;"
)


def _fix_function_constants(text, values):
    """Function constants become constexpr: their values are known when the kernel is built."""

    def fix(match):
        kind, name, index = match.groups()
        value = values.get(int(index)) if index.isdigit() else None
        value = values.get(name) if value is None else value
        spelled = f"({kind})({literal(value)})" if value is not None else "{}"
        defined = "true" if value is not None else "false"
        return (
            f"constant constexpr {kind} {name} = {spelled};"
            f" constant constexpr bool msl_defined_{name} = {defined};"
        )

    text = _FUNCTION_CONSTANT.sub(fix, text)
    return re.sub(r"\bis_function_constant_defined\s*\(\s*(\w+)\s*\)", r"msl_defined_\1", text)


# Each with the reason it is needed.
_SUBSTITUTIONS = [
    (re.compile(pattern, re.S), replacement)
    for pattern, replacement in (
        # String literals are const in OpenCL.
        (r"(?<!const )\bconstant\s+char\s*\*", "const constant char*"),
        # What is in constant memory is const in Metal.
        (rf"(?<!const )\bconstant\s+(?!const\b)({_TYPE})\s*&", r"const constant \1&"),
        # Pointers and references to arrays name private memory; other uses of `thread` are deduced.
        (
            rf"reinterpret_cast<\s*((?:const\s+)?)thread\s+({_TYPE})\s*\*\s*>\s*\(",
            r"(\1__private \2*)(",
        ),
        (r"\bthread(?=\s+[\w:<>, ]+\(\s*&\s*\w+\s*\)\s*\[)", "__private"),
        (rf"\bthread(?=\s+{_TYPE}\s*\*)", "__private"),
        # clang converts half to bfloat through float only.
        (r"\bstatic_cast<([^;(){}&*]+?)>\s*\(", r"msl_cast<\1>("),
        (r"(?<!operator )\b(half|bfloat|float16_t|bfloat16_t)\s*\((?!\s*[&*)])", r"msl_cast<\1>("),
        # clang's OpenCL mode mistakes the deduced type of this pointer step (MLX's loaders).
        (r"\bsrc\s*\+=\s*(str_\w+);", r"src += (int)(\1);"),
        # C++17 has no class template arguments: the descriptor becomes a type.
        (
            r"constexpr\s+auto\s+(\w+)\s*=\s*(?:mpp::)?(?:tensor_ops::)?matmul2d_descriptor\s*\(([^;]*)\)\s*;",
            r"using \1 = mpp::tensor_ops::msl_descriptor<\2>;",
        ),
        # Template arguments carry address spaces on their own.
        (r"\btensor<\s*device\s+", "tensor<__global "),
        (r"\btensor<\s*threadgroup\s+", "tensor<__local "),
        # bfloat literals.
        (r"(?<![\w.])(\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)bf\b", r"((bfloat)\1f)"),
        # Kernels are plain functions that the entry point calls.
        (r"(?<![\w\[])kernel(?=\s+void\b)", ""),
        # `this` is generic in OpenCL: temporaries have no address space.
        (r"(\)\s*(?:const\s+)?)\bthread\b(?=\s*(?:noexcept\b\s*)?[{:;])", r"\1"),
        # Words that OpenCL reserves and Metal does not.
        (r"\b(local|global|generic|pipe|event_t)\b", r"msl_\1"),
    )
]


def literal(value):
    """C++ spelling of a Python value or of a name that is C++ already."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def split_arguments(text):
    """Split at commas outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    return parts + [current] if current.strip() else parts


def _closing(text, start):
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError("unbalanced parentheses in a kernel's signature")


def find_signature(text, name):
    """Parameters of kernel `name` in preprocessed (not rewritten) Metal text.

    Raises KeyError if there is no such kernel, ValueError for an attribute it does not know.
    """
    plain = _LINE_MARKER.sub("", text)
    marked = r"(?:\[\[[^\]]*\bkernel\b[^\]]*\]\]|\bkernel)\s*"
    match = re.search(marked + r"void\s+" + re.escape(name) + r"\s*\(", plain)
    if not match:
        raise KeyError(f"no kernel named {name!r}")
    body = plain[match.end() : _closing(plain, match.end() - 1)]
    parameters, next_buffer = [], 0
    for declaration in split_arguments(body):
        parameter = _parse_parameter(declaration.strip(), next_buffer)
        if parameter.kind == "buffer":
            next_buffer = parameter.index + 1
        parameters.append(parameter)
    return parameters


def _parse_parameter(declaration, next_buffer):
    attributes = ", ".join(re.findall(r"\[\[(.*?)\]\]", declaration, re.S))
    bare = re.sub(r"\[\[.*?\]\]", "", declaration, flags=re.S).strip()
    name = re.search(r"(\w+)\s*$", bare).group(1)
    for word in re.findall(r"\w+", attributes):
        word = ATTRIBUTE_ALIASES.get(word, word)
        if word in ATTRIBUTES:
            return Parameter(name, "attribute", ATTRIBUTES.index(word), False)
    group = re.search(r"\bthreadgroup\((\d+)\)", attributes)
    if group:
        return Parameter(name, "threadgroup", int(group.group(1)), True)
    buffer = re.search(r"\bbuffer\((\d+)\)", attributes)
    if attributes and not buffer:
        raise ValueError(f"the host executor does not know the attribute in: {declaration}")
    writable = not re.search(r"\bconst\b|\bconstant\b", bare)
    index = int(buffer.group(1)) if buffer else next_buffer
    if index >= BUFFERS:
        raise ValueError(f"Metal has buffers 0 to {BUFFERS - 1} only: {declaration}")
    scalar = re.sub(r"\b(?:const|constant|device|volatile|coherent)\b|[*&]|\w+\s*$|__restrict\b", " ", bare).split()
    return Parameter(name, "buffer", index, writable, scalar[0] if len(scalar) == 1 else "")


def entry_point(name, parameters):
    """C++ text of msl_entry(), which calls C++ kernel `name` for one thread."""
    arguments = []
    for i, parameter in enumerate(parameters):
        kind = f"msl_parameter<{i}, msl_kernel>::type"
        if parameter.kind == "attribute":
            arguments.append(f"msl_input<{kind}>::get({parameter.index})")
        elif parameter.kind == "threadgroup":
            arguments.append(f'msl_argument<{kind}>::group({parameter.index}, "{parameter.name}")')
        else:
            arguments.append(f"msl_argument<{kind}>::buffer({parameter.index})")
    return (
        '\n# 1 "msl_entry"\n'
        f"using msl_kernel = decltype({name});\n"
        f'extern "C" void msl_entry() {{ {name}({", ".join(arguments)}); }}\n'
    )
