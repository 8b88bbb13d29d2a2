"""Weigh both packages: size, import graph, carriers, doors and words, one row each.

python dev/weigh.py            all rows as a table
python dev/weigh.py --detail   with the places behind the rows that have any
"""

import ast
import contextlib
import io
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
CARRIERS = (
    *("Attention", "AttentionModule", "Context", "Found", "HeadShard", "LatentPair", "Layer", "Opened", "Owner"),
    *("Pair", "Places", "Rows", "Side", "Site", "Slices", "Stack"),
)
DIALECT = re.compile(r"(What|Whether|How|Where|Which)\b")
DETAIL = "--detail" in sys.argv

TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
MODULES = {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path for path in TREES}


def main() -> None:
    for package in ("locater", "locater_lab"):
        paths = [path for path in TREES if path.is_relative_to(SOURCE / package)]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        statements = sum(isinstance(node, ast.stmt) for path in paths for node in ast.walk(TREES[path]))
        show(f"{package}: files / lines / statements", f"{len(paths)} / {lines:,} / {statements:,}")
    classes = (f"{where(path)}: {name}" for name, path, _ in definitions(ast.ClassDef) if name in CARRIERS)
    carriers = [carrier for carrier in classes if carrier.startswith("locater/")]
    show("carriers of an attention module", len(carriers), carriers)
    chain, cycles = deepest_chain(edges(eager=True)), components(edges(eager=False))
    show("deepest import chain", len(chain), chain)
    show("import cycles, lazy and type-only counted", len(cycles), [" ".join(cycle) for cycle in cycles])
    files = files_of_a_scan()
    show("files with a function call during scan of the tiny Llama", len(files), files)
    show_doors()
    defined = defaultdict(list)
    for name, path, _ in definitions(ast.ClassDef, ast.FunctionDef):
        if not name.startswith("_"):
            defined[name].append(where(path))
    twice = {name: places for name, places in sorted(defined.items()) if len(places) > 1}
    show("public names defined twice", len(twice), [f"{name}: {', '.join(places)}" for name, places in twice.items()])
    dialect = [f"{where(path)}: {text}" for path, text in docstrings() if DIALECT.match(text)]
    show("docstrings that open with What, Whether, How, Where, Which", len(dialect), dialect)


def show(row: str, value: Any, places: Any = ()) -> None:
    print(f"| {row} | {value} |")
    for place in places if DETAIL else ():
        print("   ", place)


def where(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def definitions(*kinds: type) -> Iterator[tuple[str, Path, Any]]:
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, kinds):
                yield str(getattr(node, "name", "")), path, node


def docstrings() -> Iterator[tuple[Path, str]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, (ast.get_docstring(node) or "").partition("\n")[0]


def edges(eager: bool) -> dict[str, set[str]]:
    """Modules by the modules they import: when they are loaded themselves, or ever."""
    return {name: set(imports(name, path, eager)) - {name} for name, path in MODULES.items()}


def imports(name: str, path: Path, eager: bool) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in loaded(TREES[path]) if eager else ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            for alias in node.names:
                full = ".".join(part for part in [*base, alias.name] if part)
                yield full if full in MODULES else full.rpartition(".")[0]
        if isinstance(node, ast.ImportFrom) and not node.level and (module := node.module or "").startswith("locater"):
            full_names = (f"{module}.{alias.name}" for alias in node.names)
            yield from (full if full in MODULES else module for full in full_names)


def loaded(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not typing and not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from loaded(child)


def deepest_chain(graph: dict[str, set[str]]) -> list[str]:
    known: dict[str, list[str]] = {}

    def chain(name: str, above: tuple[str, ...] = ()) -> list[str]:
        if name not in known:
            below = [chain(other, (*above, name)) for other in graph.get(name, ()) if other not in above]
            known[name] = [name, *max(below, key=len, default=[])]
        return known[name]

    return max((chain(name) for name in graph), key=len)


def components(graph: dict[str, set[str]]) -> list[list[str]]:
    reach = {name: reachable(graph, name) for name in graph}
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached, border = set(), [start]
    while border:
        border = [other for name in border for other in graph.get(name, ()) if other not in reached]
        reached |= set(border)
    return reached


def files_of_a_scan() -> list[str]:
    """Trace `locater.scan` of a stored tiny Llama; modules are loaded, and caches filled, before."""
    sys.path[:0] = [str(ROOT / "tests"), str(SOURCE)]
    import locater
    from family_cases import CASES

    (case,) = [case for case in CASES if case.name == "llama"]
    files: set[str] = set()

    def trace(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(str(SOURCE)):
            files.add(frame.f_code.co_filename)

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        case.save(case.build(), Path(folder))
        locater.scan(folder)
        sys.setprofile(trace)
        try:
            locater.scan(folder)
        finally:
            sys.setprofile(None)
    return sorted(where(Path(name)) for name in files)


def show_doors() -> None:
    verbs = verb_options()
    sizes: Counter[str] = Counter()
    for path, node in doors():
        names = {option.arg for option in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        sizes[f"{where(path)}: {node.name}"] = len(names - {"self", "cls"})
    wide = [f"{place} {size}" for place, size in sizes.most_common() if size > 8]
    show("parameters of a public function (most)", max(sizes.values()), wide)
    show("options of a verb (most)", max(verbs.values()), [f"{verb} {count}" for verb, count in verbs.items()])
    show("options of all verbs", sum(verbs.values()))


def doors() -> Iterator[tuple[Path, ast.FunctionDef]]:
    """Public functions, methods and constructors; the commands' own are counted as options."""
    for path, tree in TREES.items():
        for node in tree.body if "cli" not in path.parts else ():
            is_public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
            for method in (node.body if isinstance(node, ast.ClassDef) else [node]) if is_public else ():
                if isinstance(method, ast.FunctionDef) and (method.name == "__init__" or method.name[0] != "_"):
                    yield path, method


def verb_options() -> dict[str, int]:
    from locater.cli.program import Commands

    return {
        verb: sum(option.param_type_name == "option" for option in command.params)
        for verb, command in Commands().items()
    }


if __name__ == "__main__":
    main()
