"""The static audit: what a reader notices in the source. It rejects only unambiguous tampering; the rest are notes.

Pattern lists never decide alone whether something is a kernel: every project that tried collected false positives.
What a candidate does is found out by running it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

import msgspec

from pytest_klineage.records import Build, Code, KernelSource, Reason, Surface
from pytest_klineage.surfaces.reads import VENDORS

MAX_NOTES = 20


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What the audit found."""

    reasons: tuple[Reason, ...] = ()
    """Tampering; any of them rejects the kernel."""
    notes: tuple[str, ...] = ()
    """Hints for a reader."""
    fallback: bool = False
    """Whether an exception handler returns something: the shape of a wrapper that hides its own kernel's failure."""


NATIVE_TAMPERING = (
    (r"\bptrace\s*\(", "calls ptrace"),
    (r"\bprocess_vm_(read|write)v\s*\(", "reads another process's memory"),
    (r'"/proc/(\d+|%d|self)/(mem|environ|maps)', "opens another process's memory or environment"),
    (r"\.incbin\b|#\s*embed\b", "embeds a file at compile time"),
    (r'#\s*include\s*[<"]\s*(/|\.\./)', "includes a file outside its own directory"),
    (r"__attribute__\s*\(\(\s*(constructor|destructor)", "runs code when the library is loaded"),
)
NATIVE_NOTES = (
    (r"\bdlopen\s*\(|\bdlsym\s*\(", "looks up symbols of other libraries"),
    (r"\bstd::(thread|async|jthread)\b|\bpthread_create\b", "starts threads of its own"),
    (r"\bgetppid\b|\bfork\s*\(|\bexecv", "deals with processes"),
    (r"\b(cblas_|dnnl_|mkl_)\w+", "names a BLAS or DNN library"),
)
LITERAL_OR_COMMENT = re.compile(
    r'(?P<literal>(?<!\w)(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\')'
    r"|//[^\n]*|/\*.*?\*/",
    re.S,
)
"""Literals, and comments: in a string `//` begins no comment."""
PATCHED_MODULES = frozenset({"torch", "time", "statistics", "sys", "os", "builtins", "ctypes", "gc"})
HARNESS = "pytest_klineage"
COMPUTING = frozenset({"numpy", "scipy", "numexpr", "pandas", "mpmath", "sympy", "networkx", "gmpy2", "_hashlib"})
"""Packages with loops of their own, in Python or compiled, which no trap tells from the kernel's: see
docs/concepts/honest-limits.md."""
INSPECTION = frozenset({"_getframe", "get_objects", "get_referrers", "currentframe", "settrace", "setprofile"})


def audit(source: KernelSource) -> Audit:
    """Read the source. Never raises for strange code: what does not parse is the build's business."""
    if source.surface in (Surface.CPP, Surface.CUDA):
        return _audit_native("\n".join(file.text for file in source.files))
    native = [file.text for file in source.files if not file.name.endswith(".py")]
    found = [_audit_python(file.text) for file in source.files if file.name.endswith(".py")]
    found += [_audit_native("\n".join(native))] if native else []
    return Audit(
        reasons=tuple(reason for item in found for reason in item.reasons),
        notes=tuple(note for item in found for note in item.notes)[:MAX_NOTES],
        fallback=any(item.fallback for item in found),
    )


def foreign_file_reasons(build: Build) -> tuple[Reason, ...]:
    """A reason for every file that a build read and that is neither the source's, the compiler's nor a library's."""
    return tuple(
        Reason(code=Code.TAMPERING, message=f"the build read {name}, which is no part of the source")
        for name in build.reads
        if not VENDORS.search(name)
    )


def included_libraries(build: Build) -> tuple[str, ...]:
    """Headers of libraries that do a kernel's work, by name."""
    return tuple(f"{name.rpartition('/')[2]} as a header" for name in build.reads if VENDORS.search(name))


def _audit_native(text: str) -> Audit:
    spliced = text.replace("??/", "\\").replace("\\\n", "")
    code = LITERAL_OR_COMMENT.sub(lambda found: found[0] if found["literal"] else " ", spliced)
    reasons = tuple(
        Reason(code=Code.TAMPERING, message=f"the source {what}")
        for pattern, what in NATIVE_TAMPERING
        if re.search(pattern, code)
    )
    notes = tuple(f"the source {what}" for pattern, what in NATIVE_NOTES if re.search(pattern, code))
    return Audit(reasons=reasons, notes=notes)


def _audit_python(text: str) -> Audit:
    try:
        with warnings.catch_warnings():
            # Under -W error an odd escape sequence would otherwise hide the whole file.
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The last two are what the parser raises for code that is nested too deeply.
        return Audit()
    reasons, notes, fallback = [], [], False
    aliases = _module_aliases(tree)
    for node in ast.walk(tree):
        reasons += [Reason(code=Code.TAMPERING, message=what) for what in _tampering(node, aliases)]
        notes += [f"line {getattr(node, 'lineno', 0)}: {name} may do the work" for name in _computing(node)]
        if isinstance(node, ast.Attribute) and node.attr in INSPECTION:
            notes.append(f"line {node.lineno}: looks into the interpreter ({node.attr})")
        if isinstance(node, ast.ExceptHandler) and any(isinstance(item, ast.Return) for item in ast.walk(node)):
            fallback = True
            notes.append(f"line {node.lineno}: an exception handler returns a value")
    return Audit(reasons=tuple(reasons), notes=tuple(notes), fallback=fallback)


def _tampering(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """What a statement or call does to modules that are not the kernel's own."""
    for target in _assigned_attributes(node):
        owner = aliases.get(_root(target))
        if owner in PATCHED_MODULES and not _is_flag(target.value):
            yield f"line {target.lineno}: replaces {owner}.{target.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        owner = aliases.get(_root(node.args[0])) if node.args else None
        if owner in PATCHED_MODULES and not _is_flag(node.args[0]):
            yield f"line {node.lineno}: replaces an attribute of {owner} by {node.func.id}"
    if HARNESS in _imported(node):
        yield f"line {getattr(node, 'lineno', 0)}: imports the harness"


def _computing(node: ast.AST) -> list[str]:
    """Packages that compute and that a statement imports."""
    return sorted(COMPUTING & _imported(node))


def _imported(node: ast.AST) -> set[str]:
    """Top-level packages that a statement imports."""
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [item.name for item in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        modules = [node.module or ""]
    return {module.partition(".")[0] for module in modules}


def _module_aliases(tree: ast.AST) -> dict[str, str]:
    """Local name to top-level module, for every import."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                aliases[item.asname or item.name.partition(".")[0]] = item.name.partition(".")[0]
    return aliases


def _assigned_attributes(node: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that a statement assigns to, such as torch.allclose in `torch.allclose = f`."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            for item in ast.walk(target):
                if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
                    yield item
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Attribute):
        yield node.target


def _is_flag(owner: ast.expr) -> bool:
    """Whether attributes of `owner` are switches made to be set: torch.backends.cudnn.benchmark and the like."""
    return ast.unparse(owner).startswith("torch.backends.")


def _root(node: ast.expr) -> str:
    """The leftmost name of a dotted expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
