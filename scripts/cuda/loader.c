/*
 * Opens NVIDIA's libraries when one of their functions is first called, so that the program starts where they are not.
 * `trampolines.py` makes the functions themselves and the tables below; `scripts/build-cuda.sh` puts all into archives with
 * the names of the libraries.
 *
 * A function of a library that is not there, or that an older version of it does not have, fails with one of the library's
 * error codes. Which library is missing, and why, is told by `comm::CudaLibrary`, which asks the same loader.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>

struct library {
    const char *soname;
    /* Its functions begin with this number. */
    unsigned first;
    void *handle;
    int is_asked_for;
};

extern struct library girandole_libraries[];
extern const unsigned girandole_library_count;
extern const char *const girandole_names[];
/* What is called in the place of a function that cannot be found. */
extern void *const girandole_missing[];
/* Where the trampolines jump to. */
extern void *girandole_slots[];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct library *library_of(unsigned function) {
    struct library *library = girandole_libraries;
    while (library + 1 < girandole_libraries + girandole_library_count && library[1].first <= function)
        library++;
    return library;
}

/* The address of a function, kept for the next call. */
__attribute__((visibility("hidden"))) void *girandole_find(unsigned function) {
    struct library *library = library_of(function);
    void *found = NULL;
    pthread_mutex_lock(&lock);
    if (!library->is_asked_for) {
        library->is_asked_for = 1;
        library->handle = dlopen(library->soname, RTLD_NOW | RTLD_LOCAL);
    }
    if (library->handle)
        found = dlsym(library->handle, girandole_names[function]);
    if (!found)
        found = girandole_missing[function];
    __atomic_store_n(&girandole_slots[function], found, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return found;
}
