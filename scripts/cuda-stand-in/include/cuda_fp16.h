// What candle's kernels use of NVIDIA's language, for a host's compiler: one thread of a block after the other.
#pragma once
#include <math.h>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <algorithm>
#include <type_traits>

#define __CUDA_ARCH__ 800
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __global__
#define __device__ inline
#define __host__
#define __forceinline__
#define __launch_bounds__(...)
// Blocks run one after the other on a thread.
#define __shared__ static thread_local

struct uint3_ { unsigned x, y, z; };
struct stand_in_place { uint3_ thread, block, block_dim, grid_dim; };
extern thread_local stand_in_place stand_in_current;
#define threadIdx stand_in_current.thread
#define blockIdx stand_in_current.block
#define blockDim stand_in_current.block_dim
#define gridDim stand_in_current.grid_dim

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Lets the block's other threads come here, too.
extern "C" void stand_in_sync(void);
extern "C" uint64_t stand_in_shuffle(uint64_t value, unsigned mask);
#define __syncthreads() stand_in_sync()
template <typename T> static inline T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = stand_in_shuffle(bits, mask);
    memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename T> static inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> static inline T max(T a, T b) { return a < b ? b : a; }
static inline size_t min(size_t a, unsigned b) { return b < a ? b : a; }
static inline size_t min(unsigned a, size_t b) { return b < a ? b : a; }
static inline float normcdff(float x) { return 0.5f * erfcf(-x * (float)M_SQRT1_2); }
static inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
#define __expf expf
#define __logf logf
static inline float fdividef(float a, float b) { return a / b; }
template <typename T> static inline T __ldg(const T *p) { return *p; }

// The threads of a block never run at the same time here, and blocks neither.
template <typename T, typename V> static inline T atomicAdd(T *at, V add) { T old = *at; *at = old + T(add); return old; }
template <typename T, typename V> static inline T atomicMax(T *at, V other) { T old = *at; if ((T)other > old) *at = (T)other; return old; }
template <typename T, typename V> static inline T atomicMin(T *at, V other) { T old = *at; if ((T)other < old) *at = (T)other; return old; }
template <typename T> static inline T atomicCAS(T *at, T expected, T value) { T old = *at; if (old == expected) *at = value; return old; }
template <typename To, typename From> static inline To stand_in_bits(From from) { To to; memcpy(&to, &from, sizeof to); return to; }
static inline float __uint_as_float(unsigned x) { return stand_in_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return stand_in_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return stand_in_bits<float>(x); }
static inline int __float_as_int(float x) { return stand_in_bits<int>(x); }
static inline double __longlong_as_double(long long x) { return stand_in_bits<double>(x); }
static inline long long __double_as_longlong(double x) { return stand_in_bits<long long>(x); }

// A float of 16 bits, rounded after each operation.
template <typename Storage> struct stand_in_half {
    uint16_t bits;
    stand_in_half() = default;
    template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>> stand_in_half(T x) : bits(Storage::narrow((float)x)) {}
    operator float() const { return Storage::widen(bits); }
    stand_in_half operator-() const { return stand_in_half(-(float)*this); }
#define OP(op)                                                                                                                    \
    friend stand_in_half operator op(stand_in_half a, stand_in_half b) { return stand_in_half((float)a op (float)b); }            \
    stand_in_half &operator op##=(stand_in_half b) { return *this = *this op b; }
    OP(+) OP(-) OP(*) OP(/)
#undef OP
#define OP(op) friend bool operator op(stand_in_half a, stand_in_half b) { return (float)a op (float)b; }
    OP(==) OP(!=) OP(<) OP(<=) OP(>) OP(>=)
#undef OP
};
struct stand_in_f16 {
    static uint16_t narrow(float x) { _Float16 h = (_Float16)x; uint16_t b; memcpy(&b, &h, 2); return b; }
    static float widen(uint16_t b) { _Float16 h; memcpy(&h, &b, 2); return (float)h; }
};
struct stand_in_bf16 {
    static uint16_t narrow(float x) {
        uint32_t b = stand_in_bits<uint32_t>(x);
        if (x != x) return (uint16_t)(b >> 16 | 0x40);
        return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
    }
    static float widen(uint16_t b) { return stand_in_bits<float>((uint32_t)b << 16); }
};
typedef stand_in_half<stand_in_f16> __half;
typedef stand_in_half<stand_in_bf16> __nv_bfloat16;
typedef __half half;
struct __half2 { __half x, y; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
static inline float __half2float(__half x) { return x; }
static inline __half __float2half(float x) { return x; }
static inline float __bfloat162float(__nv_bfloat16 x) { return x; }
static inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
#define __float2bfloat16_rn __float2bfloat16
static inline unsigned short __half_as_ushort(__half x) { return x.bits; }
static inline __half __ushort_as_half(unsigned short b) { __half x; x.bits = b; return x; }
#define EACH(H)                                                                                                                   \
    static inline bool __hisnan(H a) { return std::isnan((float)a); }                                                             \
    static inline H __hmax_nan(H a, H b) { return __hisnan(a) ? a : __hisnan(b) ? b : a < b ? b : a; }                            \
    static inline H __hmin_nan(H a, H b) { return __hisnan(a) ? a : __hisnan(b) ? b : b < a ? b : a; }                            \
    static inline H hsqrt(H a) { return sqrtf(a); }                                                                               \
    static inline H hcos(H a) { return cosf(a); }                                                                                 \
    static inline H hsin(H a) { return sinf(a); }                                                                                 \
    static inline H hlog(H a) { return logf(a); }                                                                                 \
    static inline H hexp(H a) { return expf(a); }                                                                                 \
    static inline H __habs(H a) { return fabsf(a); }
EACH(__half) EACH(__nv_bfloat16)
#undef EACH
static inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x + b.x, a.y + b.y}; }
static inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x * b.x, a.y * b.y}; }
static inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x - b.x, a.y - b.y}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {a.x, a.y}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
static inline float2 __half22float2(__half2 a) { return {a.x, a.y}; }

// Floats of 8 bits are nobody's here.
enum { __NV_E4M3 };
struct __nv_fp8_e4m3 {
    unsigned char __x;
    __nv_fp8_e4m3() = default;
    template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>> explicit __nv_fp8_e4m3(T) : __x(0) {}
    explicit __nv_fp8_e4m3(__half) : __x(0) {}
    explicit __nv_fp8_e4m3(__nv_bfloat16) : __x(0) {}
};
static inline __half __nv_cvt_fp8_to_halfraw(unsigned char, int) { return 0.0f; }
