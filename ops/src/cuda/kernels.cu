// Kernels of fused operations and of the optimizer. Numbers of 16 bits are computed with in f32 and rounded once. A sum has an
// order that depends on sizes alone, so each run gives the same bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

// ---- Rows: a block of threads works on one row, or on one after the other ----

// Combines a number of each thread of a block; all get the result. A block has whole warps, 32 at most.
template <typename T, typename Combine> __device__ T over_block(T x, T neutral, Combine combine) {
    __shared__ T parts[32];
    for (int mask = 16; mask > 0; mask /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, mask));
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    x = lane < blockDim.x / 32 ? parts[lane] : neutral;
    for (int mask = 16; mask > 0; mask /= 2) x = combine(x, __shfl_xor_sync(0xffffffff, x, mask));
    // Nobody writes the next parts before all have read these.
    __syncthreads();
    return x;
}
struct Add {
    template <typename T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct Larger {
    __device__ float operator()(float a, float b) const { return a > b ? a : b; }
};
template <typename T> __device__ T sum(T x) { return over_block(x, T(0), Add()); }
__device__ float largest(float x) { return over_block(x, -INFINITY, Larger()); }

#define EACH(i, width) (unsigned i = threadIdx.x; i < (width); i += blockDim.x)

template <typename T> __device__ void rms_norm(const T *x, const T *weight, T *y, unsigned width, float eps) {
    size_t row = (size_t)blockIdx.x * width;
    float squares = 0;
    for EACH(i, width) {
        float number = x[row + i];
        squares += number * number;
    }
    float scale = 1 / sqrtf(sum(squares) / width + eps);
    for EACH(i, width) y[row + i] = T((float)x[row + i] * scale * (float)weight[i]);
}

// Gradients of the input, and of the weight the part of each block's rows: (blocks, width).
template <typename T>
__device__ void rms_norm_backward(const T *x, const T *weight, const T *gradient, T *of_x, float *of_weight, size_t rows,
                                  unsigned width, float eps) {
    of_weight += (size_t)blockIdx.x * width;
    for EACH(i, width) of_weight[i] = 0;
    for (size_t at = blockIdx.x; at < rows; at += gridDim.x) {
        size_t row = at * width;
        float squares = 0, along = 0;
        for EACH(i, width) {
            float number = x[row + i];
            squares += number * number;
            along += number * (float)gradient[row + i] * (float)weight[i];
        }
        float scale = 1 / sqrtf(sum(squares) / width + eps);
        along = sum(along) * scale * scale / width;
        for EACH(i, width) {
            float number = x[row + i], given = gradient[row + i];
            of_weight[i] += given * number * scale;
            of_x[row + i] = T(scale * (given * (float)weight[i] - number * along));
        }
    }
}

template <typename T>
__device__ void layer_norm(const T *x, const T *weight, const T *bias, T *y, unsigned width, float eps) {
    size_t row = (size_t)blockIdx.x * width;
    float total = 0, squares = 0;
    for EACH(i, width) total += (float)x[row + i];
    float mean = sum(total) / width;
    for EACH(i, width) {
        float off = (float)x[row + i] - mean;
        squares += off * off;
    }
    float scale = 1 / sqrtf(sum(squares) / width + eps);
    for EACH(i, width) y[row + i] = T(((float)x[row + i] - mean) * scale * (float)weight[i] + (float)bias[i]);
}

// Gradients of the input, and of weight and bias the parts of each block's rows: (2, blocks, width).
template <typename T>
__device__ void layer_norm_backward(const T *x, const T *weight, const T *gradient, T *of_x, float *of_parameters, size_t rows,
                                    unsigned width, float eps) {
    float *of_weight = of_parameters + (size_t)blockIdx.x * width;
    float *of_bias = of_parameters + (size_t)(gridDim.x + blockIdx.x) * width;
    for EACH(i, width) of_weight[i] = of_bias[i] = 0;
    for (size_t at = blockIdx.x; at < rows; at += gridDim.x) {
        size_t row = at * width;
        float total = 0, squares = 0, even = 0, along = 0;
        for EACH(i, width) total += (float)x[row + i];
        float mean = sum(total) / width;
        for EACH(i, width) {
            float off = (float)x[row + i] - mean, given = (float)gradient[row + i] * (float)weight[i];
            squares += off * off;
            even += given;
            along += given * off;
        }
        float scale = 1 / sqrtf(sum(squares) / width + eps);
        even = sum(even) / width;
        along = sum(along) * scale * scale / width;
        for EACH(i, width) {
            float off = (float)x[row + i] - mean, given = gradient[row + i];
            of_weight[i] += given * off * scale;
            of_bias[i] += given;
            of_x[row + i] = T(scale * (given * (float)weight[i] - even - off * along));
        }
    }
}

// The sum of the rows of (rows, width): blocks of 32 columns by 8.
template <typename T> __device__ void column_sums(const float *parts, T *sums, unsigned rows, unsigned width) {
    __shared__ float own[8][33];
    unsigned column = blockIdx.x * 32 + threadIdx.x;
    float total = 0;
    if (column < width)
        for (unsigned row = threadIdx.y; row < rows; row += 8) total += parts[(size_t)row * width + column];
    own[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y || column >= width) return;
    for (unsigned i = 1; i < 8; i++) total += own[i][threadIdx.x];
    sums[column] = T(total);
}

// Which keys a query sees.
struct Seen {
    unsigned first, end;
    const uint8_t *hidden;
    // kind: 0 all, 1 up to its own position, 2 the last `window` of these, 3 those after it.
    __device__ Seen(unsigned kind, unsigned window, unsigned query, unsigned queries, unsigned keys, const uint8_t *of_batch)
        : hidden(of_batch) {
        unsigned own = query + keys > queries ? query + keys - queries : 0;
        first = kind == 2 && own + 1 > window ? own + 1 - window : kind == 3 ? own + 1 : 0;
        end = kind == 1 || kind == 2 ? own + 1 : keys;
    }
    // Sees none outside of the query's own document.
    __device__ void within(const uint32_t *bounds) {
        first = first > bounds[0] ? first : bounds[0];
        end = end < bounds[1] ? end : bounds[1];
    }
    __device__ bool operator()(unsigned key) const { return key >= first && key < end && !(hidden && hidden[key]); }
    __device__ bool none() const { return first >= end; }
};

// The weights of a query's keys, in place of its scores. One row for each head and query of a batch; `hidden` is null or (batch, keys),
// `documents` null, or where the document of each key begins and ends: (batch, keys, 2), no fewer keys than queries.
template <typename T>
__device__ void attention_weights(const uint32_t *documents, const uint8_t *hidden, T *scores, unsigned heads, unsigned queries,
                                  unsigned keys, unsigned kind, unsigned window, float scale) {
    size_t place = blockIdx.x, batch = place / ((size_t)heads * queries);
    T *row = scores + place * keys;
    Seen seen(kind, window, place % queries, queries, keys, hidden ? hidden + batch * keys : nullptr);
    if (documents) seen.within(documents + 2 * (batch * keys + place % queries + keys - queries));
    float top = -INFINITY, total = 0;
    for EACH(i, keys) if (seen(i)) top = Larger()(top, (float)row[i] * scale);
    top = largest(top);
    for EACH(i, keys) if (seen(i)) total += expf((float)row[i] * scale - top);
    total = sum(total);
    // Who sees nothing weighs all equally, but for keys that are hidden.
    float even = hidden ? 0.0f : 1.0f / keys;
    for EACH(i, keys) row[i] = T(total > 0 ? (seen(i) ? expf((float)row[i] * scale - top) / total : 0.0f) : even);
}

// The gradient of the scores, in place of that of the weights.
template <typename T>
__device__ void attention_weights_backward(const T *weights, T *gradients, unsigned queries, unsigned keys, unsigned kind,
                                           unsigned window, float scale) {
    size_t place = blockIdx.x;
    const T *row = weights + place * keys;
    T *given = gradients + place * keys;
    // A hidden key has no weight, and so no gradient; who sees nothing gives none.
    bool none = Seen(kind, window, place % queries, queries, keys, nullptr).none();
    float mean = 0;
    for EACH(i, keys) mean += (float)row[i] * (float)given[i];
    mean = sum(mean);
    for EACH(i, keys) given[i] = T(none ? 0.0f : scale * (float)row[i] * ((float)given[i] - mean));
}

// The loss of a row, and its gradient in place of the logits. A target that is no class is ignored.
template <typename T>
__device__ void cross_entropy(const uint32_t *targets, T *logits, float *losses, unsigned classes, float smoothing, float share) {
    T *row = logits + (size_t)blockIdx.x * classes;
    unsigned target = targets[blockIdx.x];
    if (target >= classes) {
        for EACH(i, classes) row[i] = T(0.0f);
        if (threadIdx.x == 0) losses[blockIdx.x] = 0;
        return;
    }
    float top = -INFINITY, total = 0, even = 0, own = row[target];
    for EACH(i, classes) top = Larger()(top, (float)row[i]);
    top = largest(top);
    for EACH(i, classes) {
        float off = (float)row[i] - top;
        total += expf(off);
        even += off;
    }
    total = sum(total);
    even = smoothing > 0 ? sum(even) / classes : 0;
    if (threadIdx.x == 0) losses[blockIdx.x] = logf(total) - (1 - smoothing) * (own - top) - smoothing * even;
    for EACH(i, classes) {
        float gradient = expf((float)row[i] - top) / total - smoothing / classes - (i == target ? 1 - smoothing : 0);
        row[i] = T(gradient * share);
    }
}

// The sum of squares of each block's numbers.
template <typename T> __device__ void squares(const T *x, double *sums, size_t count) {
    double total = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
        double number = (double)x[i];
        total += number * number;
    }
    total = sum(total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// ---- Numbers: each thread works on some, one by one ----

#define ALL(i, count) (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < (count); i += (size_t)gridDim.x * blockDim.x)

// kind: 0 silu, 1 gelu, 2 gelu by the hyperbolic tangent.
__device__ float activation(unsigned kind, float x) {
    if (kind == 0) return x / (1 + expf(-x));
    if (kind == 1) return x * normcdff(x);
    return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}
__device__ float slope(unsigned kind, float x) {
    if (kind == 0) {
        float part = 1 / (1 + expf(-x));
        return part * (1 + x * (1 - part));
    }
    if (kind == 1) return normcdff(x) + x * 0.3989422804f * expf(-0.5f * x * x);
    float inner = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + inner) + 0.5f * x * (1 - inner * inner) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}

template <typename T> __device__ void gated(const T *gate, const T *up, T *y, size_t count, unsigned kind) {
    for ALL(i, count) y[i] = T(activation(kind, gate[i]) * (float)up[i]);
}
template <typename T>
__device__ void gated_backward(const T *gate, const T *up, const T *gradient, T *of_gate, T *of_up, size_t count, unsigned kind) {
    for ALL(i, count) {
        float x = gate[i], given = gradient[i];
        of_gate[i] = T(given * slope(kind, x) * (float)up[i]);
        of_up[i] = T(given * activation(kind, x));
    }
}

// Rotates pairs of (rows, heads, 2 half); cosines and sines are (positions, half).
template <typename T>
__device__ void rotary(const T *x, const float *cosines, const float *sines, T *y, size_t pairs, unsigned positions, unsigned heads,
                       unsigned half, unsigned interleaved, float direction) {
    for ALL(pair, pairs) {
        size_t head = pair / half, i = pair % half;
        size_t angle = head / heads % positions * half + i;
        size_t first = head * 2 * half + (interleaved ? 2 * i : i), second = first + (interleaved ? 1 : half);
        float a = x[first], b = x[second], cosine = cosines[angle], sine = sines[angle] * direction;
        y[first] = T(a * cosine - b * sine);
        y[second] = T(a * sine + b * cosine);
    }
}

// (count, a, b, width) to (count, b, a, width): separates heads from positions, or joins them.
template <typename T> __device__ void swapped(const T *x, T *y, size_t count, unsigned a, unsigned b, unsigned width) {
    for ALL(to, count) {
        size_t row = to / width, i = row % a, j = row / a % b, outer = row / a / b;
        y[to] = x[((outer * a + i) * b + j) * width + to % width];
    }
}

// Dropout: `ops::dropout::Mask`. Each element has 64 random bits of its line's key and its place.
template <typename T>
__device__ void dropped(const uint64_t *keys, const T *x, T *y, size_t count, size_t lines, size_t width, size_t before, size_t first,
                        size_t whole, uint64_t threshold, float scale) {
    for ALL(i, count) {
        size_t line = i / width, place = (before + line % lines) * whole + first + i % width;
        uint64_t z = keys[line / lines] + place * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        y[i] = (z ^ (z >> 31)) >> 32 >= threshold ? T((float)x[i] * scale) : T(0.0f);
    }
}

template <typename G>
__device__ void adam(const G *gradient, float *parameter, float *means, float *mean_squares, size_t count, float scale,
                     float penalty, float shrink, float fresh1, float beta2, float fresh2, float rate, float root, float eps) {
    for ALL(i, count) {
        float p = parameter[i], g = (float)gradient[i] * scale;
        g += p * penalty;
        float m = means[i] + (g - means[i]) * fresh1;
        float v = mean_squares[i] * beta2 + g * g * fresh2;
        means[i] = m;
        mean_squares[i] = v;
        parameter[i] = p * shrink + m * rate / (sqrtf(v) / root + eps);
    }
}

// ---- Names. Those of rows, whose threads wait for each other, begin with rows_ ----

#define KERNELS_OF(T, name)                                                                                                       \
    extern "C" __global__ void rows_rms_norm_##name(const T *x, const T *weight, T *y, unsigned width, float eps) {               \
        rms_norm(x, weight, y, width, eps);                                                                                       \
    }                                                                                                                             \
    extern "C" __global__ void rows_rms_norm_backward_##name(const T *x, const T *weight, const T *gradient, T *of_x,             \
                                                             float *of_weight, size_t rows, unsigned width, float eps) {          \
        rms_norm_backward(x, weight, gradient, of_x, of_weight, rows, width, eps);                                                \
    }                                                                                                                             \
    extern "C" __global__ void rows_layer_norm_##name(const T *x, const T *weight, const T *bias, T *y, unsigned width,           \
                                                      float eps) {                                                                \
        layer_norm(x, weight, bias, y, width, eps);                                                                               \
    }                                                                                                                             \
    extern "C" __global__ void rows_layer_norm_backward_##name(const T *x, const T *weight, const T *gradient, T *of_x,           \
                                                               float *of_parameters, size_t rows, unsigned width, float eps) {    \
        layer_norm_backward(x, weight, gradient, of_x, of_parameters, rows, width, eps);                                          \
    }                                                                                                                             \
    extern "C" __global__ void rows_column_sums_##name(const float *parts, T *sums, unsigned rows, unsigned width) {              \
        column_sums(parts, sums, rows, width);                                                                                    \
    }                                                                                                                             \
    extern "C" __global__ void rows_attention_weights_##name(T *scores, unsigned heads, unsigned queries, unsigned keys,          \
                                                             unsigned kind, unsigned window, float scale) {                       \
        attention_weights(nullptr, nullptr, scores, heads, queries, keys, kind, window, scale);                                   \
    }                                                                                                                             \
    extern "C" __global__ void rows_attention_weights_hidden_##name(const uint8_t *hidden, T *scores, unsigned heads,             \
                                                                    unsigned queries, unsigned keys, unsigned kind,               \
                                                                    unsigned window, float scale) {                               \
        attention_weights(nullptr, hidden, scores, heads, queries, keys, kind, window, scale);                                    \
    }                                                                                                                             \
    extern "C" __global__ void rows_attention_weights_documents_##name(const uint32_t *documents, T *scores, unsigned heads,      \
                                                                       unsigned queries, unsigned keys, unsigned kind,            \
                                                                       unsigned window, float scale) {                            \
        attention_weights(documents, nullptr, scores, heads, queries, keys, kind, window, scale);                                 \
    }                                                                                                                             \
    extern "C" __global__ void rows_attention_weights_documents_hidden_##name(                                                    \
        const uint32_t *documents, const uint8_t *hidden, T *scores, unsigned heads, unsigned queries, unsigned keys,             \
        unsigned kind, unsigned window, float scale) {                                                                            \
        attention_weights(documents, hidden, scores, heads, queries, keys, kind, window, scale);                                  \
    }                                                                                                                             \
    extern "C" __global__ void rows_attention_weights_backward_##name(const T *weights, T *gradients, unsigned queries,           \
                                                                      unsigned keys, unsigned kind, unsigned window,              \
                                                                      float scale) {                                              \
        attention_weights_backward(weights, gradients, queries, keys, kind, window, scale);                                       \
    }                                                                                                                             \
    extern "C" __global__ void rows_cross_entropy_##name(const uint32_t *targets, T *logits, float *losses, unsigned classes,     \
                                                         float smoothing, float share) {                                          \
        cross_entropy(targets, logits, losses, classes, smoothing, share);                                                        \
    }                                                                                                                             \
    extern "C" __global__ void rows_squares_##name(const T *x, double *sums, size_t count) { squares(x, sums, count); }           \
    extern "C" __global__ void activation_##name(const T *x, T *y, size_t count, unsigned kind) {                                 \
        for ALL(i, count) y[i] = T(activation(kind, x[i]));                                                                       \
    }                                                                                                                             \
    extern "C" __global__ void activation_backward_##name(const T *x, const T *gradient, T *of_x, size_t count, unsigned kind) {  \
        for ALL(i, count) of_x[i] = T((float)gradient[i] * slope(kind, x[i]));                                                    \
    }                                                                                                                             \
    extern "C" __global__ void gated_##name(const T *gate, const T *up, T *y, size_t count, unsigned kind) {                      \
        gated(gate, up, y, count, kind);                                                                                          \
    }                                                                                                                             \
    extern "C" __global__ void gated_backward_##name(const T *gate, const T *up, const T *gradient, T *of_gate, T *of_up,         \
                                                     size_t count, unsigned kind) {                                               \
        gated_backward(gate, up, gradient, of_gate, of_up, count, kind);                                                          \
    }                                                                                                                             \
    extern "C" __global__ void swapped_##name(const T *x, T *y, size_t count, unsigned a, unsigned b, unsigned width) {           \
        swapped(x, y, count, a, b, width);                                                                                        \
    }                                                                                                                             \
    extern "C" __global__ void dropped_##name(const uint64_t *keys, const T *x, T *y, size_t count, size_t lines, size_t width,   \
                                              size_t before, size_t first, size_t whole, uint64_t threshold, float scale) {       \
        dropped(keys, x, y, count, lines, width, before, first, whole, threshold, scale);                                         \
    }                                                                                                                             \
    extern "C" __global__ void rotary_##name(const T *x, const float *cosines, const float *sines, T *y, size_t pairs,            \
                                             unsigned positions, unsigned heads, unsigned half, unsigned interleaved,             \
                                             float direction) {                                                                   \
        rotary(x, cosines, sines, y, pairs, positions, heads, half, interleaved, direction);                                      \
    }                                                                                                                             \
    extern "C" __global__ void adam_##name(const T *gradient, float *parameter, float *means, float *mean_squares, size_t count,  \
                                           float scale, float penalty, float shrink, float fresh1, float beta2, float fresh2,     \
                                           float rate, float root, float eps) {                                                   \
        adam(gradient, parameter, means, mean_squares, count, scale, penalty, shrink, fresh1, beta2, fresh2, rate, root, eps);    \
    }

KERNELS_OF(float, f32)
KERNELS_OF(__half, f16)
KERNELS_OF(__nv_bfloat16, bf16)
