// One file of candle's kernels (KERNELS), with a table of those in it (NAMES).
#include KERNELS
#include <cstdint>
#include <tuple>
#include <utility>
#include "stand_in.h"

template <typename T> static T argument(void *at) {
    T value;
    memcpy(&value, at, sizeof value);
    if constexpr (std::is_pointer_v<T>) value = (T)on_host((const void *)value);
    return value;
}

template <auto Kernel> struct entry;
template <typename... A, void (*Kernel)(A...)> struct entry<Kernel> {
    static constexpr unsigned char sizes[] = {(unsigned char)sizeof(A)...};
    template <size_t... I> static void unpack(void **parameters, std::index_sequence<I...>) {
        Kernel(argument<std::remove_const_t<A>>(parameters[I])...);
    }
    static void call(void **parameters) { unpack(parameters, std::index_sequence_for<A...>()); }
    static constexpr stand_in_kernel named(const char *name) { return {name, sizes, (int)sizeof...(A), call}; }
};

static const stand_in_kernel table[] = {
#define KERNEL(name) entry<name>::named(#name),
#include NAMES
};

extern "C" void stand_in_register(const stand_in_kernel *first, size_t count);
__attribute__((constructor)) static void announce() { stand_in_register(table, sizeof table / sizeof *table); }
