"""A stand-in of NVIDIA's driver library, for machines without GPUs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = """
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilization_t;
int nvmlInit_v2(void) { return %(init)d; }
int nvmlInitWithFlags(unsigned flags) { return %(init)d; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)(0x7f0000000000UL + index); return 0; }
static unsigned index_of(void *device) { return (unsigned)((unsigned long)device - 0x7f0000000000UL); }
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
  const char *text = "NVIDIA H100"; for (unsigned i = 0; i < length && (name[i] = text[i]); i++); return 0; }
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_t *memory) {
  if (memory->version != (sizeof *memory | 2 << 24)) return 25;
  memory->total = 80000000000ULL; memory->used = 1000 + index_of(device); memory->free = 0; return 0; }
int nvmlDeviceGetUtilizationRates(void *device, utilization_t *rates) { rates->gpu = 97; rates->memory = 1; return 0; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *temperature) {
  if (index_of(device)) return 3; *temperature = 61; return 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { *milliwatts = 350000; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
  *reasons = index_of(device) ? %(reasons)d : 0; return 0; }
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int since, unsigned long long *count) { *count = 0; return 0; }
"""


def compiled_driver(folder: Path, *, init: int = 0, reasons: int = 0) -> Path:
    """Compiles the library, or skips the test if there is no compiler.

    Args:
        folder: Where it is put, under its own name.
        init: What its initialization returns; 0 for success.
        reasons: Why the clocks of the second GPU are reduced, as bits.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler for a stand-in of the driver's library")
    source, library = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(SOURCE % {"init": init, "reasons": reasons})
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library
