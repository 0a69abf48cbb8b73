#!/usr/bin/env python3
"""Checks that no modules of a crate use each other in a circle. `check-circles.py [CRATE...]`; all crates unless given.

Looked at are the modules of one folder, each with all that is below it: a parent and its child may use each other, siblings may
not. A module uses another by an import, by a path, or by calling a method that the other one adds to a type of a third. What is
imported through a re-export counts for the module that defines it. Tests are left out, and inline modules belong to their file.
In the crates of LAYERED, the modules of lib.rs are layers besides: each uses only those that are declared after it. Prints up to
three uses that make an edge of a circle; the exit code is then 1.
"""
import pathlib
import re
import sys
from collections import defaultdict

LAYERED = ["comm"]
ITEM = r"\b(?:fn|struct|enum|trait|type|const|static|union|macro_rules!)\s+{}\b"
USE = r"\b(?:pub(?:\([^)]*\))?\s+)?use\s+([^;]+);"
TEST = r"#\[cfg\((?:all\()?test[^\]]*\)\]\s*(?:#\[[^\]]*\]\s*)*"


def block_end(text, at):
    """The end of the item that begins at `at`: after its `;`, or the brace that closes it."""
    depth = 0
    for at in range(at, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0 and text[at] in ";}":
            break
    return at + 1


def code_of(file):
    """A file's code without comments, strings and tests."""
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', "", file.read_text(), flags=re.S)
    while test := re.search(TEST, text):
        text = text[: test.start()] + text[block_end(text, test.end()) :]
    return text


def paths_of(tree, prefix=()):
    """The paths of a use tree, each with the name under which it is imported; `*` for all names."""
    tree = tree.strip()
    if tree.startswith("{"):
        depth, parts = 0, [""]
        for char in tree[1 : tree.rindex("}")]:
            depth += (char == "{") - (char == "}")
            if char == "," and depth == 0:
                parts.append("")
            else:
                parts[-1] += char
        return [path for part in parts for path in paths_of(part, prefix)]
    found = re.match(r"(\w+|\*)\s*(::)?\s*(?:as\s+(\w+))?", tree)
    if not found:
        return []
    name, goes_on, alias = found.groups()
    if goes_on:
        return paths_of(tree[found.end(2) :], prefix + (name,))
    if name == "self":
        return [(prefix, alias or prefix[-1])]
    return [(prefix + (name,), alias or name)]


class Crate:
    def __init__(self, source):
        files = {}
        for file in source.rglob("*.rs"):
            parts = file.relative_to(source).with_suffix("").parts
            if parts != ("main",) or not (source / "lib.rs").exists():
                files[parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts] = file
        self.code = {}
        for module in sorted(files, key=len):
            declared = module == () or re.search(rf"\bmod\s+{module[-1]}\s*;", self.code.get(module[:-1], ""))
            if declared:
                self.code[module] = code_of(files[module])
        self.uses = {
            module: [use for tree in re.findall(USE, code) for use in paths_of(tree)] for module, code in self.code.items()
        }

        self.added = self.added_methods()

    def added_methods(self):
        """
        The methods that a module adds to a type of another one, with that module. Names that the crate has once, of several
        words: others may be methods of other crates.
        """
        names = re.findall(r"\bfn\s+(\w+)", "".join(self.code.values()))
        added = {}
        for module, code in self.code.items():
            for block in re.finditer(r"\bimpl(?:<[^{;]*?>)?\s+(\w+)(?:<[^{;]*?>)?\s+(?:where[^{]*)?\{", code):
                target = next((self.absolute(module, path) for path, name in self.uses[module] if name == block[1]), None)
                if target is not None and self.home(target) != module:
                    methods = re.findall(r"\bfn\s+(\w+)", code[block.start() : block_end(code, block.start())])
                    added |= {name: module for name in methods if "_" in name and names.count(name) == 1}
        return added

    def absolute(self, module, path):
        """A path from the crate's root; None for one of another crate."""
        base, path = module, list(path)
        if path[0] == "crate":
            base, path = (), path[1:]
        elif path[0] in ("self", "super"):
            while path and path[0] in ("self", "super"):
                base = base[:-1] if path.pop(0) == "super" else base
        elif (*module, path[0]) not in self.code:
            return None
        return (*base, *path)

    def home(self, path, seen=()):
        """The module that defines what `path` names."""
        length = next(n for n in range(len(path), -1, -1) if path[:n] in self.code)
        module, rest = path[:length], path[length:]
        if not rest or path in seen or re.search(ITEM.format(rest[0]), self.code[module]):
            return module
        for target, name in self.uses[module]:
            if name in (rest[0], "*"):
                target = self.absolute(module, target[:-1] + rest if name == "*" else target + rest[1:])
                home = target and self.home(target, (*seen, path))
                if home and (name != "*" or re.search(ITEM.format(rest[0]), self.code[home])):
                    return home
        return module

    def imports(self, module):
        """The paths that a module imports or names, but for re-exports."""
        body = re.sub(USE, "", self.code[module])
        names = {name: path for path, name in self.uses[module]}
        passed_on = {path for tree in re.findall(r"\bpub(?:\([^)]*\))?\s+use\s+([^;]+);", self.code[module]) for path, _ in paths_of(tree)}
        yield from (path[:-1] if name == "*" else path for path, name in self.uses[module] if path not in passed_on)
        for path in re.findall(r"(?<![\w:.])[a-z_]\w*(?:::\w+)+", body):
            head, *rest = path.split("::")
            yield (*names.get(head, (head,)), *rest)

    def edges(self):
        """Each use of one module by another: both modules, and what is said of it."""
        for module, code in self.code.items():
            targets = [(path, self.absolute(module, path)) for path in self.imports(module)]
            homes = [("::".join(path), self.home(target)) for path, target in targets if target is not None]
            calls = set(re.findall(r"\.(\w+)\(", code)) & self.added.keys()
            for name, home in homes + [(f"{call}()", self.added[call]) for call in calls]:
                yield module, home, f"{'/'.join(module)} uses {name}"

    def upward(self):
        """The uses of a layer by one below it."""
        layers = re.findall(r"\bmod\s+(\w+)\s*;", self.code[()])
        for module, home, use in self.edges():
            if module and home and layers.index(home[0]) < layers.index(module[0]):
                yield f"{use}, of a layer above it"

    def circles(self):
        """For each folder of modules, those that use each other in a circle, with the uses."""
        below = defaultdict(lambda: defaultdict(set))
        for module, home, use in self.edges():
            # The first folder in which the two part.
            shared = next((n for n, (a, b) in enumerate(zip(module, home)) if a != b), None)
            if shared is not None:
                below[module[:shared], module[shared]][home[shared]].add(use)
        reached = {}
        for folder, start in below:
            found, left = set(), [start]
            while left:
                new = set(below.get((folder, left.pop()), ())) - found
                found |= new
                left += new
            reached[folder, start] = found
        for (folder, module), targets in sorted(below.items()):
            for target in sorted(targets):
                if module in reached.get((folder, target), ()):
                    uses = ", ".join(sorted(targets[target])[:3])
                    yield f"{'::'.join(folder) or 'the root'}: {module} -> {target}: {uses}"


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    crates = sys.argv[1:] or sorted(source.parent.name for source in root.glob("*/src"))
    if unknown := [crate for crate in crates if not (root / crate / "src").is_dir()]:
        sys.exit(f"no crate has the folder {unknown[0]}")
    read = {crate: Crate(root / crate / "src") for crate in crates}
    found = [f"{name}, {line}" for name, crate in read.items() for line in crate.circles()]
    found += [f"{name}, {line}" for name, crate in read.items() if name in LAYERED for line in crate.upward()]
    print("\n".join(found) or f"no circles between the modules of {len(crates)} crates")
    sys.exit(bool(found))


main()
