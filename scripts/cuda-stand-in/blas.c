// A stand-in for cuBLAS (products of matrices, plainly) and for the part of cuRAND that candle needs to start.
#include "stand_in.h"
#include <stdlib.h>
#include <string.h>

enum { R64F = 1, R16F = 2, R32F = 0, R16BF = 14 };

struct handle { void *stream; };
int cublasCreate_v2(struct handle **handle) { return (*handle = calloc(1, sizeof **handle)) ? 0 : 3; }
int cublasDestroy_v2(struct handle *handle) { free(handle); return 0; }
int cublasSetStream_v2(struct handle *handle, void *stream) { handle->stream = stream; return 0; }
int cublasSetMathMode(struct handle *handle, int mode) { (void)handle; (void)mode; return 0; }

static float widen(int type, uint16_t bits) {
    if (type == R16F) { _Float16 half; memcpy(&half, &bits, 2); return (float)half; }
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
static uint16_t narrow(int type, float value) {
    uint16_t bits;
    if (type == R16F) { _Float16 half = (_Float16)value; memcpy(&bits, &half, 2); return bits; }
    uint32_t wide;
    memcpy(&wide, &value, 4);
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

// Matrices lie column by column.
struct product {
    int ta, tb, m, n, k, lda, ldb, ldc, type, batch;
    long long sa, sb, sc;
    double alpha, beta;
    const char *a, *b;
    char *c;
};
#define AT(type, base, index) (((type *)(base))[index])
#define MULTIPLY(type, load, store)                                                                                          \
    for (int batch = 0; batch < p->batch; batch++)                                                                           \
        for (int j = 0; j < p->n; j++)                                                                                       \
            for (int i = 0; i < p->m; i++) {                                                                                 \
                long long ia = batch * p->sa + (p->ta ? (long long)i * p->lda : i), da = p->ta ? 1 : p->lda;                 \
                long long ib = batch * p->sb + (p->tb ? j : (long long)j * p->ldb), db = p->tb ? p->ldb : 1;                 \
                long long ic = batch * p->sc + (long long)j * p->ldc + i;                                                    \
                double sum = 0;                                                                                              \
                for (int l = 0; l < p->k; l++) sum += (double)load(AT(type, p->a, ia + l * da)) * load(AT(type, p->b, ib + l * db)); \
                sum *= p->alpha;                                                                                             \
                if (p->beta != 0) sum += p->beta * load(AT(type, p->c, ic));                                                 \
                AT(type, p->c, ic) = store(sum);                                                                             \
            }
#define SAME(x) (x)
#define FLOAT(x) (float)(x)
#define WIDEN(x) widen(p->type, x)
#define NARROW(x) narrow(p->type, (float)(x))
static void multiply(void *argument) {
    struct product *p = argument;
    if (p->type == R64F) { MULTIPLY(double, SAME, SAME) }
    else if (p->type == R32F) { MULTIPLY(float, SAME, FLOAT) }
    else { MULTIPLY(uint16_t, WIDEN, NARROW) }
    free(p);
}
static int begin(struct handle *handle, struct product product) {
    if (!is_on_device(product.a) || !is_on_device(product.b) || !is_on_device(product.c)) return 7;
    struct product *p = malloc(sizeof *p);
    *p = product;
    p->a = on_host(p->a);
    p->b = on_host(p->b);
    p->c = on_host(p->c);
    stand_in_enqueue(handle->stream, multiply, p);
    return 0;
}
int cublasGemmStridedBatchedEx(struct handle *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int type, int lda, long long sa, const void *b, int tb_type, int ldb, long long sb, const void *beta, void *c, int c_type, int ldc, long long sc, int batch, int compute, int algorithm) {
    (void)algorithm;
    if (type != tb_type || type != c_type) return 15;
    double scale[2];
    const void *given[2] = {alpha, beta};
    for (int i = 0; i < 2; i++) {
        // 64: factors of f16.
        if (compute == 64) { uint16_t half; memcpy(&half, given[i], 2); scale[i] = widen(R16F, half); }
        else if (type == R64F) memcpy(&scale[i], given[i], 8);
        else { float factor; memcpy(&factor, given[i], 4); scale[i] = factor; }
    }
    return begin(handle, (struct product){ta, tb, m, n, k, lda, ldb, ldc, type, batch, sa, sb, sc, scale[0], scale[1], a, b, c});
}
int cublasDgemmStridedBatched(struct handle *handle, int ta, int tb, int m, int n, int k, const double *alpha, const double *a, int lda, long long sa, const double *b, int ldb, long long sb, const double *beta, double *c, int ldc, long long sc, int batch) {
    return begin(handle, (struct product){ta, tb, m, n, k, lda, ldb, ldc, R64F, batch, sa, sb, sc, *alpha, *beta, (const char *)a, (const char *)b, (char *)c});
}

int curandCreateGenerator(void **generator, int kind) { (void)kind; return (*generator = malloc(1)) ? 0 : 102; }
int curandDestroyGenerator(void *generator) { free(generator); return 0; }
int curandSetPseudoRandomGeneratorSeed(void *generator, unsigned long long seed) { (void)generator; (void)seed; return 0; }
int curandSetGeneratorOffset(void *generator, unsigned long long offset) { (void)generator; (void)offset; return 0; }
int curandSetStream(void *generator, void *stream) { (void)generator; (void)stream; return 0; }
