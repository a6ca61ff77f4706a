"""What the kernels in a compiled XLA program use: registers, spills, shared memory.

A serialized executable is a Riegeli file of protocol buffers within another one, compressed by
Snappy. Each custom kernel is a message of the machine code (an ELF file: a cubin, or AMD's code
object), its name, the size of its grid and of a program, and its shared memory.
"""

import dataclasses
import math
import struct
from collections.abc import Iterator

import jax
import msgpack

RIEGELI = b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"  # how each file starts
ELF, CUDA = b"\x7fELF", 190  # the latter: the machine of a cubin
NOTE, AMD_METADATA = 7, 32  # types of an ELF section, and of a note in it
REGISTERS, FRAME = 0x2F, 0x11  # attributes in a cubin's section .nv.info


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one kernel uses; of registers and spills, each thread."""

    name: str
    registers: int  # on AMD, of vectors: VGPRs and AGPRs together
    spilled: int  # bytes: of the stack, of scratch memory
    threads: int  # of a program
    shared_memory: int  # bytes of a program: LDS on AMD


def kernels(compiled: jax.stages.Compiled, prefix: str) -> list[Kernel]:
    """The kernels of a program whose names begin with `prefix`."""
    data = compiled.runtime_executable().serialize()
    while (start := data.find(RIEGELI)) >= 0:
        data = _records(data[start:])
    found = []
    at = data.find(ELF)
    while at >= 0:
        image = data[at : at + _elf_size(data[at:])]
        name, registers, spilled = _used(image)
        if name.startswith(prefix):
            found.append(Kernel(name, registers, spilled, *_launch(data, at + len(image))))
        at = data.find(ELF, at + len(image))
    return found


def _launch(data: bytes, at: int) -> tuple[int, int]:
    """(threads, shared memory) from behind the machine code: the rest of two messages.

    Of XLA's KernelLoaderSpecProto: 3 arity, 4 name, 5 arguments; then of its CustomKernelProto: 3
    blocks, 4 threads, 5 cluster, 6 shared memory, left out if 0. All but numbers are bytes.
    """
    fields = _fields(data, at)
    next(value for tag, value in fields if tag == 4)
    sizes = next(value for tag, value in fields if tag == 4)
    [(_, sizes)] = _fields(sizes, 0)
    threads = math.prod(size for _, size in _fields(sizes, 0))
    tag, shared_memory = next((tag, value) for tag, value in fields if tag != 5)
    return threads, shared_memory if tag == 6 else 0


def _fields(data: bytes, at: int) -> Iterator[tuple[int, bytes | int]]:
    """(number, value) of the fields of a protocol buffer, of numbers and bytes only."""
    while at < len(data):
        key, at = _varint(data, at)
        value, at = _varint(data, at)
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        yield key >> 3, value


def _used(image: bytes) -> tuple[str, int, int]:
    """(name, registers, spilled bytes) of the kernel in an ELF file: of several, or none, zeros.

    Beside the kernels there is the file of all that XLA itself made.
    """
    sections = _sections(image)
    if struct.unpack_from("<H", image, 18)[0] == CUDA:
        code = [name.removeprefix(".text.") for name, *_ in sections if name.startswith(".text.")]
        info = next((body for name, _, body in sections if name == ".nv.info"), b"")
        values = dict(_attributes(info))
        return (code[0], values[REGISTERS], values[FRAME]) if len(code) == 1 else ("", 0, 0)
    notes = (note for _, kind, body in sections if kind == NOTE for note in _amd_notes(body))
    kernels = next(note["amdhsa.kernels"] for note in notes)
    if len(kernels) != 1:
        return "", 0, 0
    spilled = max(kernels[0][".vgpr_spill_count"] * 4, kernels[0][".private_segment_fixed_size"])
    return kernels[0][".name"], kernels[0][".vgpr_count"], spilled


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:  # of a function: its symbol, the value
            if size == 8:
                yield attribute, struct.unpack_from("<I", info, at + 4)[0]
            at += size


def _amd_notes(section: bytes) -> Iterator[dict]:
    at = 0
    while at < len(section):
        name, size, kind = struct.unpack_from("<III", section, at)
        at += 12 + (name + 3) // 4 * 4
        if kind == AMD_METADATA:
            yield msgpack.unpackb(section[at : at + size])
        at += (size + 3) // 4 * 4


def _sections(image: bytes) -> list[tuple[str, int, bytes]]:
    """(name, type, content) of the sections of an ELF file."""
    start = struct.unpack_from("<Q", image, 40)[0]
    size, count, of_names = struct.unpack_from("<HHH", image, 58)
    heads = [struct.unpack_from("<II16xQQ", image, start + size * n) for n in range(count)]
    names = heads[of_names][2]
    return [
        (image[names + name :].split(b"\0", 1)[0].decode(), kind, image[at : at + length])
        for name, kind, at, length in heads
    ]


def _elf_size(image: bytes) -> int:
    """The size of an ELF file: its last part is the table of sections or that of segments."""
    segments, sections = struct.unpack_from("<QQ", image, 32)
    segment, n_segments, section, n_sections = struct.unpack_from("<HHHH", image, 54)
    return max(segments + segment * n_segments, sections + section * n_sections)


def _records(file: bytes) -> bytes:
    """All records of a Riegeli file, one behind the other (github.com/google/riegeli, doc/)."""
    file = b"".join(file[n + 24 : n + 65536] for n in range(0, len(file), 65536))  # without block headers
    at, records = 0, b""
    while at + 40 <= len(file):
        size, kind = struct.unpack_from("<8xQ8xB", file, at)
        if at + 40 + size > len(file):
            break  # what follows the file
        if kind == ord("r"):
            records += _simple_chunk(file[at + 40 : at + 40 + size])
        at += 40 + size
    return records


def _simple_chunk(chunk: bytes) -> bytes:
    length, at = _varint(chunk, 1)
    values = chunk[at + length :]  # `length` bytes of the records' sizes come first
    if chunk[0] == 0:
        return values
    if chunk[0] != ord("s"):
        raise ValueError(f"a chunk compressed by {chr(chunk[0])!r}, where XLA used to take Snappy")
    return _snappy(values[_varint(values, 0)[1] :])


def _snappy(data: bytes) -> bytes:
    """Decompressed (github.com/google/snappy, format_description.txt)."""
    length, at = _varint(data, 0)
    out = bytearray()
    while len(out) < length:
        tag = data[at]
        at += 1
        kind, size = tag & 3, (tag >> 2) + 1
        if kind == 0:
            if size > 60:
                extra = size - 60
                size = int.from_bytes(data[at : at + extra], "little") + 1
                at += extra
            out += data[at : at + size]
            at += size
            continue
        if kind == 1:
            size, back = ((tag >> 2) & 7) + 4, (tag >> 5) << 8 | data[at]
            at += 1
        else:
            extra = 2 if kind == 2 else 4
            back = int.from_bytes(data[at : at + extra], "little")
            at += extra
        for _ in range(size):  # one at a time: the copy may overlap what it writes
            out.append(out[-back])
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(a number of 7 bits a byte, where it ends)."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
