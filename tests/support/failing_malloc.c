// Preloaded into a process (LD_PRELOAD): large allocations fail as soon as the file that
// STATETAP_FAIL_MALLOC names is there; one that finds the file that STATETAP_HANG_MALLOC names
// removes it and does not come back. So an engine fails, or hangs, in the middle of a step.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

void* malloc(size_t bytes) {
  static void* (*real)(size_t);
  if (real == NULL) real = (void* (*)(size_t))dlsym(RTLD_NEXT, "malloc");
  if (bytes <= 300000) return real(bytes);
  const char* fails = getenv("STATETAP_FAIL_MALLOC");
  const char* hangs = getenv("STATETAP_HANG_MALLOC");
  if (hangs != NULL && unlink(hangs) == 0)
    while (1) pause();
  return fails != NULL && access(fails, F_OK) == 0 ? NULL : real(bytes);
}
