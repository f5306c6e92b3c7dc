"""The most memory that a process has needed."""

import jax

from utils import format_bytes, peak_of_process


def peak_memory():
    """{"host": bytes}, and "device": those of the fullest device, where the backend tells."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    devices = [stat["peak_bytes_in_use"] for stat in stats if stat and "peak_bytes_in_use" in stat]
    return {"host": peak_of_process()} | ({"device": max(devices)} if devices else {})


def told(peak):
    """Peaks in words."""
    return ", ".join(f"{where} {format_bytes(size)}" for where, size in peak.items())
