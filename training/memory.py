"""The most memory that a process has needed."""

import re
import sys

import jax

from utils import format_bytes


def peak_memory():
    """{"host": bytes}, and "device": those of the fullest device, where the backend tells."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    devices = [stat["peak_bytes_in_use"] for stat in stats if stat and "peak_bytes_in_use" in stat]
    return {"host": peak_of_host()} | ({"device": max(devices)} if devices else {})


def peak_of_host():
    """The most main memory that was taken at once."""
    try:  # getrusage would count what the process was before it became Python, as large as the one that started it
        with open("/proc/self/status") as file:
            return int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1]) * 1024
    except (OSError, TypeError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def told(peak):
    """Peaks in words."""
    return ", ".join(f"{where} {format_bytes(size)}" for where, size in peak.items())
