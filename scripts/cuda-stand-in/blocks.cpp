// Runs the threads of a kernel's blocks, in turns on one thread of the host.
#include "cuda_fp16.h"
#include "stand_in.h"
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <map>
#include <string>
#include <ucontext.h>
#include <vector>

thread_local stand_in_place stand_in_current;

static std::map<std::string, const stand_in_kernel *> &kernels() {
    static std::map<std::string, const stand_in_kernel *> all;
    return all;
}

extern "C" void stand_in_register(const stand_in_kernel *first, size_t count) {
    for (size_t i = 0; i < count; i++) kernels()[first[i].name] = &first[i];
}

extern "C" const stand_in_kernel *stand_in_find(const char *name) {
    auto found = kernels().find(name);
    return found == kernels().end() ? nullptr : found->second;
}

// A thread of a block that has come to a barrier, or waits for its turn.
struct fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    jmp_buf at;
    bool begun, done;
    uint64_t value;
};

static const size_t STACK = 64 * 1024;
struct crew {
    std::vector<fiber> fibers;
    ucontext_t home;
    jmp_buf back;
    unsigned now;
    bool running = false;
    const stand_in_kernel *kernel;
    void **parameters;
};
static thread_local crew us;

static void body() {
    us.kernel->call(us.parameters);
    us.fibers[us.now].done = true;
    _longjmp(us.back, 1);
}

// Goes on with a fiber until it comes to the next barrier, or to its end.
static void go_on(unsigned index) {
    fiber &next = us.fibers[index];
    us.now = index;
    uint3_ size = stand_in_current.block_dim;
    stand_in_current.thread = {index % size.x, index / size.x % size.y, index / size.x / size.y};
    if (_setjmp(us.back)) return;
    if (next.begun) _longjmp(next.at, 1);
    next.begun = true;
    setcontext(&next.context);
}

extern "C" void stand_in_sync() {
    if (!us.running) {
        fprintf(stderr, "stand-in: a kernel's threads wait for each other where that was not expected\n");
        abort();
    }
    if (!_setjmp(us.fibers[us.now].at)) _longjmp(us.back, 1);
}

// The value that another thread of the block has here.
extern "C" uint64_t stand_in_shuffle(uint64_t value, unsigned mask) {
    unsigned other = us.now ^ mask;
    us.fibers[us.now].value = value;
    stand_in_sync();
    uint64_t theirs = other < us.fibers.size() ? us.fibers[other].value : value;
    stand_in_sync();
    return theirs;
}

static void together(unsigned threads) {
    us.fibers.resize(threads);
    for (fiber &each : us.fibers) {
        if (!each.stack) each.stack.reset(new char[STACK]);
        getcontext(&each.context);
        each.context.uc_stack.ss_sp = each.stack.get();
        each.context.uc_stack.ss_size = STACK;
        each.context.uc_link = nullptr;
        makecontext(&each.context, body, 0);
        each.begun = each.done = false;
    }
    us.running = true;
    for (bool left = true; left;) {
        left = false;
        for (unsigned i = 0; i < threads; i++) {
            if (us.fibers[i].done) continue;
            go_on(i);
            left |= !us.fibers[i].done;
        }
    }
    us.running = false;
}

// Those that use shared memory or look into each other's registers.
static bool waits(const std::string &name) {
    for (const char *prefix : {"fast_", "softmax", "rmsnorm", "layernorm", "asort", "rows_"})
        if (name.rfind(prefix, 0) == 0) return true;
    return false;
}

extern "C" void stand_in_launch(const stand_in_kernel *kernel, stand_in_dim grid, stand_in_dim block, void **parameters) {
    bool barriers = waits(kernel->name);
    stand_in_current.grid_dim = {grid.x, grid.y, grid.z};
    stand_in_current.block_dim = {block.x, block.y, block.z};
    us.kernel = kernel;
    us.parameters = parameters;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                stand_in_current.block = {x, y, z};
                if (barriers) {
                    together(block.x * block.y * block.z);
                    continue;
                }
                for (unsigned tz = 0; tz < block.z; tz++)
                    for (unsigned ty = 0; ty < block.y; ty++)
                        for (unsigned tx = 0; tx < block.x; tx++) {
                            stand_in_current.thread = {tx, ty, tz};
                            kernel->call(parameters);
                        }
            }
}
