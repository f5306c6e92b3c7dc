"""Memory in huge pages: a training step spends much of its time on page faults, and glibc asks for larger pages where a variable
says so that is read when a process starts. So the process starts once more.

RAWTREE_HUGE_PAGES=0 leaves everything as it is; GLIBC_TUNABLES=glibc.malloc.hugetlb=1, as `make` sets it, saves the second start.
"""

import os
import sys

QUICK = {
    "--check",
    "--list",
    "--report",
    "--help",
    "-h",
}  # what trains nothing, and is sooner done without
TUNABLE = "glibc.malloc.hugetlb"
SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


def start_again_with_them():
    """Replace this process by the same one with huge pages, where they are of use and it has them not; before anything is
    imported that takes long."""
    before = os.environ.get("GLIBC_TUNABLES", "")
    unwanted = os.environ.get("RAWTREE_HUGE_PAGES") == "0" or QUICK & set(sys.argv)
    if TUNABLE in before or unwanted or not (may_start_again() and are_of_use()):
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [before, f"{TUNABLE}=1"]))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def may_start_again():
    """Whether the process is a plain run of the script: not one that a debugger watches, nor a notebook's."""
    named = sys.argv[0] in sys.orig_argv or "-m" in sys.orig_argv
    return (
        bool(sys.executable) and named and sys.gettrace() is None and "IPython" not in sys.modules
    )


def are_of_use():
    """Whether glibc knows the variable (2.35) and the kernel has huge pages to give."""
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION").removeprefix("glibc ").split(".")
        with open(SETTING) as file:
            return [int(part) for part in version] >= [2, 35] and "[never]" not in file.read()
    except (AttributeError, ValueError, OSError):  # another system, another C library
        return False
