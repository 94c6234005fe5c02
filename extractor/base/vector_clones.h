#pragma once

// A build for each vector width, chosen at run time. The sanitizers' run-times cannot live with the
// resolvers that this makes.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define STATETAP_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define STATETAP_VECTOR_CLONES
#endif
