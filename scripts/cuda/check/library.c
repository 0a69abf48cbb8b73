/* Stands for a library that has some functions: they print what they are given. */
#include <stdio.h>

struct id {
    char bytes[128];
};

int ncclCommInitRankConfig(void **comm, int ranks, struct id id, int rank, void *config) {
    printf("%p %d %d..%d %d %p\n", (void *)comm, ranks, id.bytes[0], id.bytes[127], rank, config);
    return 0;
}

int curandGenerateNormal(void *generator, float *output, unsigned long count, float mean, float deviation) {
    printf("%p %p %lu %g %g\n", generator, (void *)output, count, mean, deviation);
    return 0;
}

int cublasGemmEx(void *handle, int a, int b, int m, int n, int k, void *alpha, void *left, int left_type, int left_stride,
                 void *right, int right_type, int right_stride, void *beta, void *into, int into_type, int into_stride,
                 int compute, int algorithm) {
    printf("%p %d %d %d %d %d %p %p %d %d %p %d %d %p %p %d %d %d %d\n", handle, a, b, m, n, k, alpha, left, left_type,
           left_stride, right, right_type, right_stride, beta, into, into_type, into_stride, compute, algorithm);
    return 0;
}
