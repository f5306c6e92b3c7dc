"""Run mutants: python -m tests.fuzz KIND BASE FIRST [LAST [SECONDS]]"""

import collections
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.bench import Bench

kind, base, first, *more = sys.argv[1:]
last = int(more[0]) if more else int(first)
seconds = int(more[1]) if more[1:] else 10**9
start = time.monotonic()
with tempfile.TemporaryDirectory(prefix="rawtree-fuzz-") as folder:
    bench, ended = Bench(Path(folder)), collections.Counter()
    for seed in range(int(first), last + 1):
        faults, codes = bench.faults(kind, base, seed)
        ended.update(codes)
        for fault in faults:
            print("-" * 80, fault[:2000], "...", fault[-2000:], sep="\n", flush=True)
        if first == str(last):
            print((Path(folder) / "command").read_text(), codes)
        if time.monotonic() - start > seconds:
            break
    bench.close()
print(f"{seed - int(first) + 1} mutants; exit codes:", dict(ended))
