"""What to do next about a verdict: one short step per status, and per reason code where it helps."""

from __future__ import annotations

from pytest_klineage.records import Code, Status, Verdict

BY_STATUS = {
    Status.ACCEPTED: "nothing to do",
    Status.SLOWER: "profile the kernel, or lower at_least= of the case if less is enough",
    Status.INCONCLUSIVE: "quieten the machine, raise --klineage-time-limit, or widen --klineage-margin",
    Status.WRONG_VALUE: (
        "compare with the operator's definition at a small shape; the evidence says where it differs, and"
        " --klineage-seed=1 gives the same inputs again"
    ),
    Status.WRONG_SHAPE: "compare the outputs with the operator's signature: pytest-klineage cases",
    Status.WRONG_DTYPE: "return the data type that the case names",
    Status.CHEAT: "compute the result in every call, with nothing but the arguments",
    Status.WRAPPER: "write the kernel itself, or say library='allow' on the case if a library call is what you want",
    Status.BUILD_ERROR: "read the compiler's messages and build again",
    Status.RUNTIME_ERROR: "run the kernel alone under a debugger or a sanitizer",
    Status.TIMEOUT: "make sure that the kernel ends, then raise the time limit if it is honest work",
    Status.SKIPPED: "run it where the platform and the packages are there: pytest-klineage doctor",
}
"""One entry for every status."""

BY_CODE = {
    Code.INCONCLUSIVE_BUSY: "time it on an idle machine, or raise --klineage-busy-limit",
    Code.INCONCLUSIVE_UNSTABLE: (
        "a longer --klineage-time-limit does not help; look what makes one kernel run at two speeds: threads that the"
        " kernel starts itself and does not bind (std::thread), a quota of CPU time, other programs, changing clocks"
    ),
    Code.INCONCLUSIVE_FEW: "raise --klineage-time-limit; look why a call, or a process's first ones, take so long",
    Code.NON_FINITE: "look for an overflow, a division by zero, or a maximum that was not subtracted",
    Code.UNWRITTEN: "write every element of every output, edges and tails as well",
    Code.INPUT_MUTATED: "copy what the kernel changes; inputs are read-only",
    Code.OUT_OF_BOUNDS: "check tails and strides; build with -fsanitize=address and run the kernel alone",
    Code.ALIASED_OUTPUT: "give each output memory of its own",
    Code.REPLAY: "do not keep results between calls: every call has other contents at the same address",
    Code.LATE_WORK: "finish all work before returning (join threads, use the stream that was handed in)",
    Code.NO_DEVICE_WORK: "launch the kernel in every call, on the stream that it is given",
    Code.TOO_FAST: "less time than the data needs to move: some work was left out",
    Code.FLAG_REFUSED: "use flags of the surface's allow-list: docs/reference/surfaces.md",
    Code.SOURCE_MISSING: "check the path; it is relative to the test file",
    Code.ENTRY_MISSING: 'export the function with extern "C" and the name given by entry=',
    Code.SPILLS: "give the kernel more registers (__launch_bounds__, smaller tiles), or raise max_spills= of the case",
    Code.MISSING_INSTRUCTION: "look why the compiler did not use it: cuobjdump -sass shows what it made instead",
    Code.ARTIFACT: "delete that folder and build it again: --klineage-stage=compile with the same --klineage-artifacts",
    Code.BUILD_IO: "free some disk space, or set --klineage-cache-dir to a folder that can be written",
    Code.RETURNED_ERROR: "the kernel refused the arguments; its own message says which",
    Code.CUDA_ERROR: "run it again with --klineage-sanitize=memcheck, or alone under compute-sanitizer",
    Code.SANITIZER: (
        "go to the line that the tool names; a kernel that refuses the small shape (KLINEAGE_REQUIRE) is watched at the"
        " case's own"
    ),
    Code.NOT_CAPTURABLE: "do not synchronize or allocate in the call, or take another --klineage-policy",
    Code.SKIPPED_REFERENCE: (
        "choose one of the references that the message names, another case, or compare with a kernel (against=)"
    ),
    Code.SKIPPED_MEMORY: "take a smaller shape, or a GPU with more memory",
    Code.LOG_FLOOD: "remove the kernel's output",
    Code.OUT_OF_MEMORY: "use less scratch memory",
    Code.TIMEOUT_BUILD: "raise --klineage-build-timeout, or simplify the source",
    Code.TIMEOUT_LOAD: "do less at import, or raise --klineage-load-timeout",
    Code.SKIPPED_DEPENDENCY: "run pytest-klineage doctor: it names the command that installs what is missing",
}
"""More precise than the status, where there is more to say."""

BY_SURFACE = {
    ("python", Code.ENTRY_MISSING): "define the function at the top of the file or module, named as entry= says: run",
    ("python", Code.EXCEPTION): "call the function by hand on tensors of the case: pytest-klineage cases names them",
    ("python", Code.COMPILE): "correct the line that the message names",
}
"""More precise than both, where languages differ."""

NO_MODULE = "No module named"
"""How Python, and this package after it, begins to say that an import found nothing."""
INSTALL = (
    "install it, or give the file: its path instead of module:function, and also=(...) for files that a kernel imports"
)


def next_step(verdict: Verdict) -> str:
    """What the author of a kernel should do about the reason that decided."""
    if verdict.code is Code.EXCEPTION and NO_MODULE in verdict.reasons[0].message:
        return INSTALL
    special = BY_SURFACE.get((verdict.surface, verdict.code))
    return special or BY_CODE.get(verdict.code) or BY_STATUS[verdict.status]
