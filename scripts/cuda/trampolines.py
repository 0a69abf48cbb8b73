"""Writes, in x86-64 assembly, all functions that cudarc declares of NVIDIA's libraries: each jumps to the real one, which
`loader.c` looks for at its first call.

Usage: trampolines.py CUDARC SONAME:MODULE:CODE... > trampolines.S

CUDARC is the folder of cudarc's sources, MODULE the folder below `src` that declares a library's functions, and CODE what
they return where the library is not there.
"""

import pathlib
import re
import sys

# Where a trampoline leads before the function was looked for. It must keep all registers in which arguments may lie.
RESOLVE = """
girandole_resolve:
    push %rdi
    push %rsi
    push %rdx
    push %rcx
    push %r8
    push %r9
    push %rax
    sub $136, %rsp
{saves}
    mov 192(%rsp), %rdi
    call girandole_find
    mov %rax, %r11
{restores}
    add $136, %rsp
    pop %rax
    pop %r9
    pop %r8
    pop %rcx
    pop %rdx
    pop %rsi
    pop %rdi
    add $8, %rsp
    jmp *%r11
"""

DECLARATION = re.compile(r"^\s*fn (\w+)\(.*\)(?: -> ([^;]+))?;", re.MULTILINE)


def functions(source):
    """Names of a module's functions, each with what it returns."""
    text = (source / "mod.rs").read_text()
    found = {name: (result or "").strip() for name, result in DECLARATION.findall(text)}
    if not found:
        sys.exit(f"{source}: no functions are declared there; this cudarc is another one than this script knows")
    return sorted(found.items())


def substitute(result, code):
    """The label of what stands in for a function that returns `result`."""
    if "c_char" in result:
        return "girandole_no_text"
    # The libraries' own codes; everything else is a number or a pointer.
    if result.endswith(("Result_t", "CUresult", "tatus_t", "nvrtcResult")):
        return f"girandole_fails_{code}"
    return "girandole_fails_0"


def main():
    cudarc, *libraries = sys.argv[1:]
    lines = [".text"]
    saves = "\n".join(f"    movdqu %xmm{i}, {16 * i}(%rsp)" for i in range(8))
    restores = "\n".join(f"    movdqu {16 * i}(%rsp), %xmm{i}" for i in range(8))
    lines.append(RESOLVE.format(saves=saves, restores=restores))
    names, missing, table = [], [], []
    for library in libraries:
        soname, module, code = library.split(":")
        table.append((soname, len(names)))
        for name, result in functions(pathlib.Path(cudarc) / "src" / module / "sys"):
            number = len(names)
            lines += [
                f".globl {name}",
                f".type {name}, @function",
                f"{name}: jmp *girandole_slots+{8 * number}(%rip)",
                f".size {name}, . - {name}",
                f"girandole_first_{number}: push ${number}",
                "    jmp girandole_resolve",
            ]
            names.append(name)
            missing.append(substitute(result, code))
    for code in sorted({int(library.split(":")[2]) for library in libraries} | {0}):
        lines.append(f"girandole_fails_{code}: mov ${code}, %eax\n    ret")
    lines.append("girandole_no_text: lea girandole_empty(%rip), %rax\n    ret")

    lines.append(".section .rodata\ngirandole_empty: .asciz \"\"")
    lines += [f"girandole_name_{number}: .asciz \"{name}\"" for number, name in enumerate(names)]
    lines += [f"girandole_soname_{number}: .asciz \"{soname}\"" for number, (soname, _) in enumerate(table)]
    lines.append(".globl girandole_library_count\n.hidden girandole_library_count\n.balign 4")
    lines.append(f"girandole_library_count: .long {len(table)}")

    data = {
        "girandole_slots": [f".quad girandole_first_{number}" for number in range(len(names))],
        "girandole_names": [f".quad girandole_name_{number}" for number in range(len(names))],
        "girandole_missing": [f".quad {label}" for label in missing],
        # As `struct library` lies in memory.
        "girandole_libraries": [
            f".quad girandole_soname_{number}\n.long {first}\n.balign 8\n.quad 0\n.long 0\n.balign 8"
            for number, (_, first) in enumerate(table)
        ],
    }
    lines.append(".section .data.rel, \"aw\"")
    for label, entries in data.items():
        lines += [f".globl {label}", f".hidden {label}", ".balign 8", f"{label}:", *entries]
    lines.append(".section .note.GNU-stack, \"\", @progbits")
    print("\n".join(lines))


main()
