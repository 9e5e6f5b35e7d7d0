"""Source lines of addresses in a kernel's library, from its DWARF 4 line table.

Small on purpose: the compiler wheel brings no symboliser, and the shim's code
carries no lines, so the plain line table is all a finding needs.
"""

import struct
from pathlib import Path


def _section(data, wanted):
    """Bytes of one section of a 64-bit little-endian ELF file, b"" if absent."""
    offset, = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    names = headers[names_at][4]
    for header in headers:
        start = names + header[0]
        if data[start : data.index(b"\0", start)].decode() == wanted:
            return data[header[4] : header[4] + header[5]]
    return b""


class _Reader:
    def __init__(self, data, at=0):
        self.data, self.at = data, at

    def take(self, form):
        value, = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def leb(self, signed=False):
        value, shift = 0, 0
        while True:
            byte = self.take("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        return value - (1 << shift) if signed and byte & 0x40 else value

    def text(self):
        end = self.data.index(b"\0", self.at)
        value, self.at = self.data[self.at : end].decode(errors="replace"), end + 1
        return value


def _unit_header(reader):
    """Parse one unit's header; returns (end of unit, parameters, files)."""
    length = reader.take("I")
    end = reader.at + length
    version = reader.take("H")
    if version != 4:
        raise ValueError(f"line table of DWARF {version}; kernels are built with DWARF 4")
    program = reader.take("I") + reader.at
    minimum = reader.take("B")
    reader.take("B")  # operations an instruction: 1
    reader.take("B")  # default_is_stmt
    line_base, line_range, opcode_base = reader.take("b"), reader.take("B"), reader.take("B")
    lengths = [reader.take("B") for _ in range(opcode_base - 1)]
    folders = []
    while folder := reader.text():
        folders.append(folder)
    files = []
    while name := reader.text():
        folder = reader.leb()
        files.append(f"{folders[folder - 1]}/{name}" if folder else name)
        reader.leb()  # time of change
        reader.leb()  # length
    reader.at = program
    return end, (minimum, line_base, line_range, opcode_base, lengths), files


def _rows(reader, end, parameters, files):
    """Run one unit's line program; yields (address, file, line, is end of a sequence)."""
    minimum, line_base, line_range, opcode_base, lengths = parameters
    address, file, line = 0, 1, 1

    def row(is_end=False):
        return address, files[file - 1] if 0 < file <= len(files) else "?", line, is_end

    while reader.at < end:
        opcode = reader.take("B")
        if opcode >= opcode_base:
            address += (opcode - opcode_base) // line_range * minimum
            line += line_base + (opcode - opcode_base) % line_range
            yield row()
        elif opcode == 0:  # extended
            size = reader.leb()
            after = reader.at + size
            code = reader.take("B")
            if code == 1:
                yield row(is_end=True)
                address, file, line = 0, 1, 1
            elif code == 2:
                address = reader.take("Q")
            reader.at = after
        elif opcode == 1:
            yield row()
        elif opcode == 2:
            address += reader.leb() * minimum
        elif opcode == 3:
            line += reader.leb(signed=True)
        elif opcode == 4:
            file = reader.leb()
        elif opcode == 8:
            address += (255 - opcode_base) // line_range * minimum
        elif opcode == 9:
            address += reader.take("H")
        else:
            for _ in range(lengths[opcode - 1]):
                reader.leb()


class LineTable:
    """Addresses of one library -> (file, line)."""

    def __init__(self, path):
        data = _section(Path(path).read_bytes(), ".debug_line")
        self.rows = []
        reader = _Reader(data)
        while reader.at < len(data):
            end, parameters, files = _unit_header(reader)
            self.rows += _rows(reader, end, parameters, files)
            reader.at = end

    def find(self, address):
        """(file, line) of the code at `address`, ("?", 0) if unknown. Line 0 stands for 'the line before'."""
        best = ("?", 0)
        previous, known = None, ("?", 0)
        for row in self.rows:
            if previous and not previous[3] and previous[0] <= address < row[0]:
                best = known
            if row[2]:
                known = (row[1], row[2])
            previous = row
        return best
