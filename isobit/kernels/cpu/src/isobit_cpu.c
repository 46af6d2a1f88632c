// One library per instruction set is this file, compiled with one of ISOBIT_AVX512, ISOBIT_AVX2, ISOBIT_NEON,
// ISOBIT_SCALAR (see build.py). One translation unit, so that all kernels share one thread pool;
// every function without `static` is called by library.py.
#include "linear.c"
#include "pointwise.c"
#include "attention.c"
#include "head.c"
#include "sample.c"
