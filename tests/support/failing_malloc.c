// Preloaded into a process (LD_PRELOAD): large allocations fail as soon as the file that
// STATETAP_FAIL_MALLOC names is there. So an engine fails in the middle of a step.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

void* malloc(size_t bytes) {
  static void* (*real)(size_t);
  if (real == NULL) real = (void* (*)(size_t))dlsym(RTLD_NEXT, "malloc");
  const char* file = bytes > 300000 ? getenv("STATETAP_FAIL_MALLOC") : NULL;
  return file != NULL && access(file, F_OK) == 0 ? NULL : real(bytes);
}
