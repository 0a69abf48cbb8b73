/* Calls functions with arguments of all kinds, twice: the first call looks for the function, the second one goes to it. */
#include <stdio.h>

struct id {
    char bytes[128];
};
int cuInit(unsigned flags);
int ncclGetVersion(int *version);
const char *ncclGetErrorString(int code);
int ncclCommInitRankConfig(void **comm, int ranks, struct id id, int rank, void *config);
int curandGenerateNormal(void *generator, float *output, unsigned long count, float mean, float deviation);
int cublasGemmEx(void *handle, int a, int b, int m, int n, int k, void *alpha, void *left, int left_type, int left_stride,
                 void *right, int right_type, int right_stride, void *beta, void *into, int into_type, int into_stride,
                 int compute, int algorithm);

#define AT(number) ((void *)(long)number)

int main(void) {
    struct id id;
    for (int i = 0; i < 128; i++) id.bytes[i] = i;
    for (int round = 0; round < 2; round++) {
        int version = -1;
        printf("cuInit %d\n", cuInit(0));
        printf("ncclGetVersion %d, '%s'\n", ncclGetVersion(&version), ncclGetErrorString(2));
        printf("init %d\n", ncclCommInitRankConfig(AT(1), 2, id, 3, AT(4)));
        printf("normal %d\n", curandGenerateNormal(AT(1), AT(2), 3, 4.5f, 5.5f));
        printf("gemm %d\n", cublasGemmEx(AT(1), 2, 3, 4, 5, 6, AT(7), AT(8), 9, 10, AT(11), 12, 13, AT(14), AT(15), 16, 17, 18, 19));
    }
    return 0;
}
