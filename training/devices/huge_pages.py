"""Memory in huge pages, since a training step otherwise spends much of its time on page faults.

glibc uses huge pages where an environment variable requests them, and reads it only when a process
starts. So the process sets the variable and replaces itself by a second start of the same command.
RAWTREE_HUGE_PAGES=0 turns this off; GLIBC_TUNABLES=glibc.malloc.hugetlb=1, which `make` sets, saves
the second start.
"""

import os
import sys

# Commands that train nothing: they are faster without a second start.
QUICK = {"--check", "--list", "--report", "--help", "-h"}
TUNABLE = "glibc.malloc.hugetlb"
SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


def start_again_with_them() -> None:
    """Replace this process by the same command with huge pages, if they are useful and missing.

    To be called before any slow import.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    unwanted = os.environ.get("RAWTREE_HUGE_PAGES") == "0" or QUICK & set(sys.argv)
    if TUNABLE in tunables or unwanted or not (is_plain_script() and are_available()):
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, f"{TUNABLE}=1"]))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def is_plain_script() -> bool:
    """Whether Python was started with this script, outside a debugger and a notebook."""
    in_command = sys.argv[0] in sys.orig_argv or "-m" in sys.orig_argv
    observed = sys.gettrace() is not None or "IPython" in sys.modules
    return bool(sys.executable) and in_command and not observed


def are_available() -> bool:
    """Whether glibc supports the variable (2.35 or newer) and the kernel offers huge pages."""
    try:
        version = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ").split(".")
        with open(SETTING, encoding="utf-8") as file:
            return [int(part) for part in version] >= [2, 35] and "[never]" not in file.read()
    except (AttributeError, ValueError, OSError):  # another system or another C library
        return False
