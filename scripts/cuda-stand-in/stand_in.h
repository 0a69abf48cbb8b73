// What the stand-in's parts share. See build.sh.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Memory of the "device" is the host's. Its addresses are given out with this added, so that whoever looks at them on the
// host falls over at once, as with a real device.
#define DEVICE_TAG ((uint64_t)1 << 60)
static inline int is_on_device(const void *at) { return ((uint64_t)at & DEVICE_TAG) != 0; }
static inline void *on_host(const void *at) { return at ? (void *)((uint64_t)at & ~DEVICE_TAG) : NULL; }

typedef struct { unsigned x, y, z; } stand_in_dim;

// One of candle's kernels, compiled for the host.
struct stand_in_kernel {
    const char *name;
    // The bytes of each parameter.
    const unsigned char *sizes;
    int count;
    void (*call)(void **parameters);
};
// NULL where there is none of this name.
const struct stand_in_kernel *stand_in_find(const char *name);
// Runs it to its end, on this thread.
void stand_in_launch(const struct stand_in_kernel *kernel, stand_in_dim grid, stand_in_dim block, void **parameters);

// Puts work at the end of a stream; `free_argument` is called after it, or NULL.
void stand_in_enqueue(void *stream, void (*work)(void *), void *argument);

#ifdef __cplusplus
}
#endif
